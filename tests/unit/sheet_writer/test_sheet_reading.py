"""What a run's rows look like when they are read back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import joined
from rowmill_sheet_writer.marks import End
from rowmill_sheet_writer.pages import PageId, PageRecord
from rowmill_sheet_writer.querying import refusal, sheets_queried
from rowmill_sheet_writer.reading import Place, StoredCells, places, read_row


def page(letters: str, *, first: int = 0, **changes: Any) -> PageRecord:
    return PageRecord(PageId("run", "leads", 0), 7, first, bytes(range(32)) * len(letters), list(letters), **changes)


def cells(**changes: Any) -> StoredCells:
    given: dict[str, Any] = {
        "status": "completed",
        "shadows": False,
        "cells_kept": False,
        "input": '{"a":1}',
        "values": '{"b":2}',
        "meta": '{"b":{}}',
        "error": None,
    }
    return StoredCells(**{**given, **changes})


NOTHING = cells(status=None, input=None, values=None, meta=None)


def data(letter: str, stored: StoredCells, **changes: Any) -> bytes:
    return bytes(read_row(Place(page(letter, **changes), 0), stored, meta=True).data)


@pytest.mark.parametrize("letter", list("crdfxk"))
def test_a_row_that_ended_shows_its_input_and_its_cells(letter: str) -> None:
    assert data(letter, cells()) == b'{"a":1,"b":2}'


def test_a_row_that_has_not_ended_shows_no_cells_of_earlier_runs() -> None:
    row = read_row(Place(page("s"), 0), cells(error=Problem(code="old", message="old")), meta=True)
    assert (bytes(row.data), bytes(row.meta), row.error, row.attempt) == (b'{"a":1}', b"{}", None, 0)
    assert data("s", NOTHING) == b"{}"


@pytest.mark.parametrize("letter", list("flx"))
def test_a_row_that_ended_without_cells_shows_none_of_those_that_were_kept(letter: str) -> None:
    assert data(letter, cells(cells_kept=True)) == b'{"a":1}'


def test_an_input_of_the_runs_own_wins_over_the_sheets_and_keeps_its_numbers() -> None:
    own = msgspec.Raw('{"a":1e400,"b":123456789012345678901234567890}')
    assert data("d", cells(), inputs={0: own}) == b'{"a":1e400,"b":2}'
    assert bytes(joined(own, msgspec.Raw('{"c":1.0}'), shadows=True)) == b'{"a":1e400,"b":123456789012345678901234567890,"c":1.0}'


def test_attempts_are_those_of_the_run() -> None:
    record = page("cfr", ends={1: End(3)})
    assert [read_row(Place(record, at), cells(), meta=False).attempt for at in range(3)] == [1, 3, 1]


def test_a_slice_begins_and_ends_within_pages_and_skips_what_is_not_on_record() -> None:
    pages = [page("ccc", first=0), page("ccc", first=6)]
    assert [place.index for place in places(pages, 1, 8)] == [1, 2, 6, 7]
    assert places(pages, 3, 6) == []


def test_answers_to_questions_keep_json_as_it_is() -> None:
    answer = sheets_queried(["a", "b", "c"], ["json", "jsonb", "text"], [('{"x": 1.0}', None, '{"x"}')])
    assert [bytes(row) for row in answer.rows] == [b'[{"x": 1.0},null,"{\\"x\\"}"]']


@pytest.mark.parametrize("sql", ["SELECT set_config('role', 'none', true)", "SELECT QUERY_TO_XML('', true, true, '')", 'SELECT U&"\\0061"'])
def test_ways_out_of_the_readers_role_are_refused(sql: str) -> None:
    answer = refusal(sql)
    assert answer is not None
    assert answer.error is not None
    assert refusal("SELECT * FROM rows") is None
