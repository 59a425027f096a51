"""Author code that the engine calls outside of a task of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rowmill_contracts.row_keys import KeyPage
from rowmill_row_executor.failures import RowFailure, problem_of
from rowmill_row_executor.handlers import keys_of
from rowmill_row_executor.stand_in import StandIn, apart


async def test_a_key_function_that_cancels_its_task_does_not_cancel_who_asked_for_the_keys() -> None:
    def key(row: dict[str, Any]) -> int:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return int(row["n"])

    page = KeyPage(run_id="run", dataset="leads", page=0, first_index=0, rows=[msgspec.Raw(b'{"n":%d}' % n) for n in range(3)])
    asked_by = asyncio.current_task()
    assert asked_by is not None
    assert len(set(apart(keys_of, key, page))) == 3
    assert asyncio.current_task() is asked_by
    assert not asked_by.cancelling()
    await asyncio.sleep(0)


def test_a_key_function_that_takes_its_row_for_the_model_is_told_what_it_gets() -> None:
    def key(row: Any) -> str:
        return str(row.company_name)

    page = KeyPage(run_id="run", dataset="leads", page=0, first_index=4, rows=[msgspec.Raw(b'{"company_name":"A"}')])
    with pytest.raises(RowFailure) as raised:
        keys_of(key, page)
    problem = problem_of(raised.value.error, row=raised.value.row, code="key_failed")
    assert (problem.code, problem.row) == ("key_failed", 4)
    assert problem.message == (
        "AttributeError: 'dict' object has no attribute 'company_name': "
        'key functions get the row as a dict of the input\'s cells, so write row["company_name"]'
    )


def test_another_missing_attribute_is_said_as_it_is() -> None:
    page = KeyPage(run_id="run", dataset="leads", page=0, first_index=0, rows=[msgspec.Raw(b'{"n":1}')])
    with pytest.raises(RowFailure) as raised:
        keys_of(lambda row: row["n"].company_name, page)
    assert problem_of(raised.value.error).message == "AttributeError: 'int' object has no attribute 'company_name'"


def test_an_empty_key_names_the_function_that_gave_it() -> None:
    def by_name(row: dict[str, Any]) -> Any:
        return row["n"]

    page = KeyPage(run_id="run", dataset="leads", page=0, first_index=0, rows=[msgspec.Raw(b'{"n":null}')])
    with pytest.raises(RowFailure) as raised:
        keys_of(by_name, page)
    assert "the value of key function 'by_name' is null" in problem_of(raised.value.error).message


async def test_each_that_is_run_in_a_stand_in_finds_a_task_that_nobody_cancelled() -> None:
    stand_in = StandIn()
    for _ in range(3):
        stand_in.enter()
        try:
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            task.cancel()
        finally:
            stand_in.leave()
        await asyncio.sleep(0)
    stand_in.end()
