"""Receipts on a real database, and a caller who asks them tersely."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from itertools import count
from typing import Any, Literal

import msgspec
import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.receipts import Claim, ClaimAnswer, ClaimReceipts, ConfirmAnswer, HaltRun, RunHalted, StoreAnswer
from rowmill_contracts.shards import LeaseShard, ShardLease
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.leases import Wanted
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.shards import spending_term
from rowmill_receipt_store.store import SCHEMA, Completed, Failed, Lease, Store

QUEUED, RUNNING, SHARD = 10.0, 60.0, 6.0
OUTPUT_LIMIT = 4096
FAILURE = ToolFailure(tool="hunter.find", code="404", message="not found")

_shards = count(1)


class Caller:
    """Asks in the name of one run, under one lease id; `but` gives another caller. Singular calls ask for one key."""

    def __init__(
        self,
        receipts: Receipts,
        *,
        run: str,
        lease: str,
        shard: int | None = None,
        term: int | None = None,
        presence: str = "",
        counts_deaths: bool = False,
        **claim: Any,
    ) -> None:
        self.receipts = receipts
        self.run = run
        self.lease = lease
        self.shard = shard
        self.term = term
        self.presence = presence
        self.counts_deaths = counts_deaths
        self.facts: dict[str, Any] = {"tool": "hunter.find", "effect": "read", "started_at": time.time(), "caller": f"leads/{lease}"} | claim

    def but(self, **changes: Any) -> Caller:
        own = {name: getattr(self, name) for name in ("run", "lease", "shard", "term", "presence", "counts_deaths")}
        return Caller(self.receipts, **(own | self.facts | changes))

    def wanted(self, key: bytes, *, confirm: bool = False, only_cached: bool = False, **claim: Any) -> Wanted:
        facts = {"lease_id": self.lease, "run_id": self.run} | self.facts | claim
        request = ClaimReceipts(
            holder="gateway",
            claims=[],
            confirm=confirm,
            only_cached=only_cached,
            shard=self.shard,
            term=self.term,
            presence=self.presence,
            counts_deaths=self.counts_deaths,
        )
        return Wanted(key, Claim(key=key.hex(), **facts), request)

    async def claims(self, keys: Sequence[bytes], *, confirm: bool = False, only_cached: bool = False, **claim: Any) -> list[ClaimAnswer]:
        """With ``confirm``, what is claimed is confirmed as well: by its claim, or where a budget pays for it right after."""
        answers = await self.receipts.claim([self.wanted(key, confirm=confirm, only_cached=only_cached, **claim) for key in keys])
        late = [place for place, answer in enumerate(answers) if confirm and answer.state == "granted" and not answer.dispatch and not answer.alone]
        for place, told in zip(late, await self.receipts.confirm([self.held(keys[place]) for place in late]) if late else [], strict=True):
            answers[place] = msgspec.structs.replace(answers[place], dispatch=told.dispatch)
        return answers

    async def claim(self, key: bytes, *, confirm: bool = False, only_cached: bool = False, **claim: Any) -> ClaimAnswer:
        return (await self.claims([key], confirm=confirm, only_cached=only_cached, **claim))[0]

    def held(self, key: bytes, dispatch: int = 0, *, alone: bool = False) -> Lease:
        return Lease(
            key=key,
            lease_id=self.lease,
            run_id=self.run,
            dispatch=dispatch,
            shard=self.shard,
            term=spending_term(self.shard, self.term),
            batch_id="batch",
            alone=alone,
        )

    async def confirm(self, key: bytes, *, alone: bool = False) -> ConfirmAnswer:
        return (await self.receipts.confirm([self.held(key, alone=alone)]))[0]

    async def renew(self, key: bytes) -> bool:
        return (await self.receipts.renew([self.held(key)]))[0]

    async def release(self, key: bytes, dispatch: int = 0) -> bool:
        return (await self.receipts.release([self.held(key, dispatch)]))[0]

    def result(self, key: bytes, dispatch: int = 1, output: bytes = b'{"raw":1}', cost: str = "0", *, no_result: bool = False) -> Completed:
        return Completed(key=key, lease_id=self.lease, dispatch=dispatch, run_id=self.run, output=output, no_result=no_result, cost=Decimal(cost))

    async def complete(self, key: bytes, dispatch: int = 1, output: bytes = b'{"raw":1}', cost: str = "0") -> StoreAnswer:
        return (await self.receipts.complete([self.result(key, dispatch, output, cost)]))[0]

    async def fail(
        self, key: bytes, dispatch: int = 1, *, becomes: Literal["failed", "released", "outcome_unknown"] = "failed", refund: bool = False
    ) -> StoreAnswer:
        failed = Failed(key=key, lease_id=self.lease, dispatch=dispatch, run_id=self.run, becomes=becomes, failure=FAILURE, refund=refund)
        return (await self.receipts.fail([failed]))[0]

    async def halt(self, action: Literal["stop", "halt", "resume"], budget: str | None = None, **facts: Any) -> str:
        return (await self.decided(action, budget=None if budget is None else Decimal(budget), **facts)).state

    async def decided(self, action: Literal["stop", "halt", "resume"], **facts: Any) -> RunHalted:
        return await self.receipts.halt_run(HaltRun(run_id=self.run, action=action, **facts))

    async def lease_shard(self, holder: str, shard: int, *, release: bool = False, term: int = 0) -> ShardLease:
        request = LeaseShard(holder=holder, shards=[shard], release=release, terms=[term] if term else [])
        return (await self.receipts.lease_shards(request)).shards[0]


class Books:
    """Looks into the tables: what is booked for whom."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def charged(self, run: str) -> Decimal | None:
        """What stands on the run's account; None: it has none."""
        row = await self._database.fetchrow("SELECT charged FROM runs WHERE run_id = $1", run)
        return None if row is None else row[0]

    async def counted(self, run: str) -> tuple[int, int]:
        """Calls and retries that stand on the run's account."""
        row = await self._database.fetchrow("SELECT calls, retries FROM runs WHERE run_id = $1", run)
        assert row is not None
        return row["calls"], row["retries"]

    async def reason(self, run: str) -> str:
        """Why the run stands as it does."""
        row = await self._database.fetchrow("SELECT reason FROM runs WHERE run_id = $1", run)
        return "" if row is None else row[0]

    async def charges(self, run: str) -> list[tuple[int, Decimal, Decimal | None, bool]]:
        """(dispatch, reserved, spent, unknown) of each of the run's charges."""
        sql = "SELECT dispatch, reserved, spent, unknown FROM charges WHERE run_id = $1 ORDER BY key, dispatch"
        return [tuple(row) for row in await self._database.fetch(sql, run)]

    async def balanced(self, run: str) -> bool:
        """The account is the sum of the charges, of each kind; and those of claims that are not confirmed are said to be unsent, no others."""
        sql = "SELECT coalesce(sum(coalesce(spent, reserved)), 0), coalesce(sum(calls), 0), coalesce(sum(retries), 0) FROM charges WHERE run_id = $1"
        row = await self._database.fetchrow(sql, run)
        unsent = """
            SELECT count(*) FROM charges c LEFT JOIN receipts r ON r.key = c.key
            WHERE c.run_id = $1 AND c.unsent <> coalesce(r.run_id = $1 AND r.state = 'queued' AND c.dispatch = r.dispatch + 1, false)
        """
        [[wrong]] = await self._database.fetch(unsent, run)
        assert wrong == 0
        return row is not None and tuple(row) == (await self.charged(run), *await self.counted(run))

    async def tallied(self, run: str) -> tuple[Decimal, int]:
        """What the run is told to have been charged: money, and calls."""
        row = await self._database.fetchrow("SELECT coalesce(sum(charged), 0), coalesce(sum(calls), 0) FROM tallies WHERE run_id = $1", run)
        assert row is not None
        return row[0], row[1]

    async def mistold(self) -> list[str]:
        """Runs of whose charges another sum is told."""
        sql = """
            SELECT run_id FROM (SELECT run_id, sum(coalesce(spent, reserved)) AS charged FROM charges GROUP BY run_id) AS c
            FULL JOIN (SELECT run_id, sum(charged) AS told FROM tallies GROUP BY run_id) AS t USING (run_id)
            WHERE run_id LIKE 'run-%' AND coalesce(charged, 0) <> coalesce(told, 0)
        """
        return [row[0] for row in await self._database.fetch(sql)]

    async def state(self, key: bytes) -> str:
        row = await self._database.fetchrow("SELECT state FROM receipts WHERE key = $1", key)
        return "" if row is None else row[0]


