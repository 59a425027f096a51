"""Receipts explored as a protocol: random histories of claims, confirmations, renewals, outcomes, hand-overs, stops and crashes on a real database.

Requests are lost, repeated and overtaken: each may be answered to nobody, asked again at any later time, and met by another one, or by the death of
the store's process, between its own statements. `protocol_model` says what must hold after every step.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.budgets import Limits
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import Claim, ClaimReceipts, HaltRun, ReplayReceipt, SettleReceipt
from rowmill_contracts.shards import LeaseShard
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.leases import Found, Wanted
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.operator_store import OperatorStore
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import SCHEMA, SERVER_SETTINGS, Completed, Failed, Lease, Sought, Store
from rowmill_receipt_store.sweeping import Sweep

from .protocol_model import PRESENCE, QUEUED, RULE, RUNNING, SHARD, KeyLedger, Ledger, RunLedger, Told

pytestmark = pytest.mark.servers

EFFECTS = ("read", "idempotent", "non_idempotent")
COSTS = (Decimal(0), Decimal("0.01"), Decimal("0.03"))
OUTPUT_LIMIT = 64
LIMITS = (
    None,
    Limits(money=Decimal("0.01")),
    Limits(calls=2, retries=1),
    Limits(money=Decimal("0.04")),
    Limits(money=Decimal("0.09"), calls=4),
    Limits(retries=0, wall_time=90),
    Limits(money=Decimal("0.03"), calls=3, retries=2, wall_time=400),
    Limits(money=Decimal("0.09")),
)
FAILURE = ToolFailure(tool="hunter.find", code="http_400", message="no")

_histories = itertools.count()
Meanwhile = Callable[[], Awaitable[None]]


class Died(Exception):
    """The store's process died between two statements."""


class OvertakenStore(Store):
    """Lets one thing happen after something was read and before anything is decided on it."""

    meanwhile: Meanwhile | None = None

    async def load(self, asked: Sequence[Sought], *, bodies: bool) -> dict[bytes, Found]:
        found = await super().load(asked, bodies=bodies)
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            await act()
        return found


@dataclass
class World:
    """What all histories share. ``steps``: requests made and other things that happened."""

    loop: asyncio.AbstractEventLoop
    store: OvertakenStore
    presences: PresenceStore
    receipts: Receipts
    operating: Operating
    sweep: Sweep
    look: asyncpg.Connection[Any]
    steps: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def pass_time(self, seconds: float) -> None:
        self.store.clock_offset += seconds
        self.presences.clock_offset += seconds


@dataclass
class Run:
    """``term``: of its body."""

    run_id: str
    started_at: float
    term: int = 1


Request = Callable[[bool], Awaitable[None]]
"""Makes its request; with False nobody hears the answer."""

seldom = st.integers(0, 7).map(lambda number: number == 7)
pick = st.sampled_from(range(840))  # evenly, whatever it is divided by
overtaking = st.sampled_from([None] * 5 + ["dies", "repeat", "rival", "halt", "finish", "hand over", "is there"])
outcomes = st.sampled_from(
    ["confirm"] * 2 + ["confirm alone"] + ["complete"] * 3 + ["renew", "release", "fail", "fail again", "unknown", "too large", "refund"]
)


