"""Steps between an executor and a receipt-store that does not answer, answers late, or gives its leases to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill.errors import AskDied, AskTimeout
from rowmill.runtime.clock import Clock, SystemClock
from rowmill_contracts.envelope import Message
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import ClaimReceipts, Complete, Confirm, Fail, LeaseRef, Release
from rowmill_contracts.tools import CallOutcome
from rowmill_row_executor import step_receipts, step_runner
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.step_calling import StepCall, StepIds
from rowmill_row_executor.step_receipts import BusStepReceipts
from rowmill_row_executor.step_runner import StepRunner

from .conftest import until

RUN = "run-1"
HOLD = 0.1


class Now:
    """The store's clock."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def __call__(self) -> float:
        return self.time


class Hurry(SystemClock):
    """Nothing is waited for."""

    async def sleep(self, seconds: float) -> None:
        del seconds
        await asyncio.sleep(0)


class Asks:
    """A bus to a store in memory. ``lose``: what is not answered, though it is carried out; ``drop``: what is not even that. ``deadly``: the run
    whose claims no store survives; ``unconfirmed``: what confirmations of the run of that name end in; ``odd``: runs whose requests end in an error
    that nobody foresaw. All waits for ``go``.
    """

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.asked: list[Message] = []
        self.lose: list[type[Message]] = []
        self.drop: list[type[Message]] = []
        self.deadly = ""
        self.unconfirmed: type[Exception] | None = None
        self.odd: dict[str, type[Exception]] = {}
        self.go = asyncio.Event()
        self.go.set()

    async def ask(self, message: Message, key: str, answer: type[Any], *, timeout: float | None = None) -> Any:
        del key, timeout
        await asyncio.sleep(0)
        self.asked.append(message)
        await self.go.wait()
        if type(message) in self.drop:
            self.drop.remove(type(message))
            raise AskTimeout("no answer")
        if isinstance(message, ClaimReceipts) and any(claim.run_id == self.deadly for claim in message.claims):
            raise AskDied("dead-lettered")
        if isinstance(message, Confirm) and self.unconfirmed is not None and any(lease.run_id == "unconfirmed" for lease in message.leases):
            raise self.unconfirmed("dead-lettered")
        for run, error in self.odd.items():
            if isinstance(message, Complete | Fail | Release) and run in str(message):
                raise error("odd")
        reply = self.store.answer(message)
        if type(message) in self.lose:
            self.lose.remove(type(message))
            raise AskTimeout("no answer")
        assert isinstance(reply, answer)
        return reply

    def of(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.asked)


class Leases:
    """`StepLeases` of one process, without a thread. ``lost``: what is to be called where a lease moved, by lease id."""

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.names: list[str] = []
        self.lost: dict[str, Callable[[], None]] = {}

    async def present(self, instead_of: str = "") -> str:
        if not self.names or self.names[-1] == instead_of:
            self.names.append(f"presence-{id(self)}-{len(self.names)}")
            self.store.answer(KeepPresence(presence=self.names[-1]))
        return self.names[-1]

    @contextmanager
    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> Iterator[None]:
        self.lost[lease.lease_id] = on_lost
        yield
        del self.lost[lease.lease_id]


class Executor:
    """One process's steps. All share the ``store``."""

    def __init__(self, store: MemoryReceipts, threads: ThreadPoolExecutor, clock: Clock) -> None:
        self.asks = Asks(store)
        self.leases = Leases(store)
        self.receipts = BusStepReceipts(self.asks, self.leases, clock, holder="executor", gather=0.001)
        self.runner = StepRunner(self.receipts, SystemClock(), threads, hold=HOLD, patience=10.0, again=5.0, body_limit=20.0, row_limit=20.0)

    async def run(self, fn: Callable[[], Any], *, run: str = RUN, **facts: Any) -> CallOutcome:
        asker = Asker(run, "org", "play", 0.0)
        return await self.runner.run(asker, step_of(asker, fn, **facts))


