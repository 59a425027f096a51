"""The receipt-store's tables: the only module that knows SQL. Every call is one commit; decisions are made elsewhere.

Takes any order of items and sorts them by key, but a key only once per call. Whatever raises leaves nothing stored. Each effect is fenced in
its statement (by revision, or by lease and dispatch), so a call that is repeated after an unknown outcome changes nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, TypeVar

import asyncpg
import msgspec

from rowmill.runtime.db import Connection, Database, Queries
from rowmill_contracts.budgets import Limits
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.receipts import Claim
from rowmill_contracts.shards import ShardLease
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.charges import running_totals
from rowmill_receipt_store.leases import Condemned, Found, Grant
from rowmill_receipt_store.reading import found_in
from rowmill_receipt_store.shards import spending_term

SCHEMA = "receipts"

QUERIES = Queries.of(__package__ or "rowmill_receipt_store")

RunState = Literal["running", "halted", "stopped"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as its holder names it. ``dispatch`` 0: not confirmed. ``batch_id``, ``alone``, ``shard`` and ``term`` (None: bound to no
    shard) matter to confirmations only, ``presence`` to renewals.
    """

    key: bytes
    lease_id: str
    run_id: str = ""
    dispatch: int = 0
    shard: int | None = None
    term: int | None = None
    batch_id: str = ""
    presence: str = ""
    alone: bool = False


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A result to be stored under its lease and dispatch."""

    key: bytes
    lease_id: str
    dispatch: int
    run_id: str
    output: bytes | memoryview
    no_result: bool
    cost: Decimal


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A failure to be stored under its lease and dispatch. ``refund``: it cost nothing. ``given_up``: what was not claimed, instead of a lease."""

    key: bytes
    lease_id: str
    dispatch: int
    run_id: str
    becomes: Literal["failed", "released", "outcome_unknown"]
    failure: ToolFailure
    refund: bool
    given_up: Claim | None = None


class DispatchCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatch cost after its lease moved. ``spent`` None: what was reserved; ``refund``: nothing."""

    key: bytes
    run_id: str
    dispatch: int
    spent: Decimal | None = None
    refund: bool = False


class Sought(msgspec.Struct, frozen=True):
    """A key to be read, for a run, a shard and a presence."""

    key: bytes
    run_id: str = ""
    shard: int | None = None
    presence: str = ""


class RunStanding(msgspec.Struct, frozen=True):
    """How a run stands, and under which decision of admission (0: none that was numbered)."""

    state: RunState
    reason: str
    decision: int


ItemT = TypeVar("ItemT", Lease, Completed, Failed, DispatchCost, Sought)


class Store:
    """``clock_offset``: seconds added to the database's clock in every statement; zero but in tests, which move it to see leases end."""

    def __init__(
        self,
        database: Database,
        *,
        queued_lease: float,
        running_lease: float,
        shard_lease: float,
        answer_bytes: int,
        shard_grace: float = 0.0,
        unsent_wait: float = 120.0,
    ) -> None:
        self._database = database
        self._queued = timedelta(seconds=queued_lease)
        self._running = timedelta(seconds=running_lease)
        self._shard = timedelta(seconds=shard_lease)
        self._grace = timedelta(seconds=shard_grace)
        self._answer_bytes = answer_bytes
        self._unsent_wait = timedelta(seconds=unsent_wait)
        self.clock_offset = 0.0

    @property
    def _offset(self) -> timedelta:
        return timedelta(seconds=self.clock_offset)

    # ---- claims -----------------------------------------------------------------------------------------------------------------------

    async def load(self, asked: Sequence[Sought], *, bodies: bool, open_charges: bool = False) -> dict[bytes, Found]:
        """What is stored for each key. With ``bodies``, outputs are read as long as together they are within the answer's bytes, the first in
        any case. With ``open_charges``, what of its run's budgets may come back is added up, else it is taken for nothing.
        """
        asked = _by_key(asked)
        rows = await self._database.fetch(
            QUERIES["load"],
            self._offset,
            [item.key for item in asked],
            [item.run_id for item in asked],
            [item.shard for item in asked],
            self._answer_bytes if bodies else -1,
            [item.presence or None for item in asked],
            self._unsent_wait if open_charges else None,
        )
        return {row["key"]: found_in(row) for row in rows}

    async def claim(self, grants: Sequence[Grant]) -> dict[bytes, int]:
        """Store leases; ``grants`` come in the order in which budgets serve them. Answers the dispatch number of each that was stored,
        0 where it is not confirmed: where that was not asked for, or a budget pays for it.

        Not stored, because something changed since the decision or stands against it: the receipt, the run's state or budget, the shard's term.
        """
        through = running_totals([(grant.wanted.claim.run_id, grant.net) for grant in grants])
        pairs = sorted(zip(grants, through, strict=True), key=lambda pair: pair[0].wanted.key)
        wanted = [grant.wanted for grant, _ in pairs]
        claims = [item.claim for item in wanted]
        requests = [item.request for item in wanted]
        former = [(grant.wanted.key, grant.former) for grant, _ in pairs if grant.former is not None]
        runs = {claim.run_id for claim in claims} | {charge.run_id for _, charge in former}
        rows = await self._database.fetch(
            QUERIES["claim"],
            self._offset,
            self._queued,
            self._running,
            sorted(runs),
            [item.key for item in wanted],
            [grant.revision for grant, _ in pairs],
            [grant.dispatch for grant, _ in pairs],
            [grant.confirms for grant, _ in pairs],
            [claim.lease_id for claim in claims],
            [request.holder for request in requests],
            [claim.run_id for claim in claims],
            [claim.caller for claim in claims],
            [claim.org for claim in claims],
            [claim.tool for claim in claims],
            [claim.effect for claim in claims],
            [request.shard for request in requests],
            [spending_term(request.shard, request.term) for request in requests],
            [str(claim.cost) for claim in claims],
            [grant.took_over for grant, _ in pairs],
            [grant.spend.calls for grant, _ in pairs],
            [grant.spend.retries for grant, _ in pairs],
            [str(total.money) for _, total in pairs],
            [total.calls for _, total in pairs],
            [total.retries for _, total in pairs],
            [key for key, _ in former],
            [charge.run_id for _, charge in former],
            [charge.dispatch for _, charge in former],
            [charge.fate for _, charge in former],
            [str(charge.held.money) for _, charge in former],
            [charge.held.calls for _, charge in former],
            [charge.held.retries for _, charge in former],
            [request.presence or None for request in requests],
            [claim.run_term for claim in claims],
            [grant.deaths for grant, _ in pairs],
            [charge.counted for _, charge in former],
        )
        return {row[0]: row[1] for row in rows}

    async def doubt(self, revisions: dict[bytes, int]) -> set[bytes]:
        """Mark running receipts, as of these revisions, as of unknown outcome. Answers the keys of which that is so now."""
        keys = sorted(revisions)
        return _keys(await self._database.fetch(QUERIES["doubt"], keys, [revisions[key] for key in keys]))

    async def condemn(self, verdicts: Mapping[bytes, Condemned]) -> set[bytes]:
        """Fail calls that their gateways die of, as of these revisions. Answers the keys of which that is so now."""
        keys = sorted(verdicts)
        named = [verdicts[key] for key in keys]
        rows = await self._database.fetch(
            QUERIES["condemn"],
            self._offset,
            keys,
            [verdict.revision for verdict in named],
            [verdict.deaths for verdict in named],
            [msgspec.json.encode(verdict.failure) for verdict in named],
            [verdict.run_id for verdict in named],
        )
        return _keys(rows)

    # ---- what follows a claim ---------------------------------------------------------------------------------------------------------

    async def confirm(self, leases: Sequence[Lease]) -> dict[bytes, int]:
        """Right before dispatch. Answers the dispatch number of each lease that runs now; the others are lost, halted or of an older term."""
        leases = _by_key(leases)
        rows = await self._database.fetch(
            QUERIES["confirm"],
            self._offset,
            self._running,
            [lease.key for lease in leases],
            [lease.lease_id for lease in leases],
            [lease.shard for lease in leases],
            [lease.term for lease in leases],
            [lease.batch_id for lease in leases],
            [lease.alone for lease in leases],
            _runs(leases),
        )
        return {row[0]: row[1] for row in rows}

    async def renew(self, leases: Sequence[Lease]) -> set[bytes]:
        """Answers the keys whose lease is still held, for a whole life from now."""
        leases = _by_key(leases)
        keys, lease_ids = [lease.key for lease in leases], [lease.lease_id for lease in leases]
        presences = [lease.presence or None for lease in leases]
        return _keys(await self._database.fetch(QUERIES["renew"], self._offset, self._queued, self._running, keys, lease_ids, presences))

    async def complete(self, results: Sequence[Completed]) -> dict[bytes, float]:
        """Answers when each result was stored (seconds since the epoch); of the others the lease has moved, or they are stored already."""
        results = _by_key(results)
        rows = await self._database.fetch(
            QUERIES["complete"],
            self._offset,
            _runs(results),
            [result.key for result in results],
            [result.lease_id for result in results],
            [result.dispatch for result in results],
            [result.output for result in results],
            [result.no_result for result in results],
            [str(result.cost) for result in results],
        )
        return {row[0]: row[1] for row in rows}

    async def fail(self, failures: Sequence[Failed]) -> set[bytes]:
        """Answers the keys whose failure was stored; of the others the lease has moved, or they are stored already."""
        failures = _by_key(failures)
        rows = await self._database.fetch(
            QUERIES["fail"],
            self._offset,
            _runs(failures),
            [item.key for item in failures],
            [item.lease_id for item in failures],
            [item.dispatch for item in failures],
            [item.becomes for item in failures],
            [msgspec.json.encode(item.failure) for item in failures],
            [item.refund for item in failures],
        )
        return _keys(rows)

    async def give_up(self, failures: Sequence[Failed]) -> None:
        """Keep failures of calls that nothing was claimed for."""
        failures = _by_key(failures)
        claims = [item.given_up for item in failures if item.given_up is not None]
        await self._database.execute(
            QUERIES["give_up"],
            self._offset,
            [item.key for item in failures],
            [item.run_id for item in failures],
            [msgspec.json.encode(item.failure) for item in failures],
            [claim.caller for claim in claims],
            [claim.org for claim in claims],
            [claim.tool for claim in claims],
            [claim.effect for claim in claims],
        )

    async def release(self, leases: Sequence[Lease]) -> set[bytes]:
        """Answers the keys whose unsent claim was given back now. What the others of them have reserved is refunded, too."""
        leases = _by_key(leases)
        rows = await self._database.fetch(
            QUERIES["release"],
            _runs(leases),
            [lease.key for lease in leases],
            [lease.lease_id for lease in leases],
            [lease.dispatch for lease in leases],
            [lease.run_id for lease in leases],
        )
        return _keys(rows)

    async def settle_charges(self, costs: Sequence[DispatchCost]) -> None:
        """Settle the charges of dispatches whose lease has moved, each once."""
        costs = _by_key(costs)
        await self._database.execute(
            QUERIES["settle_charges"],
            _runs(costs),
            [item.run_id for item in costs],
            [item.key for item in costs],
            [item.dispatch for item in costs],
            [None if item.spent is None else str(item.spent) for item in costs],
            [item.refund for item in costs],
        )

    async def tallies(self, run_ids: Sequence[str]) -> list[RunCharges]:
        """What each of these runs was charged so far."""
        rows = await self._database.fetch(QUERIES["tallies"], sorted(set(run_ids)))
        found = {
            row["run_id"]: RunCharges(
                run_id=row["run_id"],
                version=row["version"],
                cost=row["charged"],
                calls=row["calls"],
                counted_calls=row["counted_calls"] or 0,
                counted_retries=row["counted_retries"] or 0,
            )
            for row in rows
        }
        return [found.get(run_id) or RunCharges(run_id=run_id) for run_id in run_ids]

    # ---- shards and runs --------------------------------------------------------------------------------------------------------------

    async def lease_shards(self, holder: str, shards: Sequence[int]) -> list[ShardLease]:
        """Take or renew shards; those that stay another's are answered with the seconds for which that one's lease still runs."""
        asked = sorted(set(shards))
        rows = await self._database.fetch(QUERIES["lease_shards"], self._offset, self._shard, self._grace, holder, asked)
        found = {row["shard"]: ShardLease(shard=row["shard"], held=row["held"], term=row["term"], seconds=row["seconds"]) for row in rows}
        return [found[shard] for shard in shards]

    async def release_shards(self, holder: str, shards: Sequence[int], terms: Sequence[int] = ()) -> list[ShardLease]:
        """Give shards up. What this holder does not hold, or holds under another of ``terms`` (0, or none: any), stays as it is."""
        named = dict(sorted(zip(shards, terms or [0] * len(shards), strict=True)))
        await self._database.execute(QUERIES["release_shards"], self._offset, holder, list(named), list(named.values()))
        return [ShardLease(shard=shard, held=False) for shard in shards]

    async def halt_run(
        self, run_id: str, state: RunState, *, reason: str, limits: Limits, deadline: float | None, decision: int, retry: bool
    ) -> RunStanding:
        """Set a run's state and budgets, unless a newer decision is stored; a stopped run stays stopped. Claims under way end first, later ones
        see it. ``retry``: failures on record count no more.
        """

        async def work(connection: Connection) -> RunStanding:
            await connection.execute(QUERIES["bar_claims"])
            row: Any = await connection.fetchrow(
                QUERIES["halt_run"],
                run_id,
                state,
                reason,
                limits.money,
                decision,
                limits.calls,
                limits.retries,
                limits.wall_time,
                deadline,
                retry,
                self._offset,
            )
            return RunStanding(row["state"], row["reason"], row["decision"])

        return await self._database.transact(work)


def _by_key(items: Sequence[ItemT]) -> list[ItemT]:
    return sorted(items, key=lambda item: item.key)


def _runs(items: Iterable[Lease | Completed | Failed | DispatchCost]) -> list[str]:
    return sorted({item.run_id for item in items})


def _keys(rows: Iterable[asyncpg.Record]) -> set[bytes]:
    return {row[0] for row in rows}