class History(RuleBasedStateMachine):
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
        for number in (0, 3, 7):
            self._limited(self._new_run(), number)

    # ---- time, death, runs, shards ------------------------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["time"] * 4 + ["death", "run", "halt", "body"] + ["sweep"] * 2 + ["shard", "operator", "presence"] * 2),
        number=pick,
        seldom=seldom,
    )
    def something_happens(self, what: str, number: int, seldom: bool) -> None:
        match what:
            case "time":
                self.world.pass_time((0.7, 4.1, 11.3, 61.9, 61.9)[number % 5])
                self.world.steps += 1
            case "death":
                self._a_holder_dies("abc"[number % 3])
            case "run":
                self.runs[number % 3] = self._new_run()
                self._limited(self.runs[number % 3], number // 3)
            case "body":
                run = self.runs[number % 3]
                run.term += 1
                self.ledger.bodies[run.run_id] = run.term
            case "presence":
                self._do(self._keeping("abc"[number % 3], leave=seldom))
            case "operator":
                self._do(self._deciding(self.keys[number % len(self.keys)], ("replay", "completed", "failed")[number // 3 % 3]))
            case "sweep":  # so long after what was claimed last, or at once
                self.world.store.clock_offset += (0.0, QUEUED + 1, 2 * QUEUED - 1, 2 * QUEUED + 1)[number % 4]
                self._do(self._sweeping())
            case "halt":
                self._decide(self.runs[number % 3], number // 3, stop=seldom)
            case _:
                self._do(self._leasing("abc"[number % 3], number % 2, release=seldom))

    def _limited(self, run: Run, number: int) -> None:
        """A run is stored; most have budgets, and the receipt-store is told before anything is claimed."""
        limits = LIMITS[number % len(LIMITS)]
        if limits is not None:
            self._do(self._halting(run, "resume", limits))

    def _decide(self, run: Run, number: int, *, stop: bool) -> None:
        """Somebody decides on a run, perhaps with larger budgets. The message may come at once, or after others that were decided later."""
        known = self.ledger.runs[run.run_id]
        before = self.decided[run.run_id]
        limits = Limits(
            money=None if before.money is None else before.money + Decimal(number % 6) / 100,
            calls=None if before.calls is None else before.calls + number % 3,
            retries=1 if before.retries is None and number % 7 == 0 else before.retries if before.retries is None else before.retries + number % 2,
            wall_time=before.wall_time,
        )
        request = self._halting(run, "stop" if stop else "resume" if known.state != "running" else "halt", limits)
        if number % 5:
            self._do(request)
        else:
            self.past.append(request)

    def _a_holder_dies(self, holder: str) -> None:
        """It forgets its leases; what it had confirmed may or may not have been sent. Copies of its requests may still come, and nobody hears the
        answers.
        """
        self.deaths[holder] += 1
        self.leases = [lease for lease in self.leases if lease.holder != holder]
        for key in self.ledger.keys.values():
            key.told = {lease_id: lease for lease_id, lease in key.told.items() if lease.holder != holder}
        self.terms = {(who, shard): term for (who, shard), term in self.terms.items() if who != holder}
        self.presences.pop(holder, None)
        self.world.steps += 1

    # ---- receipts -----------------------------------------------------------------------------------------------------------------------

    @rule(
        keys=st.lists(st.integers(0, len(EFFECTS) - 1), min_size=1, max_size=3),
        which=st.integers(0, 2),
        holder=st.sampled_from("abc"),
        shard=st.sampled_from([None, 0, 1]),
        confirm=st.booleans(),
        force=seldom,
        only_cached=seldom,
        cost=st.sampled_from(COSTS),
        lost=seldom,
        meanwhile=overtaking,
        number=pick,
    )
    def claim(
        self,
        keys: list[int],
        which: int,
        holder: str,
        shard: int | None,
        confirm: bool,
        force: bool,
        only_cached: bool,
        cost: Decimal,
        lost: bool,
        meanwhile: str | None,
        number: int,
    ) -> None:
        asked = [self.keys[index] for index in keys]
        if shard is not None and (holder, shard) not in self.terms and number % 8:
            shard = None
        running = [run for run in self.runs if self.ledger.runs[run.run_id].state == "running"]
        run = running[which % len(running)] if running and number % 8 else self.runs[which]
        step = shard is None and number % 2 == 0
        request = self._claiming(asked, run, holder, shard, confirm=confirm, force=force, only_cached=only_cached, cost=cost, step=step)
        self._do(request, lost=lost, meanwhile=self._overtaking(meanwhile, number))

    @precondition(lambda self: self.leases)
    @rule(which=pick, what=outcomes, lost=seldom, meanwhile=overtaking, number=pick)
    def a_holder_goes_on(self, which: int, what: str, lost: bool, meanwhile: str | None, number: int) -> None:
        self._go_on(which, what, lost=lost, meanwhile=meanwhile, number=number)

    @precondition(lambda self: self.leases)
    @rule(which=st.sampled_from([0, 0, 1]), what=outcomes, lost=seldom, meanwhile=overtaking, number=pick)
    def a_newer_lease_goes_on(self, which: int, what: str, lost: bool, meanwhile: str | None, number: int) -> None:
        self._go_on(which, what, lost=lost, meanwhile=meanwhile, number=number)

    @precondition(lambda self: self._overtaken())
    @rule(which=pick, what=st.sampled_from(["complete"] * 3 + ["fail", "refund", "release", "unknown", "renew"]), lost=seldom)
    def an_outcome_comes_late(self, which: int, what: str, lost: bool) -> None:
        overtaken = self._overtaken()
        self._do(self._going_on(overtaken[which % len(overtaken)], what), lost=lost)

    def _overtaken(self) -> list[Told]:
        """Leases under which something may have been sent, of keys of which others have had leases since."""
        newest = {lease.key: lease for lease in self.leases}
        return [lease for lease in self.leases if lease.dispatch and newest[lease.key] is not lease]

    def _go_on(self, which: int, what: str, *, lost: bool, meanwhile: str | None, number: int) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        self._do(self._going_on(lease, what), lost=lost, meanwhile=self._overtaking(meanwhile, number))

    @precondition(lambda self: self.past)
    @rule(which=pick, heard=st.booleans(), meanwhile=overtaking, number=pick)
    def a_request_comes_again(self, which: int, heard: bool, meanwhile: str | None, number: int) -> None:
        request = self.past[-1 - which % len(self.past)]
        self._do(request, lost=not heard, meanwhile=self._overtaking(meanwhile, number), again=True)

    # ---- how ----------------------------------------------------------------------------------------------------------------------------

    def _do(self, request: Request, *, lost: bool = False, meanwhile: Meanwhile | None = None, again: bool = False) -> None:
        async def act() -> None:
            self.world.store.meanwhile = meanwhile
            try:
                await request(not lost)
            except Died:
                pass
            finally:
                self.world.store.meanwhile = None
            await self.ledger.look(self.world.look)

        if not again:
            self.past.append(request)
        self.world.steps += 1
        self.world.loop.run_until_complete(act())

    def _overtaking(self, what: str | None, number: int) -> Meanwhile | None:
        """What happens while another request is under way."""
        match what:
            case "dies":

                async def die() -> None:
                    raise Died

                return die
            case "repeat" if self.past:
                request = self.past[-1 - number % len(self.past)]
            case "rival":
                run, key = self.runs[number % 3], self.keys[number % len(self.keys)]
                request = self._claiming([key], run, "abc"[number // 3 % 3], None, confirm=number % 2 == 0, cost=COSTS[number % 3])
            case "halt":
                request = self._halting(self.runs[number % 3], "halt", self.decided[self.runs[number % 3].run_id])
            case "finish" if self.leases:
                lease = self.leases[-1 - number % len(self.leases)]
                request = self._going_on(lease, ("complete", "confirm", "release", "fail")[number // 7 % 4])
            case "hand over":
                request = self._leasing("abc"[number % 3], number % 2, release=number % 5 == 0)
            case "is there":
                request = self._keeping("abc"[number % 3], leave=False)
            case _:
                return None

        async def act() -> None:
            self.world.steps += 1
            await request(True)

        return act

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
        lease.dispatch = max(lease.dispatch, dispatch)
        lease.until = max(lease.until, before + (RUNNING if lease.dispatch else QUEUED))
        if lease.lease_id not in ledger.told:
            ledger.told[lease.lease_id] = lease
            self.leases.append(lease)

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
                lease.until = max(lease.until, before + (RUNNING if lease.dispatch else QUEUED))

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


@pytest.fixture(scope="module")
def world(database_url: str) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    fast = SERVER_SETTINGS | {"synchronous_commit": "off"}
    database = loop.run_until_complete(Database.connect(database_url, schema=SCHEMA, size=2, server_settings=fast))
    loop.run_until_complete(database.migrate("rowmill_receipt_store"))
    look = loop.run_until_complete(asyncpg.connect(database_url, server_settings={"search_path": SCHEMA}))
    store = OvertakenStore(database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT)
    presences = PresenceStore(database, lease=PRESENCE, grace=0.0)
    receipts = Receipts(store, held_poll=0.25, output_limit=OUTPUT_LIMIT, presences=presences, rule=RULE)
    sweep = Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=10_000, pages=1000)
    yield World(loop, store, presences, receipts, Operating(OperatorStore(database), receipts), sweep, look)
    loop.run_until_complete(look.close())
    loop.run_until_complete(database.close())
    loop.close()


def explore(world: World, histories: int, *, derandomize: bool) -> int:
    """Explore that many histories of 50 things that happen; answers how many did."""

    class Bound(History):
        pass

    Bound.world = world
    world.steps = 0
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=histories,
            stateful_step_count=50,
            deadline=None,
            database=None,
            derandomize=derandomize,
            print_blob=False,
            phases=(Phase.generate, Phase.shrink) if os.environ.get("ROWMILL_TEST_SHRINK") else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return world.steps


def test_receipts_hold_what_they_promise_in_ten_thousand_steps(world: World) -> None:
    assert explore(world, 220, derandomize=True) >= 10_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_receipts_hold_what_they_promise_in_many_more_steps(world: World) -> None:
    histories = int(os.environ.get("ROWMILL_TEST_HISTORIES", "4000"))
    assert explore(world, histories, derandomize=False) >= 40 * histories
