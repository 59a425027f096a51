"""Rows of a JSON Lines file: one object per line, blank lines skipped.

Like a CSV file it is read twice, so that a broken line in the middle is found before the first row is handed out. What JSON proper does not
allow but Python writes (NaN, infinities, lone surrogates) is read and stored by the documented encoding of values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from rowmill.errors import BadText
from rowmill.inputs.encodings import SAMPLE_BYTES, detect_encoding, known_encoding
from rowmill.inputs.lines import LineProblem, line_batches
from rowmill.inputs.sources import Row, Source
from rowmill.inputs.storable import storable_row

MAX_KNOWN_COLUMNS = 10_000
"""Distinct names after which a file has no columns but a name per value, and `columns` stays None."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class JsonLinesSource(Source):
    """A .jsonl or .ndjson file. `columns` holds every name that occurs, in order of appearance, and is known after `check`."""

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        super().__init__(str(path))
        self._path = path
        self._columns: list[str] | None = None
        self._checked = False
        with path.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
            complete = not file.read(1)
        self.encoding = known_encoding(encoding) if encoding is not None else detect_encoding(sample, complete=complete)

    @property
    def columns(self) -> list[str] | None:
        return None if self._columns is None else list(self._columns)

    def check(self) -> None:
        """Decode every line once, count the rows and collect their column names."""
        if self._checked:
            return
        names: dict[str, None] = {}
        records = blank = 0
        for row in self._objects():
            if row is None:
                blank += 1
                continue
            records += 1
            if not names.keys() >= row.keys() and len(names) <= MAX_KNOWN_COLUMNS:
                names.update(dict.fromkeys(row))
        self.stats.records, self.stats.blank_lines = records, blank
        self._columns = list(names) if len(names) <= MAX_KNOWN_COLUMNS else None
        self._checked = True

    def rows(self) -> Iterator[Row]:
        for record, row in enumerate((row for row in self._objects() if row is not None), 1):
            yield storable_row(row, name=self.name, record=record)

    def _objects(self) -> Iterator[dict[str, Any] | None]:
        """One object per line, None for a blank line."""
        record = line = 0
        with self._path.open("rb") as file:
            try:
                for text in chain.from_iterable(line_batches(file, self.encoding, newline="\n", refuse_nul=False)):
                    line += 1
                    if text.isspace():
                        yield None
                        continue
                    record += 1
                    yield self._object(text, record, line)
            except LineProblem as problem:
                raise BadText(self.name, problem.what, record=record + 1, line=line + 1, offset=problem.offset) from None

    def _object(self, text: str, record: int, line: int) -> dict[str, Any]:
        try:
            return _decode(text)
        except (msgspec.DecodeError, RecursionError):
            pass
        try:
            value = json.loads(text, parse_float=_within_range)
        except (ValueError, RecursionError) as error:
            what = "nested too deep" if isinstance(error, RecursionError) else f"not JSON: {error}"
            raise BadText(self.name, what, record=record, line=line) from None
        if not isinstance(value, dict):
            raise BadText(self.name, f"one JSON object per line is needed, found {_kind(value)}", record=record, line=line)
        return value


def _within_range(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
