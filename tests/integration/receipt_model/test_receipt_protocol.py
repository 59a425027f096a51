"""Receipts explored as a protocol: random histories of claims, confirmations, renewals, outcomes, hand-overs, stops and crashes on a real database.

Requests are lost, repeated and overtaken: each may be answered to nobody, asked again at any later time, and met by another one, or by the death of
the store's process, between its own statements. `protocol_model` says what must hold after every step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from decimal import Decimal

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.budgets import Limits
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.operator_store import OperatorStore
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import SCHEMA
from rowmill_receipt_store.sweeping import Sweep

from .asking import COSTS, EFFECTS, LIMITS, OUTPUT_LIMIT, Request, Requests, Run
from .protocol_model import PRESENCE, QUEUED, RULE, RUNNING, SHARD, Told
from .world import Died, Meanwhile, OvertakenStore, World

pytestmark = pytest.mark.servers

seldom = st.integers(0, 7).map(lambda number: number == 7)
pick = st.sampled_from(range(840))  # evenly, whatever it is divided by
overtaking = st.sampled_from([None] * 5 + ["dies", "repeat", "rival", "halt", "finish", "hand over", "is there"])
outcomes = st.sampled_from(
    ["confirm"] * 2 + ["confirm alone"] + ["complete"] * 3 + ["renew", "release", "fail", "fail again", "unknown", "too large", "refund"]
)


class History(Requests, RuleBasedStateMachine):
    """One random history: what happens, in which order, and what overtakes what."""

    def __init__(self) -> None:
        super().__init__()
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
                self.world.pass_time((70, 410, 1130, 6190, 6190)[number % 5])
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


@pytest.fixture(scope="module")
def world(database_url: str) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    fast = SERVER_SETTINGS | {"synchronous_commit": "off"}
    database = loop.run_until_complete(Database.connect(database_url, schema=SCHEMA, size=2, server_settings=fast))
    loop.run_until_complete(database.migrate("rowmill_receipt_store"))
    look = loop.run_until_complete(asyncpg.connect(database_url, server_settings={"search_path": SCHEMA}))
    store = OvertakenStore(
        database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT, unsent_wait=12 * QUEUED
    )
    presences = PresenceStore(database, lease=PRESENCE, grace=0.0)
    receipts = Receipts(store, held_poll=0.25, output_limit=OUTPUT_LIMIT, presences=presences, rule=RULE)
    sweep = Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=10_000)
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
