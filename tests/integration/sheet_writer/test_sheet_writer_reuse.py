"""What later runs take over from a sheet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.sheet_writer.conftest import COLUMNS, Neighbours, SheetRun, accounted, decoded, input_row, key_of, raw

from rowmill_contracts.counts import Counts
from rowmill_contracts.runs import ColumnInfo, PageProgress

pytestmark = pytest.mark.servers

NewRun = Callable[..., SheetRun]
ANN, BOB, CAT = input_row("ann"), input_row("bob"), input_row("cat")


@pytest.fixture
async def first(new_run: NewRun, neighbours: Neighbours) -> SheetRun:
    """A run that completed ann and bob, and failed at cat."""
    run = new_run()
    await run.look_up([ANN, BOB, CAT])
    await run.settle(run.completed(ANN, 0), run.completed(BOB, 1), run.failed(CAT, 2))
    await neighbours.until_counts(run, completed=2, failed=1)
    return run


async def test_completed_rows_are_reused_and_told_without_being_sent(first: SheetRun, new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    looked = await run.look_up([ANN, BOB, CAT])
    assert [row.mark for row in looked.rows] == ["reused", "reused", "sent"]
    assert looked.counts == Counts(admitted=3, reused=2)
    told = await neighbours.until_counts(run, reused=2)
    assert told.pages == [PageProgress(page=0, open=1)]
    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 2)
    assert [(row.key, row.attempt, row.status, row.reused, decoded(row.data)) for row in neighbours.event_rows(run)] == [
        (key_of("ann"), 1, "completed", True, {"name": "ann", "email": "ann@x", "score": 3}),
        (key_of("bob"), 1, "completed", True, {"name": "bob", "email": "bob@x", "score": 3}),
    ]
    assert [row.mark for row in await run.read_all()] == ["reused", "reused", "sent"]


async def test_a_page_of_reused_rows_asked_for_again_is_told_again_in_the_same_words(
    first: SheetRun, new_run: NewRun, neighbours: Neighbours
) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    await run.look_up([ANN, BOB])
    await neighbours.until(lambda: len(neighbours.events_of(run)) == 2)
    assert neighbours.events_of(run)[0] == neighbours.events_of(run)[1]
    await neighbours.until(lambda: len([c for c in neighbours.committed if c.run_id == run.run_id]) == 2)
    assert neighbours.told(run).counts == Counts(admitted=2, reused=2)
    assert neighbours.told(run).version == 1


async def test_sent_rows_carry_what_the_sheet_has(first: SheetRun, new_run: NewRun) -> None:
    looked = await new_run().look_up([ANN], columns=[COLUMNS[0], ColumnInfo(name="score", version="2")])
    assert looked.rows[0].mark == "sent"
    known = decoded(looked.rows[0].known)
    assert {name: (cell["value"], cell["reusable"]) for name, cell in known.items()} == {"email": ("ann@x", True), "score": (3, False)}
    assert known["email"]["meta"]["completed_at"] == 1000.5


async def test_the_current_runs_input_columns_win(first: SheetRun, new_run: NewRun, neighbours: Neighbours) -> None:
    run, later = new_run(), new_run()
    changed = input_row("ann", note="new", email="from the input")
    assert [row.mark for row in (await run.look_up([changed])).rows] == ["reused"]
    [row] = await run.read_all()
    assert decoded(row.data) == {"name": "ann", "note": "new", "email": "ann@x", "score": 3}
    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 1)
    assert decoded(neighbours.event_rows(run)[0].data) == decoded(row.data)
    assert [row.mark for row in (await later.look_up([changed])).rows] == ["reused"]


async def test_an_older_run_reuses_a_newer_runs_row_without_changing_its_input(first: SheetRun, new_run: NewRun) -> None:
    older, newer = new_run(), new_run()
    await newer.look_up([input_row("ann", note="newer")])
    assert [row.mark for row in (await older.look_up([input_row("ann", note="older")])).rows] == ["reused"]
    assert [decoded(row.data)["note"] for row in await newer.read_all() + await older.read_all()] == ["newer", "older"]


async def test_a_changed_column_that_was_read_sends_the_row(first: SheetRun, new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([input_row("dan", size=1)])
    meta = {name: {"status": "completed", "version": "1", "reads": "*"} for name in ("email", "score")}
    await run.settle(run.completed(input_row("dan", size=1), 0, meta=raw(meta)))
    await neighbours.until_counts(run, completed=1)
    assert [row.mark for row in (await new_run().look_up([input_row("dan", size=2)])).rows] == ["sent"]
    assert [row.mark for row in (await new_run().look_up([input_row("dan", size=1)])).rows] == ["reused"]


async def test_two_runs_that_renew_a_rows_input_at_once_both_get_an_answer(first: SheetRun, new_run: NewRun) -> None:
    runs = [new_run() for _ in range(6)]
    pages = [[input_row("ann", by=run.number), input_row("bob", by=run.number)] for run in runs]
    answers = await asyncio.gather(*(run.look_up(page) for run, page in zip(runs, pages, strict=True)))
    for answer in answers:
        assert answer.error is None
        assert {row.mark for row in answer.rows} <= {"reused", "sent"}
    assert [row.mark for row in answers[-1].rows] != []


@pytest.mark.parametrize(
    ("options", "marks"),
    [
        ({"force": "all"}, ["sent", "sent", "sent"]),
        ({"force": "tools"}, ["sent", "sent", "sent"]),
        ({"force": "steps"}, ["sent", "sent", "sent"]),
        ({"force": "failed"}, ["reused", "reused", "sent"]),
        ({"force": "failed", "columns": [ColumnInfo(name="email", version="9")]}, ["reused", "reused", "sent"]),
        ({"mode": "net_new"}, ["skipped", "skipped", "sent"]),
        ({"mode": "net_new", "force": "all"}, ["skipped", "skipped", "sent"]),
    ],
)
async def test_options_decide_what_is_sent(first: SheetRun, new_run: NewRun, options: dict[str, Any], marks: list[str]) -> None:
    assert [row.mark for row in (await new_run().look_up([ANN, BOB, CAT], **options)).rows] == marks


async def test_net_new_counts_only_what_it_admitted(first: SheetRun, new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    looked = await run.look_up([ANN, CAT, input_row("ann", n=2), input_row("cat", n=2)], mode="net_new")
    assert [row.mark for row in looked.rows] == ["skipped", "sent", "skipped", "duplicate"]
    assert looked.counts == Counts(admitted=2, duplicates=1)
    await run.settle(run.completed(CAT, 1))
    await neighbours.until_counts(run, completed=1)
    late = await run.look_up([input_row("cat", n=3)], page=1, first_index=4, seen=["cat"], mode="net_new")
    assert [row.mark for row in late.rows] == ["duplicate"]
    assert accounted(late.counts)


async def test_retrying_failed_rows_leaves_the_input_that_reused_cells_were_computed_from(first: SheetRun, new_run: NewRun) -> None:
    run, later = new_run(), new_run()
    changed = [input_row("ann", size=2), CAT]
    columns = [ColumnInfo(name="email", version="2"), ColumnInfo(name="score", version="1")]
    assert [row.mark for row in (await run.look_up(changed, force="failed", columns=columns)).rows] == ["reused", "sent"]
    assert decoded((await run.read_all())[0].data) == {"name": "ann", "size": 2, "email": "ann@x", "score": 3}
    assert decoded((await first.read_all())[0].data) == {"name": "ann", "email": "ann@x", "score": 3}
    assert [row.mark for row in (await later.look_up([ANN])).rows] == ["reused"]


@pytest.mark.parametrize("dead", [True, False])
async def test_a_row_that_ended_without_cells_keeps_those_of_earlier_runs(
    first: SheetRun, new_run: NewRun, neighbours: Neighbours, *, dead: bool
) -> None:
    run, later = new_run(), new_run()
    await run.look_up([ANN], force="all")
    await run.settle(run.without_cells(ANN, 0, dead=dead))
    await neighbours.until_counts(run, **({"failed": 1} if dead else {"cancelled": 1}))
    [row] = await run.read_all()
    assert (row.mark, decoded(row.data)) == ("failed" if dead else "cancelled", {"name": "ann"})
    assert (row.error is not None) == dead
    looked = await later.look_up([ANN])
    assert looked.rows[0].mark == "sent"
    assert all(cell["reusable"] for cell in decoded(looked.rows[0].known).values())


async def test_sheets_of_other_plays_are_not_looked_at(first: SheetRun, new_run: NewRun) -> None:
    assert [row.mark for row in (await new_run(play="other").look_up([ANN])).rows] == ["sent"]
