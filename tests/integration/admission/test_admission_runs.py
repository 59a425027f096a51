"""Runs from their start to their end, on a real broker and database."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any

import asyncpg
import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, raw, rows, settled

from rowmill_contracts.counts import Problem
from rowmill_contracts.events import DatasetEvent
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.run_questions import AskOldestRun, ListRuns, OldestRun, RunsListed
from rowmill_contracts.runs import (
    DatasetOpened,
    OpenDataset,
    RecordCalls,
    RecordedCall,
    ReleaseRun,
    RenewRun,
    RunOptions,
    RunStart,
    RunStop,
    RunTaken,
    TakeRun,
    TermAnswer,
)
from rowmill_contracts.topology import ADMISSION_ASKS, RUNS_START, RUNS_STOP

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


async def test_a_run_with_rows_in_its_message_is_worked_to_its_end(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(450))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(450))
    assert neighbours.states(run_id) == ["queued", "running", "waiting", "running", "completed"]
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.admitted, run.counts.completed) == ("completed", 450, 450)
    assert run.output == raw({"rows": 450})
    assert [(each.dataset, each.state, each.total_rows) for each in run.datasets] == [("leads", "closed", 450)]


async def test_datasets_tell_when_they_open_and_close(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.ended(run_id))
    told = [event for event in neighbours.events if isinstance(event, DatasetEvent) and event.run_id == run_id]
    assert [told[0].state, told[-1].state] == ["opened", "closed"]
    assert told[-1].counts.completed == told[-1].total_rows == 5


async def test_the_same_run_id_is_one_run(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(3))
    await neighbours.until(lambda: neighbours.ended(run_id))
    await neighbours.start(run_id, rows=rows(7))
    await neighbours.start(marker := new_run_id(), rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(marker))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.counts.admitted == 3
    assert len(neighbours.sent(run_id)) == 3


async def test_a_run_without_an_id_is_named_by_its_message(neighbours: Neighbours) -> None:
    message_id = new_run_id()
    for _ in range(2):
        await neighbours.bus.publish(RunStart(play="leads", rows=rows(1)), RUNS_START, message_id=message_id)
    await neighbours.until(lambda: neighbours.ended(message_id))
    assert neighbours.states(message_id).count("queued") == 1


async def test_a_body_learns_with_which_code_its_datasets_were_opened(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"code_digest": "d1"}
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert [taken.run.code_digest for taken in neighbours.taken if taken.run and taken.run.run_id == run_id] == [None, "d1"]


async def test_an_input_without_rows_is_over_at_once(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=[])
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_limit_admits_the_first_rows(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(450), options=RunOptions(limit=250))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(250))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.datasets[0].total_rows == 250


async def test_a_budget_is_stored_at_the_receipt_store_before_the_body_runs(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.receipts_away = True
    await neighbours.start(run_id, rows=rows(1), options=RunOptions(budget=Decimal("5.00")))
    await neighbours.until(lambda: [halt for halt in neighbours.halts if halt.run_id == run_id])
    assert not [advanced for advanced in neighbours.advanced if advanced.run_id == run_id]
    neighbours.receipts_away = False
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert {(halt.action, halt.budget) for halt in neighbours.halts if halt.run_id == run_id} == {("resume", Decimal("5.00"))}


async def test_a_run_whose_every_row_failed_fails_loudly(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: [settled(row, "failed", Problem(code="tool_failed", message="no luck")) for row in tasks.rows]
    await neighbours.start(run_id, rows=rows(4))
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.failed) == ("failed", 4)
    assert run.error is not None
    assert run.error.code == "tool_failed"
    assert "no luck" in run.error.message


async def test_on_error_fail_stops_admission_at_the_first_failed_row(neighbours: Neighbours) -> None:
    run_id = new_run_id()

    def first_fails(tasks: RowTasks) -> list[SettledRow]:
        problem = Problem(code="tool_failed", message="row 0 failed", row=0)
        return [settled(row, "failed", problem) if row.index == 0 else settled(row, "completed") for row in tasks.rows]

    neighbours.work = first_fails
    neighbours.dataset = {"on_error": "fail", "concurrency": 10}
    await neighbours.start(run_id, rows=rows(2000))
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.state == "failed"
    assert run.error == Problem(code="tool_failed", message="row 0 failed", row=0)
    assert run.counts.admitted < 2000
    assert run.counts.completed + run.counts.failed == run.counts.admitted


async def test_the_oldest_run_that_is_not_over_is_told(neighbours: Neighbours, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)  # runs of other tests, whose rows failed, could be retried for a week
    await connection.execute("UPDATE admission.datasets SET closed_at = closed_at - interval '30 days'")
    await connection.close()
    neighbours.work = lambda _tasks: []
    older, newer = new_run_id(), new_run_id()
    for run_id in (older, newer):
        await neighbours.start(run_id, rows=rows(1))
        await neighbours.until(lambda run_id=run_id: neighbours.sent(run_id))  # type: ignore[misc]
    told = await neighbours.bus.ask(AskOldestRun(), ADMISSION_ASKS, OldestRun)
    shown = await neighbours.get(older)
    assert shown is not None
    assert told.started_at is not None
    assert told.started_at <= shown.created_at

    for run_id in (older, newer):
        for tasks in [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]:
            await neighbours.settle(tasks, [settled(row, "completed") for row in tasks.rows])
        await neighbours.until(lambda run_id=run_id: neighbours.ended(run_id))  # type: ignore[misc]
    after = (await neighbours.bus.ask(AskOldestRun(), ADMISSION_ASKS, OldestRun)).started_at
    assert after is None or after not in {told.started_at, shown.created_at}


async def test_only_the_newest_term_may_write(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.body = _no_body  # type: ignore[method-assign]
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: any(taken.run and taken.run.run_id == run_id for taken in neighbours.taken))
    ask = neighbours.bus.ask
    busy = await ask(TakeRun(run_id=run_id, lease_id="other"), ADMISSION_ASKS, RunTaken)
    first = next(taken for taken in neighbours.taken if taken.run and taken.run.run_id == run_id)
    assert busy.outcome in {"busy", "taken"}
    while busy.outcome != "taken":  # the lease of the one that does nothing runs out
        busy = await ask(TakeRun(run_id=run_id, lease_id="other"), ADMISSION_ASKS, RunTaken)
    assert busy.term > first.term
    call = RecordedCall(position=0, kind="step", name="a", result=raw(1))
    refused = await ask(RecordCalls(run_id=run_id, term=first.term, calls=[call]), ADMISSION_ASKS, TermAnswer)
    stale = await ask(
        OpenDataset(run_id=run_id, term=first.term, dataset="leads", input_id="i", columns=[], code_digest="c"), ADMISSION_ASKS, DatasetOpened
    )
    late = await ask(ReleaseRun(run_id=run_id, term=first.term, lease_id="?", outcome="completed"), ADMISSION_ASKS, TermAnswer)
    assert (refused.held, stale.outcome, late.held) == (False, "stale", False)
    assert (await ask(RecordCalls(run_id=run_id, term=busy.term, calls=[call]), ADMISSION_ASKS, TermAnswer)).held
    shown = await ask(TakeRun(run_id=run_id, read_only=True), ADMISSION_ASKS, RunTaken)
    assert shown.run is not None
    assert shown.run.calls == [call]
    assert (await ask(RenewRun(run_id=run_id, term=busy.term, lease_id="other"), ADMISSION_ASKS, TermAnswer)).held
    release = ReleaseRun(run_id=run_id, term=busy.term, lease_id="other", outcome="completed", output=raw("done"))
    for _ in range(2):  # the answer may be lost and the request repeated
        assert (await ask(release, ADMISSION_ASKS, TermAnswer)).held
    assert (await ask(TakeRun(run_id=run_id, lease_id="third"), ADMISSION_ASKS, RunTaken)).outcome == "over"
    assert (await ask(TakeRun(run_id="nobody", lease_id="third"), ADMISSION_ASKS, RunTaken)).outcome == "unknown"


async def _no_body(taken: RunTaken, lease: str) -> None:
    """An executor that took the run and died."""


async def test_a_body_that_nobody_finishes_is_run_again(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    body, calls = neighbours.body, 0

    async def dies_first(taken: RunTaken, lease: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await body(taken, lease)

    neighbours.body = dies_first  # type: ignore[method-assign]
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_runs_are_listed_newest_first(neighbours: Neighbours) -> None:
    names = [new_run_id() for _ in range(3)]
    for name in names:
        await neighbours.start(name, rows=rows(1), org="listed")
        await neighbours.until(partial(neighbours.ended, name))
    ask: Any = neighbours.bus.ask
    listed = await ask(ListRuns(org="listed", limit=2), ADMISSION_ASKS, RunsListed)
    assert [run.run_id for run in listed.runs] == [names[2], names[1]]
    older = await ask(ListRuns(org="listed", before=listed.runs[-1].number), ADMISSION_ASKS, RunsListed)
    assert [run.run_id for run in older.runs] == [names[0]]
    assert [(run.state, run.counts.completed) for run in older.runs] == [("completed", 1)]
    assert await neighbours.get("nobody") is None


async def test_a_stop_before_the_start_starts_the_run_cancelled(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.bus.publish(RunStop(run_id=run_id, reason="changed my mind"), RUNS_STOP)
    await neighbours.start(another := new_run_id(), rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(another))
    await neighbours.start(run_id, rows=rows(3))
    await neighbours.until(lambda: neighbours.ended(run_id) and any(halt.run_id == run_id for halt in neighbours.halts))
    assert neighbours.states(run_id) == ["cancelled"]
    assert not neighbours.sent(run_id)
    assert [halt.action for halt in neighbours.halts if halt.run_id == run_id] == ["stop"]


async def test_a_stopped_run_admits_no_more_and_ends_when_its_rows_have_ended(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    held: list[RowTasks] = []
    neighbours.work = lambda tasks: held.append(tasks) or []  # type: ignore[func-returns-value]
    await neighbours.start(run_id, rows=rows(5_000))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2_000)  # the run's window
    await neighbours.bus.publish(RunStop(run_id=run_id, reason="enough"), RUNS_STOP)
    await neighbours.until(lambda: [halt for halt in neighbours.halts if halt.run_id == run_id])
    assert not neighbours.ended(run_id)
    for tasks in held:
        await neighbours.settle(tasks, [settled(row, "cancelled") for row in tasks.rows])
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.admitted, run.counts.cancelled) == ("cancelled", 2_000, 2_000)
    taken = await neighbours.bus.ask(TakeRun(run_id=run_id, lease_id="late"), ADMISSION_ASKS, RunTaken)
    assert taken.outcome == "over"
