"""Waits as decisions, and what a dead letter turns into."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rowmill_admission import waits
from rowmill_admission.dying import DEAD_LETTERED, failed_settlement
from rowmill_admission.sending import Return
from rowmill_admission.store.waits import Wait
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, PAGE_BYTES, PAGE_ROWS
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.runs import ParkedRow


def parked(index: int, count: int, attempt: int = 1) -> ParkedRow:
    return ParkedRow(key="k", index=index, page=0, attempt=attempt, waits=count)


def wait(index: int, state: str, count: int = 1) -> Wait:
    return msgspec.convert(
        {"dataset_seq": 1, "row_index": index, "key": "k", "page": 0, "attempt": 1, "waits": count, "state": state, "asked": 5.0}, Wait
    )


def settled_row(size: int = 2, **fields: object) -> SettledRow:
    given = {"key": "k", "index": 0, "page": 0, "attempt": 1, "status": "completed", **fields}
    return SettledRow(input=msgspec.Raw(b'{"a":"' + b"x" * size + b'"}'), **given)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2), st.integers(1, 9)), max_size=30))
def test_the_newest_wait_of_a_row_decides_in_whatever_order_they_come(told: list[tuple[int, int, int]]) -> None:
    rows = waits.newest(parked(index, count, attempt) for index, attempt, count in told)
    assert [row.index for row in rows] == sorted({index for index, _, _ in told})
    for row in rows:
        assert (row.attempt, row.waits) == max((attempt, count) for index, attempt, count in told if index == row.index)


def test_released_rows_come_back_with_their_waits() -> None:
    assert waits.returning([wait(402, "releasing", 3)], 400) == {2: Return(waits=3, attempt=1, asked=5.0)}


def test_rows_that_stand_as_waiting_are_not_out() -> None:
    out = waits.still_out(4, 400, {401: wait(401, "waiting"), 402: wait(402, "released", 2), 403: wait(403, "releasing")})
    assert out == {0: Return(waits=0), 2: Return(waits=2, attempt=1, asked=5.0)}


def test_the_next_look_is_at_the_next_due_row_or_at_the_poll() -> None:
    assert waits.sleep_for(None, 0.25, 0.005) == 0.25
    assert waits.sleep_for(10.0, 0.25, 0.005) == 0.25
    assert waits.sleep_for(0.1, 0.25, 0.005) == 0.1
    assert waits.sleep_for(0.001, 0.25, 0.005) == 0.005
    assert waits.sleep_for(-3.0, 0.25, 0.005) == 0.25


def test_settled_rows_are_cut_into_pages() -> None:
    rows = [settled_row() for _ in range(PAGE_ROWS + 1)] + [settled_row(PAGE_BYTES) for _ in range(2)]
    assert [len(part) for part in waits.parts(rows)] == [PAGE_ROWS, 1, 1, 1]


def test_a_settlement_that_dies_fails_its_rows_then_without_their_input_then_no_more() -> None:
    problem = Problem(code=DEAD_LETTERED, message="poison")
    first = RowsSettled(run_id="r", number=1, org="o", play="p", dataset="d", rows=[settled_row(calls=2)])
    second = failed_settlement(first, problem)
    assert second is not None
    assert [(row.status, row.error, row.calls, row.input) for row in second.rows] == [("failed", problem, 2, first.rows[0].input)]
    third = failed_settlement(second, problem)
    assert third is not None
    assert third.rows[0].input == EMPTY_OBJECT
    assert failed_settlement(third, problem) is None
