"""The file formats of outputs. Each takes finished rows of exported values and writes them to an open part file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rowmill.outputs.cells import cell_text

_encode = msgspec.json.Encoder().encode

CSV_ENDINGS = {".csv": ",", ".tsv": "\t"}
JSON_LINES_ENDINGS = {".jsonl", ".ndjson"}
PARQUET_ENDINGS = {".parquet"}
ENDINGS = [*CSV_ENDINGS, *sorted(JSON_LINES_ENDINGS), *PARQUET_ENDINGS]


class RowFormat(Protocol):
    """Writes rows one after another."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Finish the file."""


class CsvFormat:
    """CSV with a header, UTF-8, lines ending in a newline; a missing value is an empty cell, as is empty text."""

    def __init__(self, path: Path, columns: list[str], delimiter: str) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8", newline="")
        self._columns = columns
        self._minimal = csv.writer(self._file, delimiter=delimiter, lineterminator="\n")
        self._quoting = csv.writer(self._file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        self._write_cells(columns)

    def write(self, row: dict[str, Any]) -> None:
        self._write_cells([cell_text(row.get(column)) for column in self._columns])

    def close(self) -> None:
        self._file.close()

    def _write_cells(self, cells: list[str]) -> None:
        # The writer quotes its own line end only, so a lone carriage return would come back as a new record.
        (self._quoting if any("\r" in cell for cell in cells) else self._minimal).writerow(cells)


class JsonLinesFormat:
    """One JSON object per line, with the columns that the row has."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(_encode(row) + b"\n")

    def close(self) -> None:
        self._file.close()
