"""The requests of a history: made, heard or not, and held against what must be answered."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import msgspec

from rowmill_contracts.budgets import Limits
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import Claim, ClaimReceipts, HaltRun, ReplayReceipt, SettleReceipt
from rowmill_contracts.shards import LeaseShard
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.leases import Wanted
from rowmill_receipt_store.store import Completed, Failed, Lease

from .protocol_model import PRESENCE, QUEUED, RUNNING, KeyLedger, Ledger, RunLedger, Told
from .world import World

EFFECTS = ("read", "idempotent", "non_idempotent")
COSTS = (Decimal(0), Decimal("0.01"), Decimal("0.03"))
OUTPUT_LIMIT = 64
LIMITS = (
    None,
    Limits(money=Decimal("0.01")),
    Limits(calls=2, retries=1),
    Limits(money=Decimal("0.04")),
    Limits(money=Decimal("0.09"), calls=4),
    Limits(retries=0, wall_time=9_000),
    Limits(money=Decimal("0.03"), calls=3, retries=2, wall_time=40_000),
    Limits(money=Decimal("0.09")),
)
FAILURE = ToolFailure(tool="hunter.find", code="http_400", message="no")

_histories = itertools.count()


@dataclass
class Run:
    """``term``: of its body."""

    run_id: str
    started_at: float
    term: int = 1


Request = Callable[[bool], Awaitable[None]]
"""Makes its request; with False nobody hears the answer."""


class Requests:
    """What a history has done so far, and the requests that it can make."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.name = f"{next(_histories)}"
        self.keys = [hashlib.sha256(f"{self.name}-{number}".encode()).digest() for number in range(len(EFFECTS))]
        self.ledger = Ledger({key: KeyLedger(effect) for key, effect in zip(self.keys, EFFECTS, strict=True)})
        self.runs: list[Run] = []
        self.terms: dict[tuple[str, int], int] = {}
        self.presences: dict[str, str] = {}
        self.leases: list[Told] = []
        self.past: list[Request] = []
        self.numbers = itertools.count()
        self.decided: dict[str, Limits] = {}
        self.deaths: Counter[str] = Counter()

    def _now(self) -> float:
        return time.time() + self.world.store.clock_offset

    def _new_run(self) -> Run:
        run = Run(f"run-{self.name}-{next(self.numbers)}", self._now())
        if len(self.runs) < 3:
            self.runs.append(run)
        self.ledger.runs[run.run_id] = RunLedger()
        self.ledger.bodies[run.run_id] = run.term
        self.decided[run.run_id] = Limits()
        return run

    def _shard(self, shard: int) -> int:
        return int(self.name) * 2 + shard

    def _halting(self, run: Run, action: Literal["stop", "halt", "resume"], limits: Limits) -> Request:
        """A decision, taken now: numbered, and whole."""
        known = self.ledger.runs[run.run_id]
        known.decided += 1
        self.decided[run.run_id] = limits
        deadline = None if limits.wall_time is None else self._now() + limits.wall_time
        request = HaltRun(run_id=run.run_id, action=action, budget=limits, deadline=deadline, decision=known.decided)

        async def ask(_heard: bool) -> None:
            answer = await self.world.receipts.halt_run(request)
            older = request.decision < known.decision
            newer = known.arrived(request)
            self.world.answers["decision " + ("newer" if newer else "older" if older else "again")] += 1
            assert (answer.state, answer.superseded) == (known.state, older)
            if answer.state != "running":
                self.ledger.end_unsent(run.run_id)

        return ask

    def _deciding(self, key: bytes, what: str) -> Request:
        """An operator who looks, and decides on what is of unknown outcome then."""

        async def ask(_heard: bool) -> None:
            ledger = self.ledger.keys[key]
            name = key.hex()[:16]
            row = await self.world.look.fetchrow("SELECT state, dispatch FROM receipts WHERE key = $1", key)
            if row is None or row["state"] != "outcome_unknown":
                if what == "replay":
                    assert (await self.world.operating.replay(ReplayReceipt(receipt=name))).state in {"absent", "not_unknown", "decided"}
                return
            for lease in ledger.told.values():
                lease.until = 0.0
            dispatch = row["dispatch"]
            ledger.settled.add(dispatch)
            ledger.paid.add(dispatch)
            if what == "replay":
                settled = await self.world.operating.replay(ReplayReceipt(receipt=name))
            elif what == "completed":
                ledger.outputs[dispatch] = b'{"raw":"by hand"}'
                settled = await self.world.operating.settle(SettleReceipt(receipt=name, outcome="completed", output=msgspec.Raw(b'"by hand"')))
            else:
                settled = await self.world.operating.settle(SettleReceipt(receipt=name, outcome="failed", message="no trace of it"))
            self.world.answers[f"operator {what} {settled.state}"] += 1
            assert settled.state == "decided"
            if what == "completed":
                assert settled.receipt is not None
                assert settled.receipt.completed_at is not None
                ledger.newest = (dispatch, settled.receipt.completed_at)

        return ask

    def _sweeping(self) -> Request:
        """The owner's look at claims whose holders vanished."""

        async def ask(_heard: bool) -> None:
            self.world.sweep.clock_offset = self.world.store.clock_offset
            self.world.answers["swept"] += await self.world.sweep.look()
            await self.ledger.swept(self.world.look, self._now(), QUEUED)

        return ask

    def _leasing(self, holder: str, shard: int, *, release: bool) -> Request:
        deaths = self.deaths[holder]

        async def ask(heard: bool) -> None:
            number = self._shard(shard)
            before = await self.world.look.fetchrow("SELECT holder, term FROM shards WHERE shard = $1", number)
            lease = (await self.world.receipts.lease_shards(LeaseShard(holder=holder, shards=[number], release=release))).shards[0]
            if lease.held and before is not None and before["holder"] not in {None, holder}:
                self.ledger.ended[number] = before["term"]
            if heard and lease.held and self.deaths[holder] == deaths:
                self.terms[holder, shard] = lease.term

        return ask

    def _keeping(self, holder: str, *, leave: bool) -> Request:
        """A holder says that it is there, under a new name where it has none, or that it goes."""
        name, deaths = self.presences.get(holder) or f"{holder}-{self.name}-{next(self.numbers)}", self.deaths[holder]

        async def ask(heard: bool) -> None:
            before = self._now()
            if leave:
                self.ledger.there[name] = 0.0
            answer = await self.world.presences.keep(KeepPresence(presence=name, leave=leave))
            self.world.answers["presence held" if answer.held else "presence over"] += 1
            self.ledger.there.setdefault(name, 0.0)
            await self.ledger.look_for_presences(self.world.look, self._now())
            assert answer.held == (name not in self.ledger.gone)
            if not heard or self.deaths[holder] != deaths:
                return
            if answer.held:
                self.presences[holder] = name
                self.ledger.there[name] = max(self.ledger.there[name], before + PRESENCE)
            elif self.presences.get(holder) == name:
                del self.presences[holder]

        return ask

    def _claiming(
        self,
        keys: list[bytes],
        run: Run,
        holder: str,
        shard: int | None,
        *,
        confirm: bool,
        cost: Decimal,
        force: bool = False,
        only_cached: bool = False,
        step: bool = False,
    ) -> Request:
        term = None if shard is None else self.terms.get((holder, shard))
        number = None if shard is None else self._shard(shard)
        lease_id, deaths = f"{holder}-{next(self.numbers)}", self.deaths[holder]
        presence = self.presences.get(holder, "") if step else ""
        run_term = run.term if step else None
        request = ClaimReceipts(
            holder=holder,
            claims=[],
            shard=number,
            term=term,
            confirm=confirm,
            only_cached=only_cached,
            presence=presence,
            counts_deaths=not step,
        )

        def wanted(key: bytes) -> Wanted:
            effect: Any = self.ledger.keys[key].effect
            claim = Claim(
                key=key.hex(),
                lease_id=lease_id,
                run_id=run.run_id,
                tool="hunter.find",
                effect=effect,
                started_at=run.started_at,
                force=force,
                reusable=effect == "read",
                cost=cost,
                run_term=run_term,
            )
            return Wanted(key, claim, request)

        async def ask(heard: bool) -> None:
            before = self._now()
            served = {key for key in keys if self._served(key, run, force=force)}
            failed = {key for key in keys if run.run_id in self.ledger.keys[key].failed_in}
            answers = await self.world.receipts.claim([wanted(key) for key in keys])
            await self.ledger.look_for_presences(self.world.look, self._now())
            for key, answer in zip(keys, answers, strict=True):
                self.world.answers[f"claim {answer.state}"] += 1
                self.world.answers["taken over"] += answer.took_over
                if answer.state == "completed":
                    assert bytes(answer.output) == self.ledger.keys[key].outputs[answer.dispatch]
                if answer.failure is not None and answer.failure.code == "poison":
                    self.world.answers["condemned"] += 1
                    assert self.ledger.keys[key].alone, "condemned, and never sent alone"
                    self.ledger.keys[key].failed_in.add(run.run_id)
                if answer.state != "granted":
                    continue
                assert key not in served, "a call was granted though a completed output serves it"
                assert key not in failed, "a call was granted though it failed for good in this run"
                assert not self.ledger.runs[run.run_id].late(before), "a call was granted though the run's wall time was over"
                told = self.ledger.keys[key].told.get(lease_id) or Told(
                    key, lease_id, run.run_id, holder, number, term, cost, presence=presence, run_term=run_term
                )
                if heard and self.deaths[holder] == deaths and told.outcome is None:
                    self._told(told, before, answer.dispatch)

        return ask

    def _served(self, key: bytes, run: Run, *, force: bool) -> bool:
        newest = self.ledger.keys[key].newest
        if newest is None:
            return False
        return newest[1] >= run.started_at or (self.ledger.keys[key].effect == "read" and not force)

    def _told(self, lease: Told, before: float, dispatch: int) -> None:
        self.ledger.nobody_else(lease, self._now())
        ledger = self.ledger.keys[lease.key]
        if dispatch:  # it is the same, but where others had the lease since: a copy of its claim found the key free
            assert dispatch >= lease.dispatch, "a dispatch number went back"
        if lease.dispatch and not dispatch:  # that copy's lease is not confirmed, and its holder, who had sent, makes nothing of it
            lease.until = 0.0
            return
        lease.dispatch = max(lease.dispatch, dispatch)
        self._lasts(lease, before)
        if lease.lease_id not in ledger.told:
            ledger.told[lease.lease_id] = lease
            self.leases.append(lease)

    def _lasts(self, lease: Told, before: float) -> None:
        """Its holder hears that it has it; one whose run was halted while that was being said may be another's at once, whatever comes after."""
        if lease.dispatch or self.ledger.runs[lease.run].state == "running":
            lease.until = max(lease.until, before + (RUNNING if lease.dispatch else QUEUED))

    def _going_on(self, lease: Told, what: str) -> Request:
        """What a holder can honestly say: nothing but an outcome after it was told to send, one outcome, and the same again if asked again."""
        if what not in {"confirm", "confirm alone", "renew", "release"} and not lease.dispatch:
            what = "confirm"
        ledger, receipts = self.ledger.keys[lease.key], self.world.receipts
        dispatch, deaths = lease.dispatch, self.deaths[lease.holder]
        presence = self.presences.get(lease.holder, "") if lease.presence else ""
        held = Lease(
            key=lease.key,
            lease_id=lease.lease_id,
            run_id=lease.run,
            dispatch=dispatch,
            shard=lease.shard,
            term=lease.term,
            alone=what == "confirm alone",
            presence=presence,
        )

        async def confirm(heard: bool) -> None:
            before = self._now()
            answer = (await receipts.confirm([held]))[0]
            self.world.answers[f"confirm {answer.state}"] += 1
            if answer.state == "confirmed" and heard:
                assert self.ledger.runs[lease.run].state == "running", "confirmed for a run that is halted"
                assert not self.ledger.runs[lease.run].late(before), "confirmed though the run's wall time was over"
                self._told(lease, before, answer.dispatch)

        async def renew(heard: bool) -> None:
            before = self._now()
            if (await receipts.renew([held]))[0] and heard:
                await self.ledger.look_for_presences(self.world.look, self._now())
                self.ledger.nobody_else(lease, self._now())
                lease.presence = presence or lease.presence
                self._lasts(lease, before)

        async def release(_heard: bool) -> None:
            # Who never heard a dispatch number has sent nothing under any: its confirmation may have been carried out all the same.
            unsent = {dispatch} if dispatch else ledger.under.get(lease.lease_id, set())
            self.world.answers["release unheard"] += not dispatch and bool(unsent)
            ledger.settled |= unsent
            await receipts.release([held])
            ledger.unsent |= unsent

        async def complete(_heard: bool) -> None:
            output = b'"%s-%d%s"' % (lease.lease_id.encode(), dispatch, b"." * OUTPUT_LIMIT if what == "too large" else b"")
            if what == "complete":
                ledger.outputs.setdefault(dispatch, output)
            ledger.settled.add(dispatch)
            ledger.paid.add(dispatch)
            result = Completed(
                key=lease.key, lease_id=lease.lease_id, dispatch=dispatch, run_id=lease.run, output=output, no_result=False, cost=lease.cost / 2
            )
            answer = (await receipts.complete([result]))[0]
            self.world.answers[f"complete {answer.state}"] += 1
            if answer.state == "stored":
                assert answer.completed_at is not None
                if ledger.newest is None or ledger.newest[0] < dispatch:
                    ledger.newest = (dispatch, answer.completed_at)
            elif answer.state == "rejected":
                assert what == "too large"
                ledger.failed_in.add(lease.run)

        async def fail(_heard: bool) -> None:
            becomes: Any = {"fail": "failed", "fail again": "released", "unknown": "outcome_unknown", "refund": "released"}[what]
            if becomes != "outcome_unknown":
                ledger.settled.add(dispatch)
                if what != "refund":
                    ledger.paid.add(dispatch)
            failed = Failed(
                key=lease.key,
                lease_id=lease.lease_id,
                dispatch=dispatch,
                run_id=lease.run,
                becomes=becomes,
                failure=FAILURE,
                refund=what == "refund",
            )
            lease.until = 0.0
            answer = (await receipts.fail([failed]))[0]
            self.world.answers[f"{what} {answer.state}"] += 1
            if what == "refund":
                ledger.unsent.add(dispatch)
            if answer.state == "stored" and becomes == "failed":
                ledger.failed_in.add(lease.run)

        act = {"confirm": confirm, "confirm alone": confirm, "renew": renew, "release": release, "complete": complete, "too large": complete}.get(
            what, fail
        )
        ends = act not in {confirm, renew}

        async def ask(heard: bool) -> None:
            if lease.outcome not in {None, ask}:
                return
            if ends and what != "unknown":
                lease.outcome = ask
                self.leases = [other for other in self.leases if other is not lease]
            await act(heard and self.deaths[lease.holder] == deaths)

        return ask
