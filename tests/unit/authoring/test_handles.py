"""Handles read pages when asked, decode what is stored, and travel as references."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

from rowmill.encoding.values import decode_value, encode_value
from rowmill.errors import InputError, UsageError, ValueNotStorable
from rowmill.handles import Handle
from rowmill.inputs import open_source
from rowmill.paged_handle import PagedHandle
from rowmill.tool_results import ToolResult


class Pages:
    """A reader over rows in memory that remembers which pages were read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = [{name: encode_value(value, name) for name, value in row.items()} for row in rows]
        self.read: list[tuple[int, int]] = []

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        self.read.append((page_number, size))
        return self.rows[page_number * size : (page_number + 1) * size]

    async def count(self, run_id: str, dataset: str) -> int:
        return len(self.rows)


def handle(rows: list[dict[str, Any]]) -> tuple[Handle, Pages]:
    pages = Pages(rows)
    return PagedHandle("r1", "leads", pages), pages


NUMBERS = [{"n": number} for number in range(2500)]


async def test_nothing_is_read_until_asked() -> None:
    found, pages = handle(NUMBERS)
    assert (found.run_id, found.dataset, pages.read) == ("r1", "leads", [])
    assert await found.count() == 2500
    assert pages.read == []


async def test_iteration_reads_a_page_at_a_time() -> None:
    found, pages = handle(NUMBERS)
    seen = []
    async for row in found:
        seen.append(row["n"])
        assert len(pages.read) == len(seen) // 1000 + (len(seen) % 1000 > 0)
    assert seen == list(range(2500))
    assert pages.read == [(0, 1000), (1, 1000), (2, 1000)]


def test_reading_in_a_plain_loop_is_refused_with_what_to_write() -> None:
    found, pages = handle(NUMBERS)
    for read in (list, iter, lambda rows: next(row for row in rows)):
        with pytest.raises(TypeError, match=r"`async for row in handle`, or `rows = await handle\.materialize\(\)`"):
            read(found)
    with pytest.raises(InputError, match="cannot read rows from a PagedHandle"):
        open_source(found)
    assert pages.read == []


@pytest.mark.parametrize(("limit", "pages_read"), [(5, [(0, 5)]), (1000, [(0, 1000)]), (1500, [(0, 1000), (1, 1000)]), (0, [])])
async def test_a_limit_reads_no_more_than_it_needs(limit: int, pages_read: list[tuple[int, int]]) -> None:
    found, pages = handle(NUMBERS)
    assert [row["n"] for row in await found.materialize(limit)] == list(range(limit))
    assert pages.read == pages_read


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001])
async def test_every_row_comes_once_at_page_borders(count: int) -> None:
    found, _ = handle(NUMBERS[:count])
    assert await found.materialize() == NUMBERS[:count]
    assert await found.peek(3) == NUMBERS[: min(3, count)]


async def test_rows_are_found_by_place_from_either_end() -> None:
    found, _ = handle(NUMBERS)
    assert [(await found.at(place))["n"] for place in (0, 1234, -1, -2500)] == [0, 1234, 2499, 0]
    for place in (2500, -2501):
        with pytest.raises(IndexError, match=f"no row {place}; it has 2500"):
            await found.at(place)
    with pytest.raises(UsageError, match="negative"):
        await found.materialize(-1)


async def test_stored_values_are_decoded_and_handles_in_cells_can_be_read() -> None:
    inner, _ = handle([])
    found, _ = handle([{"price": Decimal("1.10"), "day": dt.date(2024, 1, 1), "more": inner}])
    row = await found.at(0)
    assert row == {"price": Decimal("1.10"), "day": dt.date(2024, 1, 1), "more": inner}
    assert isinstance(row["more"], Handle)
    assert await row["more"].count() == 1


def test_a_handle_travels_as_a_reference() -> None:
    found, pages = handle([])
    assert found.to_json() == {"$handle": {"run_id": "r1", "dataset": "leads"}}
    encoded = encode_value({"done": found}, "output")
    assert decode_value(encoded, "output", handle=lambda run, dataset: PagedHandle(run, dataset, pages)) == {"done": found}


async def test_tables_have_columns_of_every_row_with_real_types() -> None:
    result = ToolResult(tool="a.b", status="completed", raw={"x": 1}, data={"x": 1})
    found, _ = handle(
        [
            {"name": "a", "price": Decimal("1.10"), "day": dt.date(2024, 1, 1), "cell": result},
            {"name": "b", "price": None, "late": [1, 2]},
        ]
    )
    frame = await found.to_polars()
    assert frame.to_dicts() == [
        {"name": "a", "price": Decimal("1.10"), "day": dt.date(2024, 1, 1), "cell": {"x": 1}, "late": None},
        {"name": "b", "price": None, "day": None, "cell": None, "late": [1, 2]},
    ]
    assert frame.schema["day"] == pl.Date
    assert (await found.to_pandas(limit=1))["name"].tolist() == ["a"]
    assert (await found.to_arrow()).num_rows == 2


async def test_an_empty_dataset_is_an_empty_table() -> None:
    found, _ = handle([])
    assert (await found.to_arrow()).num_rows == 0


async def test_a_column_of_several_types_is_refused_by_name() -> None:
    found, _ = handle([{"mixed": 1}, {"mixed": "one"}])
    with pytest.raises(ValueNotStorable, match="column 'mixed' has no one type"):
        await found.to_arrow()
