"""Finds out what a source is: a path by its ending, anything else by what it can do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rowmill.errors import InputError
from rowmill.handles import Handle
from rowmill.inputs.csv_source import CsvSource
from rowmill.inputs.jsonl_source import JsonLinesSource
from rowmill.inputs.memory_source import IteratorSource, ListSource
from rowmill.inputs.sources import Source

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Of the files that hold rows, in small letters."""

_ENDINGS = ", ".join(ENDINGS)


def open_source(
    source: Any,
    *,
    delimiter: str | None = None,
    quote: str | None = None,
    encoding: str | None = None,
    bad_rows: Path | None = None,
    require: Sequence[str] = (),
) -> Source:
    """The rows of a file (`str` or path), list, iterator, pandas or polars frame, Arrow table or stream.

    `delimiter`, `quote` ("" for none) and `encoding` replace what would be detected in a text file; `bad_rows` names the file that CSV
    records of wrong width, or with nothing in a column that they `require`, are written to. A file is opened and its header read here; the rest
    is read when pages are asked for.

    Raises `InputError` when the source is missing, empty, unreadable or of no known kind.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            return _open_file(path, delimiter=delimiter, quote=quote, encoding=encoding, bad_rows=bad_rows, require=require)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if hasattr(source, "__arrow_c_stream__"):
        from rowmill.inputs.arrow_source import StreamSource  # noqa: PLC0415 - Arrow is large and only some inputs need it

        return StreamSource(source)
    if isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray, memoryview)):
        return ListSource(source)
    if isinstance(source, Iterable) and not isinstance(source, (Mapping, bytes, bytearray, memoryview, Handle)):
        return IteratorSource(source)
    raise InputError(
        f"cannot read rows from a {type(source).__name__}; give a path ({_ENDINGS}), a list or iterator of rows, "
        "a pandas or polars frame, or an Arrow stream"
    )


def _open_file(
    path: Path, *, delimiter: str | None, quote: str | None, encoding: str | None, bad_rows: Path | None, require: Sequence[str]
) -> Source:
    if not path.exists():
        raise InputError(f"no such file: {path}")
    if not path.is_file():
        raise InputError(f"{path} is not a regular file; files are read twice, so save a pipe's output first")
    ending = path.suffix.lower()
    if ending in {".csv", ".tsv"}:
        return CsvSource(path, delimiter=delimiter, quote=quote, encoding=encoding, bad_rows=bad_rows, require=require)
    if delimiter is not None or quote is not None or bad_rows is not None or require:
        raise InputError(f"{path}: delimiter, quote, bad rows and required columns are options for CSV files")
    if ending in {".jsonl", ".ndjson"}:
        return JsonLinesSource(path, encoding=encoding)
    if ending == ".parquet":
        from rowmill.inputs.arrow_source import ParquetSource  # noqa: PLC0415 - Arrow is large and only some inputs need it

        return ParquetSource(path)
    raise InputError(f"cannot tell what {path} holds from its ending; known: {_ENDINGS}")
