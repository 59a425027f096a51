"""Handles: lazy references to a run's dataset, its rows in input order.

A handle loads nothing until asked, and then pages of `PAGE_ROWS`. Where pages come from is a port, given by the executor or the client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

HANDLE = "$handle"
"""The one member of a handle's JSON form, ``{"$handle": {"run_id": ..., "dataset": ...}}``."""

PAGE_ROWS = 1000
"""Rows per page, the last one shorter."""


class PageReader(Protocol):
    """Where a handle's rows come from. Rows are as stored: JSON values in the encoding of `rowmill.encoding.values`."""

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        """Rows ``page_number * size`` onwards in input order, at most ``size``; fewer than ``size`` only at the end."""

    async def count(self, run_id: str, dataset: str) -> int:
        """How many rows the dataset has."""


class Handle(ABC):
    """The rows of one dataset of a run, in input order: input columns and output columns.

    It can be kept in a cell, returned from a play and given to the next dataset without being loaded.
    """

    run_id: str
    dataset: str

    @abstractmethod
    async def count(self) -> int:
        """How many rows there are, failed and duplicate ones included."""

    @abstractmethod
    async def peek(self, n: int = 5) -> list[dict[str, Any]]:
        """The first ``n`` rows."""

    @abstractmethod
    async def at(self, i: int) -> dict[str, Any]:
        """Row ``i``; negative counts from the end. Raises `IndexError`."""

    @abstractmethod
    async def materialize(self, limit: int | None = None) -> list[dict[str, Any]]:
        """All rows, or the first ``limit``, in memory."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Every row, a page in memory at a time."""

    def __iter__(self) -> NoReturn:
        """Refused: rows are fetched, and so must be awaited."""
        raise TypeError(f"{self!r} is read in async code: `async for row in handle`, or `rows = await handle.materialize()`")

    @abstractmethod
    async def to_arrow(self, limit: int | None = None) -> pa.Table:
        """The rows as a pyarrow table; a tool result is its data. Raises `ValueNotStorable` for a column whose values have no one type."""

    @abstractmethod
    async def to_polars(self, limit: int | None = None) -> pl.DataFrame:
        """The rows as a polars frame. Raises `UsageError` where polars is not installed."""

    @abstractmethod
    async def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """The rows as a pandas frame. Raises `UsageError` where pandas is not installed."""

    def to_json(self) -> dict[str, Any]:
        """The handle's JSON form."""
        return handle_json(self.run_id, self.dataset)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dataset} of run {self.run_id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and (self.run_id, self.dataset) == (other.run_id, other.dataset)

    def __hash__(self) -> int:
        return hash((self.run_id, self.dataset))


@dataclass(frozen=True, slots=True)
class HandleReference:
    """A handle read from JSON where nothing can read its rows."""

    run_id: str
    dataset: str

    def to_json(self) -> dict[str, Any]:
        return handle_json(self.run_id, self.dataset)


def handle_json(run_id: str, dataset: str) -> dict[str, Any]:
    """The JSON form of a handle."""
    return {HANDLE: {"run_id": run_id, "dataset": dataset}}


def handle_reference(value: Any) -> tuple[str, str] | None:
    """(run id, dataset) if the value is a handle's JSON form, else None."""
    inner = value.get(HANDLE) if isinstance(value, Mapping) and len(value) == 1 else None
    if not isinstance(inner, Mapping) or inner.keys() != {"run_id", "dataset"}:
        return None
    return inner["run_id"], inner["dataset"]
