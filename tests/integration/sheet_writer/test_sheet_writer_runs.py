"""Rows of a run from their lookup to being read back, on a real broker and database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.integration.sheet_writer.conftest import Neighbours, SheetRun, accounted, decoded, input_row, key_of, raw

from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import RowsCompleted, RowsFailed
from rowmill_contracts.retries import NOT_RETRIED
from rowmill_contracts.runs import PageProgress

pytestmark = pytest.mark.servers

NewRun = Callable[..., SheetRun]
ANN, BOB, CAT = input_row("ann"), input_row("bob"), input_row("cat")


async def test_rows_that_the_sheet_does_not_have_are_sent(new_run: NewRun) -> None:
    looked = await new_run().look_up([ANN, BOB])
    assert [row.mark for row in looked.rows] == ["sent", "sent"]
    assert [decoded(row.known) for row in looked.rows] == [{}, {}]
    assert looked.counts == Counts(admitted=2)
    assert looked.version == 1


async def test_settled_rows_are_counted_told_and_read_back(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN, BOB, CAT])
    await run.settle(run.completed(ANN, 0), run.failed(BOB, 1))
    told = await neighbours.until_counts(run, completed=1, failed=1)

    assert told.counts == Counts(admitted=3, completed=1, failed=1, calls=2, cost=Decimal("0.020"))
    assert str(told.counts.cost) == "0.020"
    assert told.pages == [PageProgress(page=0, open=1)]
    assert told.first_error is not None
    assert told.first_error.message == "no luck with bob"

    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 2)
    completed, failed = sorted(neighbours.events_of(run), key=lambda event: type(event).__name__)
    assert isinstance(completed, RowsCompleted)
    assert [(row.key, row.index, row.attempt, row.status) for row in completed.rows] == [(key_of("ann"), 0, 1, "completed")]
    assert decoded(completed.rows[0].data) == {"name": "ann", "email": "ann@x", "score": 3}
    assert isinstance(failed, RowsFailed)
    assert failed.rows[0].error == told.first_error

    rows = await run.read_all(meta=True)
    assert [(row.index, row.mark, row.attempt, decoded(row.data)) for row in rows] == [
        (0, "completed", 1, {"name": "ann", "email": "ann@x", "score": 3}),
        (1, "failed", 1, {"name": "bob", "email": None}),
        (2, "sent", 0, {}),
    ]
    assert rows[1].error == told.first_error
    assert decoded(rows[0].meta)["email"]["completed_at"] == 1000.5


async def test_what_was_settled_comes_back_as_the_same_text(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    text = rb'{"name": "ann", "nul": "\u0000", "big": 123456789012345678901234567890, "float": 1.0}'
    await run.look_up([ANN])
    await run.settle(run.completed(ANN, 0, input=msgspec.Raw(text), values=msgspec.Raw(rb'{"email":"\u0000"}')))
    await neighbours.until_counts(run, completed=1)
    [row] = await run.read_all()
    assert bytes(row.data) == text[:-1] + rb',"email":"\u0000"}'


async def test_a_failed_row_completes_at_a_later_attempt_and_corrects_the_counts(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN])
    await run.settle(run.without_cells(ANN, 0, dead=True))
    await neighbours.until_counts(run, failed=1)
    await run.settle(run.completed(ANN, 0, attempt=2))
    told = await neighbours.until_counts(run, completed=1)
    assert told.counts == Counts(admitted=1, completed=1, calls=1, cost=Decimal("0.010"))
    assert told.first_error is None
    [row] = await run.read_all()
    assert (row.mark, row.attempt, row.error) == ("completed", 2, None)


async def test_a_row_that_was_to_be_worked_again_and_was_not_stands_as_it_stood_with_its_error(new_run: NewRun, neighbours: Neighbours) -> None:
    """And one that had no error has the one that says so."""
    run = new_run()
    await run.look_up([ANN, BOB])
    await run.settle(run.failed(ANN, 0), run.without_cells(BOB, 1))
    await neighbours.until_counts(run, failed=1, cancelled=1)
    before = await run.read_all(meta=True)
    unworked = Problem(code=NOT_RETRIED, message="the body did not come to it")
    await run.settle(*(replace(run.without_cells(row, at), attempt=2, status="failed", error=unworked) for at, row in enumerate([ANN, BOB])))
    await neighbours.until_counts(run, failed=2)
    [ann, bob] = await run.read_all(meta=True)
    assert ann == replace(before[0], attempt=2)
    assert ann.error is not None
    assert ann.error.message == "no luck with ann"
    assert (bob.mark, bob.error) == ("failed", unworked)


async def test_a_row_whose_error_holds_what_the_database_cannot_read_is_settled_again_with_those_beside_it(
    new_run: NewRun, neighbours: Neighbours
) -> None:
    """A tool's error may say anything, a NUL among it."""
    run = new_run()
    await run.look_up([ANN, BOB])
    said = Problem(code="no\x00luck", message="with\x00ann", tool="crm.find")
    for attempt in (1, 2):
        await run.settle(run.failed(ANN, 0, attempt=attempt, error=said), run.completed(BOB, 1, attempt=attempt))
        await neighbours.until_counts(run, failed=1, completed=1)
        await neighbours.until(lambda: len([counts for counts in neighbours.committed if counts.run_id == run.run_id]) >= attempt)  # noqa: B023
        [ann, bob] = await run.read_all()
        assert (ann.attempt, ann.error, bob.mark) == (attempt, replace(said, code="no\\x00luck", message="with\\x00ann"), "completed")


