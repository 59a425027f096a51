"""Rows that wait: parked, published again when due, cancelled with their run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from decimal import Decimal

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows, settled

from rowmill_contracts.budgets import Limits
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.run_questions import PauseRun, ResumeRun, RunShown
from rowmill_contracts.runs import ParkedRow, ProviderServes, RowsParked, RunOptions, RunStop
from rowmill_contracts.topology import ADMISSION_ASKS, ADMISSION_PARKED, RUNS_STOP

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


def parked(tasks: RowTasks, wait_ms: int | None, *, halted: bool = False, provider: str = "", asked: float = 1000.0) -> RowsParked:
    waiting = [
        ParkedRow(
            key=row.key,
            index=row.index,
            page=row.page,
            attempt=row.attempt,
            waits=row.waits + 1,
            wait_ms=wait_ms,
            asked=asked + row.index,
            provider=provider,
        )
        for row in tasks.rows
    ]
    return RowsParked(run_id=tasks.run_id, dataset=tasks.dataset, reason="budget" if halted else "rate_limited", rows=waiting, halted=halted)


def parking_first(neighbours: Neighbours, wait_ms: int | None, *, times: int = 1, halted: bool = False) -> Callable[[RowTasks], list[SettledRow]]:
    """Rows park that have waited fewer than ``times`` times, then complete."""
    background: set[asyncio.Task[None]] = set()

    def work(tasks: RowTasks) -> list[SettledRow]:
        fresh = [row for row in tasks.rows if row.waits < times]
        if fresh:
            background.add(asyncio.ensure_future(neighbours.bus.publish(parked(_of(tasks, fresh), wait_ms, halted=halted), ADMISSION_PARKED)))
        return [settled(row, "completed") for row in tasks.rows if row.waits >= times]

    return work


def _of(tasks: RowTasks, some: list) -> RowTasks:  # type: ignore[type-arg]
    return RowTasks(
        run_id=tasks.run_id,
        number=tasks.number,
        org=tasks.org,
        play=tasks.play,
        dataset=tasks.dataset,
        started_at=tasks.started_at,
        code_digest=tasks.code_digest,
        rows=some,
    )


async def test_a_parked_row_comes_back_when_it_is_due(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, 30, times=2)
    await neighbours.start(run_id, rows=rows(300))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"
    sent = neighbours.sent(run_id)
    assert {(row.index, row.waits) for row in sent} == {(index, waits) for index in range(300) for waits in range(3)}
    assert {row.attempt for row in sent} == {1}
    back = next(row for row in sent if row.waits == 2)
    assert back.asked == 1000.0 + back.index
    assert back.data == rows(1, back.index)[0]


async def test_an_older_wait_is_ignored(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: neighbours.sent(run_id))
    [tasks] = [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]
    for _ in range(3):  # the same message, delivered again and again
        await neighbours.bus.publish(parked(tasks, 1), ADMISSION_PARKED)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) > 1)
    back = neighbours.tasks[-1]
    await neighbours.bus.publish(parked(back, 1), ADMISSION_PARKED)
    await neighbours.until(lambda: neighbours.sent(run_id)[-1].waits == 2)
    await neighbours.bus.publish(parked(tasks, 1), ADMISSION_PARKED)
    await neighbours.start(marker := new_run_id(), rows=[])
    await neighbours.until(lambda: neighbours.ended(marker))
    assert [row.waits for row in neighbours.sent(run_id)] == [0, 1, 2]


async def test_parked_rows_stay_in_their_runs_window(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"concurrency": 10}
    neighbours.work = parking_first(neighbours, 100)
    await neighbours.start(run_id, rows=rows(25))
    await neighbours.until(lambda: neighbours.ended(run_id))
    order = [row.waits for row in neighbours.sent(run_id)]
    assert order[:10] == [0] * 10
    assert 1 in order[10:21]
    assert len(order) == 50


async def test_rows_come_back_as_soon_as_their_provider_serves_the_oldest_first_at_its_rate(neighbours: Neighbours) -> None:
    run_id, other = new_run_id(), new_run_id()
    neighbours.work = lambda tasks: []
    for each in (run_id, other):
        await neighbours.start(each, rows=rows(3))
        await neighbours.until(lambda: len(neighbours.sent(each)) == 3)  # noqa: B023 - over before the next turn
        [tasks] = [tasks for tasks in neighbours.tasks if tasks.run_id == each]
        for row, age in zip(tasks.rows, (300.0, 100.0, 200.0), strict=True):
            provider = "away" if each == run_id else "elsewhere"
            await neighbours.bus.publish(parked(_of(tasks, [row]), 3_600_000, provider=provider, asked=age), ADMISSION_PARKED)
    async with asyncio.timeout(20):
        while not ((shown := await neighbours.get(run_id)) and shown.rows_waiting == {"away": 3}):
            await asyncio.sleep(0.02)
    org = tasks.org
    for message in (
        ProviderServes(org="another", provider="away", per_second=1000.0),
        ProviderServes(org=org, provider="away", per_second=2.0),
    ):
        await neighbours.bus.publish(message, ADMISSION_PARKED)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 6)
    assert [row.index for row in neighbours.sent(run_id)[3:]] == [1, 2, 0], "the oldest first, one page each: half a second lies between them"
    assert len(neighbours.sent(other)) == 3, "nobody said that its provider serves"


async def test_waiting_rows_of_a_stopped_run_are_settled_as_cancelled(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, 3_600_000)
    await neighbours.start(run_id, rows=rows(250))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 250)
    await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.cancelled) == ("cancelled", 250)


async def test_rows_that_park_after_the_stop_are_cancelled_too(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(10))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 10)
    await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
    await neighbours.until(lambda: [halt for halt in neighbours.halts if halt.run_id == run_id])
    await neighbours.bus.publish(parked(neighbours.tasks[-1], 3_600_000), ADMISSION_PARKED)
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "cancelled"


async def test_a_halted_run_waits_and_can_be_stopped(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, None, halted=True)
    await neighbours.start(run_id, rows=rows(20))
    await neighbours.until(lambda: any(getattr(event, "waiting_for", None) == "budget" for event in neighbours.events if event.run_id == run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.waiting_for) == ("waiting", "budget")
    assert len(neighbours.sent(run_id)) == 20
    await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.cancelled) == ("cancelled", 20)


async def test_a_resumed_run_goes_on_once_the_receipt_store_has_lifted_the_halt(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, None, halted=True)
    await neighbours.start(run_id, rows=rows(20))
    await waiting_for(neighbours, run_id, "budget")
    await neighbours.until(lambda: [halt.action for halt in neighbours.halts if halt.run_id == run_id] == ["halt"])

    shown = await neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Decimal(5)), ADMISSION_ASKS, RunShown)

    assert shown.run is not None
    assert shown.run.waiting_for != "budget"
    halts = [(halt.action, halt.budget) for halt in neighbours.halts if halt.run_id == run_id]
    assert halts == [("halt", None), ("resume", Decimal(5))]
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.completed) == ("completed", 20)
    assert {row.attempt for tasks in neighbours.tasks if tasks.run_id == run_id for row in tasks.rows} == {1}


async def test_rows_of_a_run_that_is_resumed_have_not_waited_for_their_provider_meanwhile(neighbours: Neighbours) -> None:
    """Else those of a run that stood over night would be given up as soon as it goes on."""

    def came_back(run_id: str) -> set[float | None]:
        return {row.asked for tasks in neighbours.tasks if tasks.run_id == run_id for row in tasks.rows if row.waits}

    stood, waited = new_run_id(), new_run_id()
    neighbours.work = parking_first(neighbours, None, halted=True)
    await neighbours.start(stood, rows=rows(3))
    await waiting_for(neighbours, stood, "budget")
    await neighbours.bus.ask(ResumeRun(run_id=stood, budget=Decimal(5)), ADMISSION_ASKS, RunShown)
    await neighbours.until(lambda: neighbours.ended(stood))
    neighbours.work = parking_first(neighbours, 0)
    await neighbours.start(waited, rows=rows(3))
    await neighbours.until(lambda: neighbours.ended(waited))

    assert came_back(stood) == {None}
    assert came_back(waited) == {1000.0, 1001.0, 1002.0}


async def test_rows_that_were_sent_before_a_resumption_halt_nothing(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(20))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 20)
    out = neighbours.tasks[-1]
    await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    await neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    neighbours.work = parking_first(neighbours, None, times=1)

    await neighbours.bus.publish(parked(out, None, halted=True), ADMISSION_PARKED)

    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.completed) == ("completed", 20)


async def test_a_paused_run_publishes_nothing_until_it_is_resumed(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(5_000))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2_000)

    for _ in range(2):
        paused = await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)
        assert paused.run is not None
        assert (paused.run.state, paused.run.waiting_for) == ("waiting", "pause")
    assert [halt.action for halt in neighbours.halts if halt.run_id == run_id] == ["halt"]
    neighbours.work = lambda tasks: [settled(row, "completed") for row in tasks.rows]
    for tasks in [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]:
        await neighbours.settle(tasks, neighbours.work(tasks))
    await neighbours.until(lambda: neighbours.books.committed(run_id, "leads").counts.completed >= 2_000)
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.state == "waiting"

    await neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.completed) == ("completed", 5_000)


async def test_a_resumption_waits_for_the_receipt_store(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, None, halted=True)
    await neighbours.start(run_id, rows=rows(5))
    await waiting_for(neighbours, run_id, "budget")
    await neighbours.until(lambda: [halt for halt in neighbours.halts if halt.run_id == run_id])
    neighbours.receipts_away = True
    asking = asyncio.ensure_future(neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown))
    await neighbours.until(lambda: [halt for halt in neighbours.halts if halt.run_id == run_id and halt.action == "resume"])
    assert len(neighbours.sent(run_id)) == 5
    assert not asking.done()

    neighbours.receipts_away = False

    await asking
    await neighbours.until(lambda: neighbours.ended(run_id))


async def test_decisions_on_a_run_are_numbered_in_their_order_and_each_is_whole(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(5), options=RunOptions(budget=Decimal(3)))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 5)
    for _ in range(2):
        await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)
        await neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    await neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Decimal(5)), ADMISSION_ASKS, RunShown)
    await neighbours.bus.publish(RunStop(run_id=run_id, reason="enough"), RUNS_STOP)
    await neighbours.until(lambda: any(halt.run_id == run_id and halt.action == "stop" for halt in neighbours.halts))
    for tasks in [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]:
        await neighbours.settle(tasks, [settled(row, "cancelled") for row in tasks.rows])

    told = {halt.decision: (halt.action, halt.budget) for halt in neighbours.halts if halt.run_id == run_id}
    three, five = Decimal(3), Decimal(5)
    assert list(told) == [1, 2, 3, 4, 5, 6, 7]
    assert list(told.values()) == [*[("resume", three), ("halt", three)] * 2, ("resume", three), ("resume", five), ("stop", five)]


async def test_a_resumption_raises_the_kinds_of_budget_that_it_names(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, None, halted=True)
    await neighbours.start(run_id, rows=rows(5), options=RunOptions(budget=Limits(money=Decimal(3), calls=2)))
    await waiting_for(neighbours, run_id, "budget")
    await neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Limits(calls=9, retries=4)), ADMISSION_ASKS, RunShown)
    await neighbours.until(lambda: neighbours.ended(run_id))

    budgets = [halt.budget for halt in neighbours.halts if halt.run_id == run_id]
    before, after = Limits(money=Decimal(3), calls=2), Limits(money=Decimal(3), calls=9, retries=4)
    assert budgets == [before, before, after]


async def test_time_in_which_a_run_waits_for_a_person_is_not_counted_to_its_wall_time(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(5), options=RunOptions(budget=Limits(wall_time=3600)))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 5)
    await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    paused_at = time.time()
    await asyncio.sleep(0.3)
    waited = time.time() - paused_at
    await neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown)
    await neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Limits(wall_time=7200)), ADMISSION_ASKS, RunShown)

    deadlines = [halt.deadline or 0 for halt in neighbours.halts if halt.run_id == run_id]
    run = await neighbours.get(run_id)
    assert run is not None
    assert deadlines[0] == pytest.approx(run.created_at + 3600)
    assert deadlines[2] - deadlines[0] >= waited
    assert deadlines[3] == pytest.approx(deadlines[2] + 3600)
    for tasks in [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]:
        await neighbours.settle(tasks, [settled(row, "completed") for row in tasks.rows])
    await neighbours.until(lambda: neighbours.ended(run_id))


async def test_a_run_whose_wall_time_is_over_waits_though_it_calls_nothing(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(5), options=RunOptions(budget=Limits(wall_time=0.2)))
    await waiting_for(neighbours, run_id, "budget: wall time, 0.2 s are over")

    await neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Limits(wall_time=3600)), ADMISSION_ASKS, RunShown)
    neighbours.work = lambda tasks: [settled(row, "completed") for row in tasks.rows]
    for tasks in [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]:
        await neighbours.settle(tasks, neighbours.work(tasks))
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.state == "completed"


async def test_what_is_over_is_not_resumed_nor_paused(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.ended(run_id))

    for request in (PauseRun(run_id=run_id), ResumeRun(run_id=run_id, budget=Decimal(1))):
        shown = await neighbours.bus.ask(request, ADMISSION_ASKS, RunShown)
        assert shown.run is not None
        assert shown.run.state == "completed"
    assert (await neighbours.bus.ask(PauseRun(run_id="no such run"), ADMISSION_ASKS, RunShown)).run is None
    assert not [halt for halt in neighbours.halts if halt.run_id == run_id]


async def waiting_for(neighbours: Neighbours, run_id: str, what: str) -> None:
    await neighbours.until(lambda: any(getattr(event, "waiting_for", None) == what for event in neighbours.events if event.run_id == run_id))


async def test_rows_whose_keys_nobody_can_tell_hold_up_no_other_run(neighbours: Neighbours) -> None:
    keyed, plain = new_run_id(), new_run_id()
    neighbours.work = parking_first(neighbours, 50)
    neighbours.dataset = {"key_function": True}
    await neighbours.start(keyed, rows=rows(5))
    await neighbours.until(lambda: len(neighbours.sent(keyed)) == 5)
    neighbours.keys_away = True
    neighbours.dataset = {}
    await neighbours.start(plain, rows=rows(5))
    await neighbours.until(lambda: neighbours.ended(plain))
    assert neighbours.states(plain)[-1] == "completed"
    assert not neighbours.ended(keyed)
    neighbours.keys_away = False
    await neighbours.until(lambda: neighbours.ended(keyed))
    assert neighbours.states(keyed)[-1] == "completed"
