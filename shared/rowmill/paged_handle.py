"""A handle that reads its rows page by page through a port."""

from __future__ import annotations

import datetime as dt
import decimal
import importlib
from collections.abc import AsyncIterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rowmill.encoding.exports import export_value
from rowmill.encoding.values import decode_value, has_tag
from rowmill.errors import UsageError, ValueNotStorable
from rowmill.handles import PAGE_ROWS, Handle, PageReader

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


class PagedHandle(Handle):
    """A handle over a `PageReader`. Pages are read when needed and not kept."""

    def __init__(self, run_id: str, dataset: str, reader: PageReader) -> None:
        self.run_id = run_id
        self.dataset = dataset
        self._reader = reader

    async def count(self) -> int:
        return await self._reader.count(self.run_id, self.dataset)

    async def peek(self, n: int = 5) -> list[dict[str, Any]]:
        return await self.materialize(n)

    async def at(self, i: int) -> dict[str, Any]:
        index = i if i >= 0 else i + await self.count()
        rows = [] if index < 0 else await self._reader.read_page(self.run_id, self.dataset, index, 1)
        if not rows:
            raise IndexError(f"dataset {self.dataset!r} has no row {i}; it has {await self.count()}")
        return self._decoded(rows[0])

    async def materialize(self, limit: int | None = None) -> list[dict[str, Any]]:
        return [self._decoded(row) async for row in self.stored(limit)]

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async for row in self.stored(None):
            yield self._decoded(row)

    async def stored(self, limit: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Rows as stored. A short first page where few are wanted; a page that is not full is the last one."""
        if limit is not None and limit < 0:
            raise UsageError(f"a limit cannot be negative: {limit}")
        size = PAGE_ROWS if limit is None else max(1, min(PAGE_ROWS, limit))
        left, page_number = limit, 0
        while left is None or left > 0:
            page = await self._reader.read_page(self.run_id, self.dataset, page_number, size)
            wanted = page if left is None else page[:left]
            for row in wanted:
                yield row
            if len(page) < size:
                return
            left = None if left is None else left - len(wanted)
            page_number += 1

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: decode_value(value, name, handle=self._sibling) for name, value in row.items()}

    def _sibling(self, run_id: str, dataset: str) -> PagedHandle:
        return PagedHandle(run_id, dataset, self._reader)

    async def to_arrow(self, limit: int | None = None) -> pa.Table:
        arrow = _library("pyarrow")
        rows = [{name: _tabular(value, name) for name, value in row.items()} async for row in self.stored(limit)]
        columns: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            try:
                columns[name] = arrow.array([row.get(name) for row in rows])
            except (arrow.ArrowInvalid, arrow.ArrowTypeError, OverflowError) as error:
                raise ValueNotStorable(f"column {name!r} has no one type that a table column could have: {error}") from error
        table: pa.Table = arrow.table(columns)
        return table

    async def to_polars(self, limit: int | None = None) -> pl.DataFrame:
        polars = _library("polars")
        frame: pl.DataFrame = polars.from_arrow(await self.to_arrow(limit))
        return frame

    async def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        _library("pandas")
        return (await self.to_arrow(limit)).to_pandas()


_TABLE_TYPES = (str, int, float, bytes, decimal.Decimal, dt.date, dt.time, dt.timedelta)


def _tabular(stored: Any, column: str) -> Any:
    """A cell for a table: what a table has a type for is decoded, anything else is as exported."""
    if not has_tag(stored):
        return stored
    decoded = decode_value(stored, column)
    return decoded if isinstance(decoded, _TABLE_TYPES) else export_value(stored)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name} is not installed here; install it to read rows as its tables") from error