def new_key() -> bytes:
    return secrets.token_bytes(32)


def new_keys(number: int) -> list[bytes]:
    return [new_key() for _ in range(number)]


def new_run() -> str:
    return f"run-{secrets.token_hex(6)}"


@pytest.fixture
def key() -> bytes:
    return new_key()


@pytest.fixture
def shard() -> int:
    """A shard that no other test of the module uses."""
    return next(_shards)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """After each test, whatever it did: what is told of each run is the sum of its charges."""
    found = await Database.connect(database_url, schema=SCHEMA, server_settings=SERVER_SETTINGS)
    await found.migrate("rowmill_receipt_store")
    yield found
    mistold = await Books(found).mistold()
    await found.close()
    assert mistold == []


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=2 * OUTPUT_LIMIT)


@pytest.fixture
def receipts(store: Store) -> Receipts:
    return Receipts(store, held_poll=0.25, output_limit=OUTPUT_LIMIT)


@pytest.fixture
def ann(receipts: Receipts) -> Caller:
    """A caller for one run."""
    return Caller(receipts, run=new_run(), lease=f"ann-{secrets.token_hex(4)}")


@pytest.fixture
def bob(receipts: Receipts) -> Caller:
    """A caller for another run."""
    return Caller(receipts, run=new_run(), lease=f"bob-{secrets.token_hex(4)}")


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database)