async def test_what_comes_late_from_an_earlier_attempt_changes_nothing(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN])
    await run.settle(run.completed(ANN, 0, attempt=2))
    await neighbours.until_counts(run, completed=1)
    await run.settle(run.failed(ANN, 0, attempt=1))
    await neighbours.until(lambda: len([c for c in neighbours.committed if c.run_id == run.run_id]) == 2)
    assert (await run.counts()).counts == neighbours.told(run).counts == Counts(admitted=1, completed=1, calls=1, cost=Decimal("0.01"))
    [row] = await run.read_all()
    assert decoded(row.data)["email"] == "ann@x"
    assert {event.attempt for event in neighbours.event_rows(run)} == {2}


async def test_an_older_runs_rows_count_for_it_but_do_not_overwrite_a_newer_runs_cells(new_run: NewRun, neighbours: Neighbours) -> None:
    older, newer = new_run(), new_run()
    await older.look_up([ANN])
    await newer.look_up([ANN])
    await newer.settle(newer.completed(ANN, 0, values=raw({"email": "new", "score": 1})))
    await neighbours.until_counts(newer, completed=1)
    await older.settle(older.completed(ANN, 0, values=raw({"email": "old", "score": 1})))
    await neighbours.until_counts(older, completed=1)
    assert [decoded(row.data)["email"] for row in await older.read_all()] == ["new"]


