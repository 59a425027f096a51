"""Parquet output: each column typed by all of its values, text where they differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.outputs.cells import cell_text
from rowmill.outputs.spool import ColumnKinds

_GROUP_ROWS = 20_000
_GROUP_CHARACTERS = 16 * 1024 * 1024


def write_parquet(path: Path, columns: dict[str, ColumnKinds], rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` with `columns` in their order. Booleans, integers and floats keep their type in a column that holds nothing else (and null);
    otherwise text is itself and any other value is its JSON text. Memory: one row group.
    """
    schema = pa.schema([pa.field(name, _type(kinds)) for name, kinds in columns.items()])
    texts = [name for name, kinds in columns.items() if _type(kinds) == pa.string()]
    with pq.ParquetWriter(path, schema) as writer:
        group: list[dict[str, Any]] = []
        characters = 0
        for row in rows:
            for name in texts:
                if (value := row.get(name)) is not None:
                    row[name] = cell_text(value)
                    characters += len(row[name])
            group.append(row)
            if len(group) >= _GROUP_ROWS or characters >= _GROUP_CHARACTERS:
                writer.write_batch(pa.RecordBatch.from_pylist(group, schema=schema))
                group, characters = [], 0
        if group:
            writer.write_batch(pa.RecordBatch.from_pylist(group, schema=schema))


def _type(kinds: ColumnKinds) -> Any:
    if kinds.other or (kinds.boolean and (kinds.integer or kinds.number)) or (kinds.number and kinds.inexact):
        return pa.string()
    if kinds.boolean:
        return pa.bool_()
    if kinds.number:
        return pa.float64()
    return pa.int64() if kinds.integer else pa.string()
