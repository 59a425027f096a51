"""Rows of Arrow data: Parquet files, and anything with an Arrow stream (pandas and polars frames, Arrow tables and readers).

Values keep their meaning: what JSON cannot carry (dates, decimals, bytes) is stored by the documented encoding of values; times finer
than a microsecond, which Python's own types would cut, become text. A missing value in a pandas column is null. An unnamed pandas index
is not a column.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.errors import InputError
from rowmill.inputs.headers import unique_names
from rowmill.inputs.sources import PAGE_BYTES, Row, Source
from rowmill.inputs.storable import storable_row

_SLICE_ROWS = 1000
_SLICE_BYTES = 4 * PAGE_BYTES
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")


class ArrowSource(Source):
    """Rows of record batches, turned into Python values a small slice at a time."""

    def __init__(self, name: str, schema: Any) -> None:
        super().__init__(name)
        self._kept = [position for position, spelt in enumerate(schema.names) if not _UNNAMED_INDEX.fullmatch(spelt)]
        self._columns = unique_names([schema.names[position] for position in self._kept])

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Record batches in order."""

    def rows(self) -> Iterator[Row]:
        record = 0
        for batch in self.batches():
            for part in _slices(batch):
                columns = [_values(part.column(position)) for position in self._kept]
                for values in zip(*columns, strict=True) if columns else [()] * part.num_rows:
                    record += 1
                    yield storable_row(dict(zip(self._columns, values, strict=True)), name=self.name, record=record)


class ParquetSource(ArrowSource):
    """A Parquet file, read a batch at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with pq.ParquetFile(path) as file:
                schema, records = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error}") from error
        super().__init__(str(path), schema)
        self.stats.records = records

    def batches(self) -> Iterator[Any]:
        try:
            with pq.ParquetFile(self._path, buffer_size=PAGE_BYTES, pre_buffer=False) as file:
                yield from file.iter_batches(batch_size=_SLICE_ROWS)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self._path}: damaged Parquet file: {error}") from error


class StreamSource(ArrowSource):
    """An object with `__arrow_c_stream__`, read once and only as far as pages are asked for."""

    def __init__(self, stream: Any) -> None:
        self._reader = pa.RecordBatchReader.from_stream(stream)
        self._begun = False
        super().__init__(type(stream).__name__, self._reader.schema)

    def batches(self) -> Iterator[Any]:
        if self._begun:
            raise InputError(f"{self.name}: an Arrow stream can be read only once")
        self._begun = True
        for batch in self._reader:
            self.stats.records += batch.num_rows
            yield batch


def _slices(batch: Any) -> Iterator[Any]:
    """Parts of a batch that are small as Python objects too."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    rows = max(1, min(_SLICE_ROWS, _SLICE_BYTES // row_bytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _values(column: Any) -> list[Any]:
    """A column as Python values, with nanoseconds as microseconds where nothing is lost, else as text."""
    kind = column.type
    if pa.types.is_temporal(kind) and getattr(kind, "unit", None) == "ns":
        try:
            column = column.cast(_in_microseconds(kind))
        except pa.ArrowInvalid:
            column = column.cast(pa.int64() if pa.types.is_duration(kind) else pa.string())
    values: list[Any] = column.to_pylist()
    return values


def _in_microseconds(kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