async def test_duplicates_carry_their_own_input_and_their_twins_cells(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    first = await run.look_up([ANN, input_row("ann", note="again"), BOB])
    second = await run.look_up([input_row("ann", note="on another page"), CAT], page=1, first_index=3, seen=["ann", "bob"])
    assert [row.mark for row in first.rows + second.rows] == ["sent", "duplicate", "sent", "duplicate", "sent"]
    await run.settle(run.completed(ANN, 0), run.completed(BOB, 2), run.completed(CAT, 4, page=1))
    told = await neighbours.until_counts(run, completed=3)
    assert told.counts.duplicates == 2
    assert accounted(told.counts)
    rows = await run.read_all(limit=2)
    assert [(row.index, row.mark) for row in rows] == [(0, "completed"), (1, "duplicate"), (2, "completed"), (3, "duplicate"), (4, "completed")]
    assert decoded(rows[1].data) == {"name": "ann", "note": "again", "email": "ann@x", "score": 3}
    assert decoded(rows[3].data) == {"name": "ann", "note": "on another page", "email": "ann@x", "score": 3}
    assert {row.index for row in neighbours.event_rows(run)} == {0, 2, 4}


async def test_a_page_looked_up_twice_at_once_is_counted_once(new_run: NewRun) -> None:
    run = new_run()
    answers = await asyncio.gather(*(run.look_up([ANN, BOB, ANN]) for _ in range(8)))
    assert {tuple(row.mark for row in answer.rows) for answer in answers} == {("sent", "sent", "duplicate")}
    assert (await run.counts()).counts == Counts(admitted=3, duplicates=1)


async def test_a_page_asked_for_again_answers_how_its_rows_stand_now(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    await run.settle(run.completed(ANN, 0))
    await neighbours.until_counts(run, completed=1)
    again = await run.look_up([ANN, BOB])
    assert [row.mark for row in again.rows] == ["completed", "sent"]
    assert again.counts == neighbours.told(run).counts


async def test_a_page_that_comes_with_other_rows_is_refused(new_run: NewRun) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    refused = await run.look_up([ANN, CAT])
    assert refused.error is not None
    assert refused.error.code == "page_changed"
    assert refused.rows == []


@pytest.mark.parametrize("change", [{"key": "zz" * 32}, {"key": "ab"}, {"index": 7}])
async def test_a_lookup_with_a_broken_row_is_answered_with_the_error(new_run: NewRun, change: dict[str, Any]) -> None:
    run = new_run()
    request = run.lookup([ANN, BOB])
    broken = replace(request, rows=[request.rows[0], replace(request.rows[1], **change)])
    answer = await run.ask(broken)
    assert answer.error is not None
    assert answer.error.code == "malformed_message"


async def test_repeated_and_concurrent_settling_of_one_page_counts_each_row_once(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    rows = [input_row(f"row{number}") for number in range(200)]
    await run.look_up(rows)
    parts = [[run.completed(row, index) for index, row in enumerate(rows)][start::7] for start in range(7)]
    await asyncio.gather(*(run.settle(*part) for part in parts for _ in range(3)))
    told = await neighbours.until_counts(run, completed=200)
    assert told.counts == Counts(admitted=200, completed=200, calls=200, cost=Decimal("2.000"))
    assert told.pages == [PageProgress(page=0, open=0)]
    assert len(await run.read_all()) == 200


async def test_counts_can_be_asked_for_with_the_pages_that_have_open_rows(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    assert (await run.counts()).version == 0
    await run.look_up([ANN])
    await run.look_up([BOB, CAT], page=1, first_index=1)
    await run.settle(run.completed(ANN, 0))
    await neighbours.until_counts(run, completed=1)
    answer = await run.counts()
    assert answer.counts == neighbours.told(run).counts
    assert answer.version == neighbours.told(run).version
    assert answer.pages == [PageProgress(page=1, open=2)]


async def test_a_read_is_cut_at_a_mebibyte_and_goes_on_where_it_ended(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    sizes = [400_000, 400_000, 400_000, 1_048_500, 10]
    rows = [input_row(f"row{number}") for number in range(len(sizes))]
    await run.look_up(rows)
    for index, size in enumerate(sizes):
        await run.settle(run.completed(rows[index], index, values=raw({"email": "x" * size, "score": 0})))
    await neighbours.until_counts(run, completed=len(sizes))
    slices = []
    offset: int | None = 0
    while offset is not None:
        answer = await run.read(offset=offset)
        slices.append([row.index for row in answer.rows])
        offset = answer.next_offset
    assert slices == [[0, 1], [2], [3], [4]]


async def test_a_read_past_the_end_or_of_an_unknown_run_is_empty(new_run: NewRun) -> None:
    run = new_run()
    assert await run.read() == await run.read(offset=5)
    await run.look_up([ANN, BOB])
    assert (await run.read(offset=1, limit=1)).next_offset is None
    assert (await run.read(offset=0, limit=1)).next_offset == 1
    assert (await run.read(offset=2)).rows == []


async def test_events_of_large_rows_come_in_parts(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    rows = [input_row(f"row{number}") for number in range(5)]
    await run.look_up(rows)
    big = raw({"email": "x" * 500_000, "score": 0})
    await run.settle(*(run.completed(row, index, values=big) for index, row in enumerate(rows)))
    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 5)
    assert [len(event.rows) for event in sorted(neighbours.events_of(run), key=lambda event: event.rows[0].index)] == [2, 2, 1]
