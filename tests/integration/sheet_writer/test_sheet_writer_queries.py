"""Sheets asked by SQL: the views can be read, and nothing else can be done."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.sheet_writer.conftest import Neighbours, SheetRun, decoded, input_row, key_of

from rowmill_contracts.rows import QuerySheets, SheetsQueried
from rowmill_contracts.topology import SHEETS_ASKS

pytestmark = pytest.mark.servers

NewRun = Callable[..., SheetRun]
ANN, BOB = input_row("ann"), input_row("bob")


async def query(neighbours: Neighbours, sql: str, *parameters: Any, **options: Any) -> SheetsQueried:
    return await neighbours.bus.ask(QuerySheets(sql=sql, parameters=list(parameters), **options), SHEETS_ASKS, SheetsQueried)


async def test_rows_marks_and_counts_can_be_read(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN, ANN, BOB])
    await run.settle(run.completed(ANN, 0))
    await neighbours.until_counts(run, completed=1)

    rows = await query(neighbours, "SELECT key, status, cells, cells->>'email' AS email FROM rows WHERE dataset = $1", run.dataset)
    assert rows.columns == ["key", "status", "cells", "email"]
    assert [decoded(row) for row in rows.rows] == [[key_of("ann"), "completed", {"email": "ann@x", "score": 3}, "ann@x"]]
    marks = await query(neighbours, "SELECT index, key, mark FROM run_rows WHERE run_id = $1 ORDER BY index", run.run_id)
    assert [decoded(row) for row in marks.rows] == [
        [0, key_of("ann"), "completed"],
        [1, key_of("ann"), "duplicate"],
        [2, key_of("bob"), "sent"],
    ]
    counts = await query(neighbours, "SELECT admitted, completed, cost FROM run_counts WHERE run_id = $1", run.run_id)
    assert [decoded(row) for row in counts.rows] == [[3, 1, "0.010"]]


async def test_results_come_in_pages(new_run: NewRun, neighbours: Neighbours) -> None:
    new_run()
    sql = "SELECT n FROM generate_series(1, 25) AS n"
    pages = [await query(neighbours, sql, limit=10, offset=offset) for offset in (0, 10, 20, 30)]
    assert [[decoded(row)[0] for row in page.rows] for page in pages] == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26)), []]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT * FROM sheets.sheet_rows", "permission denied"),
        ("DELETE FROM rows", "cannot delete from view"),
        ("CREATE TABLE mine (a int)", "return rows"),
        ("COMMIT", "return rows"),
        ("SET ROLE NONE", "return rows"),
        ("SELECT SET_CONFIG('role', 'none', true)", "SET_CONFIG"),
        ("SELECT 1; SELECT 2", "multiple commands"),
        ("SELECT pg_read_file('/etc/passwd')", "permission denied"),
        ("SELEC 1", "syntax error"),
        ("SELECT $1::int", "expects 1 argument"),
        ("SELECT pg_sleep(60)", "statement timeout"),
        ("SELECT repeat('x', 1000000) FROM generate_series(1, 10)", "over 8388608 bytes"),
    ],
)
async def test_anything_else_is_refused_with_the_reason(new_run: NewRun, neighbours: Neighbours, sql: str, reason: str) -> None:
    new_run()
    answer = await query(neighbours, sql)
    assert answer.error is not None
    assert answer.error.code == "query_refused"
    assert re.search(reason, answer.error.message)


async def test_a_refused_question_leaves_the_writer_as_it_was(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    for sql in ("SELECT 1 / 0", "SHOW search_path", "SELECT * FROM sheet_rows"):
        await query(neighbours, sql)
    await run.look_up([ANN])
    await run.settle(run.completed(ANN, 0))
    await neighbours.until_counts(run, completed=1)
