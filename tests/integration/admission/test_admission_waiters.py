"""Whoever waits for a message that died is told: runs, inputs, and everyone who asked a question."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.integration.admission.admission_neighbours import Books, Neighbours, new_run_id, raw, rows

from rowmill.errors import AskDied
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.counts import Counts
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.receipts import Claim, ClaimReceipts, ReceiptsClaimed
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import LookupRows, QuerySheets, ReadRows, RowsLooked, RowsRead, SheetsQueried
from rowmill_contracts.runs import DatasetOpened, InputPage, InputSealed, OpenDataset, RecordCalls, ReleaseRun, RowsCommitted, TakeRun
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_COUNTS,
    ADMISSION_DEAD,
    ADMISSION_INPUTS,
    EXECUTOR_KEYS,
    RECEIPTS_CLAIMS,
    SHEETS_ASKS,
    dead,
)

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


class PoisonedBooks(Books):
    def look_up(self, request: LookupRows) -> RowsLooked:
        raise Rejected("poison")


async def bury(neighbours: Neighbours, message: Message, queue: str) -> None:
    headers = {"x-rowmill-error": "poison", "x-rowmill-queue": queue}
    await neighbours.bus.publish_body(encode(message), message.message_type, dead(queue), headers=headers, reply_to=neighbours.bus.reply_to)


async def failed(neighbours: Neighbours, run_id: str) -> str:
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.error is not None
    assert (run.state, run.error.code) == ("failed", "dead_lettered")
    return run.error.message


def opening(run_id: str) -> OpenDataset:
    return OpenDataset(run_id=run_id, term=1, dataset="other", input_id="i", columns=[], code_digest="c")


@pytest.mark.parametrize("kind", ["OpenDataset", "TakeRun", "RecordCalls", "ReleaseRun"])
async def test_a_body_that_cannot_go_on_fails_its_run(neighbours: Neighbours, kind: str) -> None:
    run_id = new_run_id()
    messages: dict[str, Message] = {
        "OpenDataset": opening(run_id),
        "TakeRun": TakeRun(run_id=run_id, lease_id="l"),
        "RecordCalls": RecordCalls(run_id=run_id, term=1, calls=[]),
        "ReleaseRun": ReleaseRun(run_id=run_id, term=1, lease_id="l", outcome="waiting"),
    }
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(2))
    await neighbours.until(lambda: neighbours.sent(run_id))
    await bury(neighbours, messages[kind], ADMISSION_ASKS)
    assert "poison" in await failed(neighbours, run_id)


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_dead_page_or_seal_fails_its_input_and_the_runs_over_it(neighbours: Neighbours, *, sealed: bool) -> None:
    run_id = input_id = new_run_id()
    await neighbours.start(run_id, input_ref=input_id)
    message = InputSealed(input_id=input_id, pages=1, rows=1) if sealed else InputPage(input_id=input_id, page=0, rows=[raw({"id": 1})])
    await bury(neighbours, message, ADMISSION_INPUTS)
    assert "poison" in await failed(neighbours, run_id)
    later = new_run_id()
    await neighbours.start(later, input_ref=input_id)
    assert "poison" in await failed(neighbours, later)


async def test_a_page_that_cannot_be_looked_up_fails_its_dataset(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.books = PoisonedBooks()
    await neighbours.start(run_id, rows=rows(3))
    assert "LookupRows.v1 was dead-lettered" in await failed(neighbours, run_id)


async def test_counts_that_died_are_asked_for_again(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.silent_writer = True
    await neighbours.start(run_id, rows=rows(3))
    await neighbours.until(lambda: neighbours.sent(run_id))
    await bury(neighbours, RowsCommitted(run_id=run_id, dataset="leads", counts=Counts(admitted=3, completed=3), version=99), ADMISSION_COUNTS)
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.completed) == ("completed", 3)


async def test_who_asked_what_died_is_told_at_once(neighbours: Neighbours) -> None:
    async def poisoned(_: Delivery) -> None:
        raise Rejected("poison")

    await neighbours.bus.consume(RECEIPTS_CLAIMS, poisoned)
    claims = [Claim(key="00" * 32, lease_id="l", run_id="r", tool="p.t", effect="read", started_at=0)]
    with pytest.raises(AskDied, match=r"ClaimReceipts\.v1 was dead-lettered from receipts\.claims\.v1: poison"):
        await neighbours.bus.ask(ClaimReceipts(holder="h", claims=claims), RECEIPTS_CLAIMS, ReceiptsClaimed)


@pytest.mark.parametrize(
    ("request_", "queue", "answer"),
    [
        (opening("nobody's"), ADMISSION_ASKS, DatasetOpened),
        (TakeRun(run_id="nobody's", read_only=True), ADMISSION_ASKS, RequestDied),
        (KeyPage(run_id="r", dataset="d", page=0, first_index=0, rows=[]), EXECUTOR_KEYS, PageKeys),
        (ReadRows(run_id="r", dataset="d"), SHEETS_ASKS, RowsRead),
        (QuerySheets(sql="SELECT 1"), SHEETS_ASKS, SheetsQueried),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
async def test_questions_that_died_are_answered_with_the_error(neighbours: Neighbours, request_: Message, queue: str, answer: type[Message]) -> None:
    answers: list[Any] = []
    neighbours.bus.on_reply(answer, answers.append)
    await bury(neighbours, request_, queue)
    await neighbours.until(lambda: answers)
    assert answers[0].error.code == "dead_lettered"
    assert "poison" in answers[0].error.message


async def test_the_same_death_told_twice_has_one_effect_and_the_queue_stays_empty(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(4))
    await neighbours.until(lambda: neighbours.sent(run_id))
    for _ in range(2):
        await bury(neighbours, neighbours.tasks[-1], SHEETS_ASKS)
    await failed(neighbours, run_id)
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.counts.failed, run.counts.terminal) == (4, 4)
    assert neighbours.states(run_id).count("failed") == 1
    assert (await neighbours.bus.depths([ADMISSION_DEAD]))[ADMISSION_DEAD][0] == 0
    assert msgspec.json.decode(run.output) is None
