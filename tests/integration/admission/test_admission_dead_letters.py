"""What others wait for when a message dies."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import aio_pika
import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, raw, rows, settled

from rowmill.errors import AskDied
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import ClaimReceipts, Complete, Confirm, Fail, HaltRun, Release, Renew
from rowmill_contracts.retries import ReopenRows, RunRetry
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import LookupRows, QuerySheets, ReadCounts, ReadRows, RowsLooked, RowsRead, RowsSettled, RowTasks, SheetsQueried
from rowmill_contracts.run_questions import GetRun, PauseRun, RunShown
from rowmill_contracts.runs import (
    AdvanceRun,
    DatasetOpened,
    InputPage,
    InputSealed,
    OpenDataset,
    RecordCalls,
    ReleaseRun,
    RenewRun,
    RunOptions,
    RunTaken,
    TakeRun,
)
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_COUNTS,
    ADMISSION_INPUTS,
    ADMISSION_RUNS,
    EXECUTOR_ADVANCE,
    EXECUTOR_KEYS,
    EXECUTOR_ROWS,
    INPUTS,
    RECEIPTS_CLAIMS,
    RECEIPTS_SETTLE,
    RUNS_START,
    SHEETS_ASKS,
    SHEETS_SETTLE,
    dead,
    gateway_calls,
)

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


async def test_a_dead_message_of_a_body_fails_its_run_and_answers_the_body(neighbours: Neighbours) -> None:
    neighbours.work = lambda tasks: []
    answers: list[Problem | None] = []
    neighbours.bus.on_reply(DatasetOpened, lambda answer: answers.append(answer.error))
    neighbours.bus.on_reply(RequestDied, lambda answer: answers.append(answer.error))
    messages: list[Callable[[str], Message]] = [
        lambda run_id: OpenDataset(run_id=run_id, term=1, dataset="d", input_id="i", columns=[], code_digest="c"),
        lambda run_id: TakeRun(run_id=run_id, lease_id="l"),
        lambda run_id: RecordCalls(run_id=run_id, term=1, calls=[]),
        lambda run_id: ReleaseRun(run_id=run_id, term=1, lease_id="l", outcome="completed"),
    ]
    for message in messages:
        run_id = new_run_id()
        answers.clear()
        await neighbours.start(run_id, rows=rows(5))
        await neighbours.until(lambda: neighbours.sent(run_id))  # noqa: B023 - waited for right here
        died = message(run_id)
        await neighbours.bus.publish_body(encode(died), died.message_type, dead(ADMISSION_ASKS), headers=REASON, reply_to=neighbours.bus.reply_to)
        await neighbours.until(lambda: neighbours.ended(run_id) and answers)  # noqa: B023 - likewise
        run = await neighbours.get(run_id)
        assert run is not None
        assert run.error is not None
        assert (run.state, run.error.code) == ("failed", "dead_lettered"), died
        assert answers[0] is not None
        assert answers[0].code == "dead_lettered"


async def test_a_dead_page_or_seal_fails_its_input_and_the_runs_over_it(neighbours: Neighbours) -> None:
    for dead_page in (True, False):
        before, after = new_run_id(), new_run_id()
        page = InputPage(input_id=f"input-of-{before}", page=0, rows=rows(5))
        seal = InputSealed(input_id=page.input_id, pages=1, rows=5)
        await neighbours.start(before, input_ref={"leads": page.input_id})
        arrives, dies = (seal, page) if dead_page else (page, seal)
        await neighbours.bus.publish(arrives, INPUTS)
        await neighbours.bus.publish_body(encode(dies), dies.message_type, dead(ADMISSION_INPUTS), headers=REASON)
        for run_id in (before, after):
            if run_id == after:
                await neighbours.start(after, input_ref={"leads": page.input_id})
            await neighbours.until(lambda: neighbours.ended(run_id))  # noqa: B023 - waited for right here
            run = await neighbours.get(run_id)
            assert run is not None
            assert run.error is not None
            assert run.state == "failed"
            assert "poison" in run.error.message


async def test_dead_counts_and_renewals_are_dropped_and_asked_for_again(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.silent_writer = True
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: set(neighbours.books.marks(run_id).values()) == {"completed"})
    for message, queue in (
        (neighbours.books.committed(run_id, "leads"), ADMISSION_COUNTS),
        (RenewRun(run_id=run_id, term=1, lease_id="l"), ADMISSION_ASKS),
    ):
        await neighbours.bus.publish_body(encode(message), message.message_type, dead(queue), headers=REASON)
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_who_asked_what_died_is_answered_with_the_error(neighbours: Neighbours) -> None:
    looked_up: dict[str, Any] = {
        "run_id": "r",
        "number": 1,
        "org": "o",
        "play": "p",
        "dataset": "d",
        "page": 0,
        "started_at": 0,
        "columns": [],
        "rows": [],
    }
    questions: list[tuple[Message, str, type[Any]]] = [
        (ClaimReceipts(holder="h", claims=[]), RECEIPTS_CLAIMS, RequestDied),
        (Complete(completions=[]), RECEIPTS_SETTLE, RequestDied),
        (Confirm(leases=[]), RECEIPTS_SETTLE, RequestDied),
        (Release(leases=[]), RECEIPTS_SETTLE, RequestDied),
        (Renew(leases=[]), RECEIPTS_SETTLE, RequestDied),
        (KeepPresence(presence="p"), RECEIPTS_SETTLE, RequestDied),
        (HaltRun(run_id="r", action="halt"), RECEIPTS_SETTLE, RequestDied),
        (RenewRun(run_id="r", term=1, lease_id="l"), ADMISSION_ASKS, RequestDied),
        (PauseRun(run_id="r"), ADMISSION_ASKS, RequestDied),
        (ReadCounts(run_id="r", dataset="d"), SHEETS_ASKS, RequestDied),
        (Fail(failures=[]), RECEIPTS_SETTLE, RequestDied),
        (TakeRun(run_id="r", read_only=True), ADMISSION_ASKS, RequestDied),
        (GetRun(run_id="r"), ADMISSION_ASKS, RequestDied),
        (RunRetry(run_id="r"), ADMISSION_RUNS, RequestDied),
        (ReopenRows(run_id="r", number=1, dataset="d", attempt=2), SHEETS_ASKS, RequestDied),
        (LookupRows(**looked_up), SHEETS_ASKS, RowsLooked),
        (ReadRows(run_id="r", dataset="d"), SHEETS_ASKS, RowsRead),
        (QuerySheets(sql="SELECT 1"), SHEETS_ASKS, SheetsQueried),
        (KeyPage(run_id="r", dataset="d", page=0, first_index=0, rows=[]), EXECUTOR_KEYS, PageKeys),
    ]
    answers: list[Any] = []
    for answer_type in {answer_type for _, _, answer_type in questions}:
        neighbours.bus.on_reply(answer_type, answers.append)
    for question, queue, answer_type in questions:
        answers.clear()
        await neighbours.bus.publish_body(encode(question), question.message_type, dead(queue), headers=REASON, reply_to=neighbours.bus.reply_to)
        await neighbours.until(lambda: answers)
        assert isinstance(answers[0], answer_type)
        assert answers[0].error.code == "dead_lettered"
        assert "poison" in answers[0].error.message
    answers.clear()
    await neighbours.bus.publish_body(b"{not json", "GetRun.v1", ADMISSION_ASKS, reply_to=neighbours.bus.reply_to)
    await neighbours.until(lambda: answers)
    assert answers[0].error.message.startswith("GetRun.v1 was dead-lettered from admission.asks.v1: not a valid GetRun.v1")
    with pytest.raises(AskDied, match=r"a NUL character, which cannot be stored - at `\$\.run_id`"):
        await neighbours.bus.ask(TakeRun(run_id="a\x00b", lease_id="l"), ADMISSION_ASKS, RunTaken)


async def test_a_run_on_which_a_decision_cannot_be_stored_fails_and_is_not_decided_on_again(neighbours: Neighbours) -> None:
    budgeted, paused = new_run_id(), new_run_id()
    neighbours.work = lambda tasks: []
    neighbours.deadly_for = {budgeted}
    await neighbours.start(budgeted, rows=rows(5), options=RunOptions(budget=Decimal(3)))
    await neighbours.start(paused, rows=rows(5))
    await neighbours.until(lambda: neighbours.sent(paused) and neighbours.ended(budgeted))
    neighbours.deadly_for.add(paused)
    await neighbours.bus.ask(PauseRun(run_id=paused), ADMISSION_ASKS, RunShown)
    await neighbours.until(lambda: neighbours.ended(paused))
    for run_id in (budgeted, paused):
        run = await neighbours.get(run_id)
        assert run is not None
        assert run.error is not None
        assert (run.state, run.error.code) == ("failed", "dead_lettered")
        assert run.error.message == "HaltRun.v1 was dead-lettered from receipts.settle.v1: poison"
    assert not neighbours.sent(budgeted), "it was to spend no more than its budget"


async def test_what_the_broker_itself_buries_ends_waiting_too(neighbours: Neighbours, broker_url: str) -> None:
    answers: list[Problem] = []
    neighbours.bus.on_reply(RequestDied, lambda answer: answers.append(answer.error))
    await neighbours.bus.publish(ClaimReceipts(holder="h", claims=[]), RECEIPTS_CLAIMS, reply_to=neighbours.bus.reply_to)
    async with await aio_pika.connect(broker_url) as connection:
        message = await (await (await connection.channel()).get_queue(RECEIPTS_CLAIMS, ensure=False)).get()
        await message.reject(requeue=False)
        await neighbours.until(lambda: answers)
    assert answers[0].code == "dead_lettered"
    assert answers[0].message.endswith(f"was dead-lettered from {RECEIPTS_CLAIMS}: rejected")


async def test_what_cannot_be_decoded_is_dead_and_disturbs_nobody(neighbours: Neighbours) -> None:
    lay = await neighbours.bus.depths([dead(ADMISSION_RUNS), dead(ADMISSION_ASKS)])
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
    assert {name: depths[name][0] - lay[name][0] for name in depths} == {dead(ADMISSION_RUNS): 4, dead(ADMISSION_ASKS): 2}