def step_of(asker: Asker, fn: Callable[[], Any], **facts: Any) -> StepCall:
    """The same step, whatever its function does here."""
    given: dict[str, Any] = {"semantic_key": None, "stale_after": None, "blocking": False, "effect": "idempotent"} | facts
    return replace(StepIds("a test").prepare(asker, "work", int, **given), function=fn)


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def store(now: Now) -> MemoryReceipts:
    return MemoryReceipts(now, held_poll=0.001)


@pytest.fixture
def new_executor(store: MemoryReceipts) -> Iterator[Callable[[], Executor]]:
    with ThreadPoolExecutor(1) as threads:
        yield lambda clock=None: Executor(store, threads, clock or SystemClock())  # type: ignore[misc]


async def test_an_outcome_whose_storing_was_not_answered_is_asked_for_again(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    here.asks.lose, here.asks.drop = [Complete], [Complete]
    assert bytes((await here.run(lambda: 7)).result) == b'{"raw":7}'
    assert here.asks.of(Complete) == 3
    assert [receipt.state for receipt in store.receipts.values()] == ["completed"]


@pytest.mark.parametrize("kind", [ClaimReceipts, Confirm])
@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_claim_that_was_not_answered_is_asked_for_again_and_is_the_same_claim(
    new_executor: Any, store: MemoryReceipts, kind: type[Message], carried_out: bool
) -> None:
    here = new_executor()
    (here.asks.lose if carried_out else here.asks.drop).append(kind)
    assert (await here.run(lambda: 7, effect="non_idempotent")).outcome == "completed"
    assert here.asks.of(kind) == 2
    assert [receipt.dispatch for receipt in store.receipts.values()] == [1]


async def test_a_claim_that_nobody_waits_for_any_more_is_asked_for_no_more_and_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    here.asks.go.clear()
    here.asks.lose, here.asks.drop = [ClaimReceipts], [Release]
    running = asyncio.ensure_future(here.run(lambda: 7))
    await until(lambda: here.asks.of(ClaimReceipts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert (here.asks.of(ClaimReceipts), here.asks.of(Release)) == (1, 2)


async def test_a_claim_that_is_answered_after_its_row_has_gone_is_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here, there = new_executor(), new_executor()
    here.asks.go.clear()
    running = asyncio.ensure_future(here.run(lambda: 7))
    await until(lambda: here.asks.of(ClaimReceipts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert (await there.run(lambda: 8)).outcome == "completed"


async def test_a_claim_that_is_answered_as_its_row_goes_is_given_back(
    new_executor: Any, store: MemoryReceipts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_executor()
    tell = step_receipts._tell

    def told_too_late(*facts: Any) -> None:
        tell(*facts)
        running.cancel()

    running = asyncio.ensure_future(here.run(lambda: 7))
    monkeypatch.setattr(step_receipts, "_tell", told_too_late)
    await asyncio.gather(running, return_exceptions=True)
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]


async def test_a_claim_of_a_row_that_was_begun_by_hand_and_dropped_is_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    await here.run(lambda: 1)
    store.receipts.clear()
    here.asks.go.clear()
    by_hand = here.run(lambda: 2)
    by_hand.send(None)
    await until(lambda: here.asks.of(ClaimReceipts) == 2)
    by_hand.close()
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert bytes((await here.run(lambda: 3)).result) == b'{"raw":3}'


async def test_a_step_that_another_executor_runs_is_waited_for_and_not_run(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    go = asyncio.Event()

    async def slow() -> int:
        await go.wait()
        return 1

    first = asyncio.ensure_future(there.run(slow))
    await until(lambda: there.leases.lost)
    second = asyncio.ensure_future(here.run(lambda: pytest.fail("it is run there")))
    await until(lambda: here.asks.of(ClaimReceipts) > 3)
    go.set()
    assert [bytes((await each).result) for each in (first, second)] == [b'{"raw":1}'] * 2


async def test_it_is_waited_for_no_longer_than_the_hand_holds(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    never = asyncio.Event()
    running = asyncio.ensure_future(there.run(never.wait, run="run-2", stale_after=60))
    await until(lambda: there.leases.lost)
    outcome = await here.run(never.wait, stale_after=60)
    assert (outcome.outcome, outcome.wait_ms) == ("deferred", 5000)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await there.receipts.drain()
    never.set()
    assert (await here.run(never.wait, stale_after=60)).outcome == "completed"


async def test_what_its_own_run_left_behind_is_waited_for_until_its_executor_counts_as_dead(new_executor: Any, store: MemoryReceipts) -> None:
    here, there = new_executor(), new_executor()
    dead = asyncio.ensure_future(there.run(asyncio.Event().wait))
    await until(lambda: there.leases.lost)
    again = asyncio.ensure_future(here.run(lambda: 1))
    await asyncio.sleep(3 * HOLD)
    store.answer(KeepPresence(presence=there.leases.names[0], leave=True))
    assert (await again).outcome == "completed"
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)


async def test_who_loses_a_lease_stops_and_gets_what_the_other_stored(new_executor: Any, now: Now) -> None:
    here, there = new_executor(), new_executor()
    stopped = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    running = asyncio.ensure_future(here.run(slow))
    await until(lambda: here.leases.lost)
    now.time += 100
    there.leases.names.clear()
    assert bytes((await there.run(lambda: 2)).result) == b'{"raw":2}'
    for lost in list(here.leases.lost.values()):
        lost()
    assert bytes((await running).result) == b'{"raw":2}'
    assert stopped.is_set()


async def test_a_result_that_comes_after_its_lease_moved_serves_its_row_alone(new_executor: Any, store: MemoryReceipts, now: Now) -> None:
    here, there = new_executor(), new_executor()
    go = asyncio.Event()

    async def slow() -> int:
        await go.wait()
        return 1

    running = asyncio.ensure_future(here.run(slow))
    await until(lambda: here.leases.lost)
    now.time += 100
    await there.run(lambda: 2)
    go.set()
    assert bytes((await running).result) == b'{"raw":1}'
    [receipt] = store.receipts.values()
    assert receipt.output is not None
    assert bytes(receipt.output.output) == b'{"raw":2}'


async def test_a_process_whose_presence_has_ended_goes_on_under_another(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    await here.run(lambda: 1)
    store.answer(KeepPresence(presence=here.leases.names[0], leave=True))
    assert (await here.run(lambda: 2, semantic_key=2)).outcome == "completed"
    assert len(here.leases.names) == 2


async def test_a_newer_body_takes_over_at_once(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    asker = Asker(RUN, "org", "play", 0.0)
    older = asyncio.ensure_future(here.runner.run(asker, step_of(asker, asyncio.Event().wait), run_term=1))
    await until(lambda: here.leases.lost)
    newer = await there.runner.run(asker, step_of(asker, lambda: 2), run_term=2)
    assert bytes(newer.result) == b'{"raw":2}'
    older.cancel()
    await asyncio.gather(older, return_exceptions=True)


async def test_steps_that_are_ready_together_are_claimed_together(new_executor: Any) -> None:
    here = new_executor()
    await here.run(lambda: 0)
    before = here.asks.of(ClaimReceipts)
    await asyncio.gather(*(here.run(lambda: 1, semantic_key=number) for number in range(500)))
    assert here.asks.of(ClaimReceipts) - before < 10
    assert here.asks.of(Complete) < 12


async def test_a_claim_that_no_store_survives_fails_alone(new_executor: Any) -> None:
    here = new_executor()
    await here.run(lambda: 0)
    here.asks.deadly = "bad"
    runs = ["bad" if number == 7 else f"run-{number}" for number in range(20)]
    outcomes = await asyncio.gather(*(here.run(lambda: 1, run=run) for run in runs))
    assert [run for run, outcome in zip(runs, outcomes, strict=True) if outcome.outcome != "completed"] == ["bad"]
    assert outcomes[7].failure.code == "dead_lettered"


@pytest.mark.parametrize(("error", "code"), [(AskDied, "dead_lettered"), (RuntimeError, "claim_failed")])
async def test_a_step_whose_confirmation_no_store_survives_fails_alone_and_unbegun(
    new_executor: Any, store: MemoryReceipts, error: type[Exception], code: str
) -> None:
    here = new_executor(Hurry())
    await here.run(lambda: 0)
    here.asks.unconfirmed = error
    runs = [*(f"run-{number}" for number in range(20)), "unconfirmed"]
    done: list[str] = []

    async def one(run: str) -> CallOutcome:
        return await here.run(lambda: done.append(run), run=run, effect="non_idempotent")  # type: ignore[no-any-return]

    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*map(one, runs))
    assert sorted(done) == sorted(runs[:-1])
    assert {outcome.outcome for outcome in outcomes[:-1]} == {"completed"}
    failure = outcomes[-1].failure
    assert failure is not None
    assert (outcomes[-1].outcome, failure.code) == ("failed", code)
    assert "dead-lettered" in failure.message
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values() if receipt.claim.run_id == "unconfirmed"] == ["released"]


async def test_steps_of_a_process_that_cannot_say_that_it_is_there_fail(new_executor: Any) -> None:
    here = new_executor()

    async def gone(instead_of: str = "") -> str:
        raise AskDied("dead-lettered")

    here.leases.present = gone
    outcome = await here.run(lambda: pytest.fail("it has no lease"))
    assert (outcome.outcome, outcome.failure.code) == ("failed", "dead_lettered")


@pytest.mark.parametrize("error", [AskDied, RuntimeError])
async def test_an_outcome_that_cannot_be_stored_holds_up_no_other_of_its_page_and_is_given_up(new_executor: Any, error: type[Exception]) -> None:
    here = new_executor(Hurry())
    await here.run(lambda: 0)
    here.asks.odd = {"bad-done": error, "bad-failed": error, "bad-gone": error}
    runs = [*(f"run-{number}" for number in range(20)), "bad-done"]
    done = asyncio.gather(*(here.run(lambda: 1, run=run) for run in runs))
    failed = asyncio.gather(*(here.run(lambda: 1 / 0, run=run) for run in ("run-x", "bad-failed")))
    gone = asyncio.ensure_future(here.run(asyncio.Event().wait, run="bad-gone"))
    await until(lambda: any(lease for lease in here.leases.lost))
    async with asyncio.timeout(20):
        assert [run for run, outcome in zip(runs, await done, strict=True) if outcome.outcome != "completed"] == ["bad-done"]
        assert [outcome.failure.message for outcome in await failed] == ["step 'work' failed: ZeroDivisionError: division by zero"] * 2
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await here.receipts.drain()


@pytest.mark.parametrize(("effect", "state"), [("idempotent", "released"), ("non_idempotent", "outcome_unknown")])
async def test_a_step_that_runs_out_of_memory_leaves_no_lease_behind_when_its_process_is_told(
    new_executor: Any, store: MemoryReceipts, effect: str, state: str
) -> None:
    def greedy() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await new_executor().run(greedy, effect=effect)
    assert [receipt.state for receipt in store.receipts.values()] == [state]


async def test_a_process_without_memory_waits_for_no_store_that_does_not_answer(new_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner, "_LAST_WORD", 0.01)
    here = new_executor()

    def greedy() -> None:
        here.asks.go.clear()
        raise MemoryError

    async with asyncio.timeout(20):
        with pytest.raises(MemoryError):
            await here.run(greedy)
    here.asks.go.set()


async def test_draining_ends_where_nobody_answers(new_executor: Any) -> None:
    here = new_executor()
    running = asyncio.ensure_future(here.run(asyncio.Event().wait))
    await until(lambda: here.leases.lost)
    here.asks.go.clear()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not await here.receipts.drain(within=0.01)
    here.asks.go.set()
    assert await here.receipts.drain(within=20)


async def test_a_cut_off_step_that_must_not_be_repeated_is_stored_as_unknown(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    running = asyncio.ensure_future(here.run(asyncio.Event().wait, effect="non_idempotent"))
    await until(lambda: here.leases.lost)
    assert here.asks.of(Confirm) == 1, "confirmed right before it is run"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await here.receipts.drain()
    assert (await here.run(lambda: pytest.fail("it may have had its effect"), effect="non_idempotent")).outcome == "unknown"
