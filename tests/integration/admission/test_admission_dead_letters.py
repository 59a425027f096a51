"""What others wait for when a message dies."""

from __future__ import annotations

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, raw, rows, settled

from rowmill_contracts.envelope import encode
from rowmill_contracts.rows import RowsSettled, RowTasks
from rowmill_contracts.runs import AdvanceRun
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import ADMISSION_ASKS, ADMISSION_RUNS, EXECUTOR_ADVANCE, EXECUTOR_ROWS, RUNS_START, SHEETS_SETTLE, dead, gateway_calls

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]

REASON = {"x-rowmill-error": "poison", "x-rowmill-queue": "q"}


async def test_a_dead_page_of_rows_fails_its_rows_through_the_writer(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.sent(run_id))
    await neighbours.bus.publish_body(encode(neighbours.tasks[-1]), RowTasks.message_type, dead(EXECUTOR_ROWS), headers=REASON)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.failed) == ("failed", 5)
    assert run.error is not None
    assert run.error.code == "dead_lettered"
    assert "poison" in run.error.message


async def test_a_dead_settlement_fails_its_rows(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.sent(run_id))
    tasks = neighbours.tasks[-1]
    ended = [settled(row, "completed") for row in tasks.rows]
    message = RowsSettled(run_id=run_id, number=tasks.number, org=tasks.org, play=tasks.play, dataset=tasks.dataset, rows=ended)
    await neighbours.bus.publish_body(encode(message), RowsSettled.message_type, dead(SHEETS_SETTLE), headers=REASON)
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert set(neighbours.books.marks(run_id).values()) == {"failed"}


async def test_a_dead_advance_fails_its_run(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.sent(run_id))
    await neighbours.bus.publish_body(encode(AdvanceRun(run_id=run_id)), AdvanceRun.message_type, dead(EXECUTOR_ADVANCE), headers=REASON)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.error is not None
    assert (run.state, run.error.code) == ("failed", "dead_lettered")


async def test_callers_of_dead_calls_are_answered(neighbours: Neighbours) -> None:
    answers: list[CallOutcome] = []
    neighbours.bus.on_reply(ToolResults, lambda message: answers.extend(message.results))
    call = CallItem(call_id="c1", tool="p.t", receipt_key="k", input=raw({}))
    calls = ToolCalls(run_id="r", org="o", play="p", started_at=0, calls=[call])
    await neighbours.bus.publish_body(encode(calls), ToolCalls.message_type, dead(gateway_calls(3)), headers=REASON, reply_to=neighbours.bus.reply_to)
    await neighbours.until(lambda: answers)
    assert answers[0].outcome == "failed"
    assert answers[0].failure is not None
    assert (answers[0].failure.code, answers[0].call_id) == ("dead_lettered", "c1")


async def test_what_cannot_be_decoded_is_dead_and_disturbs_nobody(neighbours: Neighbours) -> None:
    for key, message_type in ((RUNS_START, "RunStart.v1"), (RUNS_START, "RunStart.v99"), (RUNS_START, None), (ADMISSION_ASKS, "TakeRun.v1")):
        await neighbours.bus.publish_body(b"{not json", message_type, key)
    await neighbours.bus.publish(AdvanceRun(run_id="r"), ADMISSION_ASKS)  # known, but not for this queue
    await neighbours.bus.publish_body(b'{"play":"leads","run_id":"bad-rows","rows":[1]}', "RunStart.v1", RUNS_START)
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(2))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"
    assert await neighbours.get("bad-rows") is None
    depths = await neighbours.bus.depths([dead(ADMISSION_RUNS), dead(ADMISSION_ASKS)])
    assert depths == {dead(ADMISSION_RUNS): (4, 0), dead(ADMISSION_ASKS): (2, 0)}
