"""Rows of a CSV file.

The file is read twice: once to find everything that is wrong with it before any row is handed out, once to hand the rows out. Neither
pass keeps more than a chunk and a record. Cells are strings, and an empty cell is the empty string.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from rowmill.errors import BadRecord, BadRecords, BadText, InputError
from rowmill.inputs.dialects import Dialect, detect_dialect, spelt_delimiter
from rowmill.inputs.encodings import SAMPLE_BYTES, detect_encoding, known_encoding
from rowmill.inputs.headers import unique_names
from rowmill.inputs.lines import MAX_LINE_CHARACTERS, LineProblem, line_batches
from rowmill.inputs.sources import Row, Source
from rowmill.outputs.files import replacing

LISTED_BAD_RECORDS = 20
_DIALECT_SAMPLE_CHARACTERS = 256 * 1024

Record = tuple[int, int, list[str]]
"""A record's number (from 1, the header is 0), the line it starts on (from 1), its fields."""


class CsvSource(Source):
    """A CSV file. `encoding` and `dialect` say how it is read, whether given or detected. `require`: columns in which every record has something."""

    def __init__(
        self,
        path: Path,
        *,
        delimiter: str | None = None,
        quote: str | None = None,
        encoding: str | None = None,
        bad_rows: Path | None = None,
        require: Sequence[str] = (),
    ) -> None:
        super().__init__(str(path))
        self._path = path
        self._bad_rows = bad_rows
        self._checked = False
        with path.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
            complete = not file.read(1)
        self.encoding = known_encoding(encoding) if encoding is not None else detect_encoding(sample, complete=complete)
        text = sample.decode(self.encoding, errors="replace").removeprefix("\ufeff")
        self.dialect: Dialect = detect_dialect(
            text[:_DIALECT_SAMPLE_CHARACTERS],
            complete=complete and len(text) <= _DIALECT_SAMPLE_CHARACTERS,
            delimiter=_one_character("delimiter", spelt_delimiter(delimiter)) if delimiter is not None else None,
            quote=_one_character("quote", quote) if quote else quote,
            prefer_tab=path.suffix.lower() == ".tsv",
        )
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_CHARACTERS))  # a setting of the process: only ever raised
        header = next(self._records(), None)
        if header is None:
            raise InputError(f"{path}: the file is empty; its first line must name the columns")
        self._columns = unique_names(header[2])
        missing = [name for name in require if name not in self._columns]
        if missing:
            raise InputError(f"{path}: there is no column {missing[0]!r} that every record could fill; columns: {', '.join(self._columns)}")
        self._required = [self._columns.index(name) for name in dict.fromkeys(require)]

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def check(self) -> None:
        """Find every record that is bad, undecodable bytes and broken quoting; write the file of bad rows if one was asked for."""
        if self._checked:
            return
        width = len(self._columns)
        first_bad: list[BadRecord] = []
        bad = 0
        self.stats.blank_lines = 0
        number = 0
        with ExitStack() as stack:
            aside: Any = None
            if self._bad_rows is not None:
                part = stack.enter_context(replacing(self._bad_rows))
                aside = csv.writer(stack.enter_context(part.open("w", encoding="utf-8", newline="")), lineterminator="\n")
                aside.writerow(["_record", "_line", "_why", *self._columns])
            for number, line, cells in self._records(body=True, count_blank=True):
                found = self._bad(number, line, cells)
                if found is None:
                    continue
                bad += 1
                if aside is not None:
                    aside.writerow([number, line, found.why, *cells])
                elif bad <= LISTED_BAD_RECORDS:
                    first_bad.append(found)
        if first_bad:
            raise BadRecords(self.name, width, first_bad, bad)
        self.stats.records = number - bad
        self.stats.set_aside = bad
        self._checked = True

    def rows(self) -> Iterator[Row]:
        columns = self._columns
        for number, line, cells in self._records(body=True):
            found = self._bad(number, line, cells)
            if found is None:
                yield dict(zip(columns, cells, strict=True))
            elif self._bad_rows is None:  # only when the file changed after the check
                raise BadRecords(self.name, len(columns), [found], 1)

    def _bad(self, number: int, line: int, cells: list[str]) -> BadRecord | None:
        """What is wrong with a record; None: nothing."""
        if len(cells) != len(self._columns):
            return BadRecord(number, line, len(cells))
        empty = next((place for place in self._required if not cells[place]), None)
        return None if empty is None else BadRecord(number, line, len(cells), self._columns[empty])

    def _records(self, *, body: bool = False, count_blank: bool = False) -> Iterator[Record]:
        """Records that are not blank lines, from the header on or (`body`) after it."""
        with self._path.open("rb") as file:
            lines = chain.from_iterable(line_batches(file, self.encoding, newline="", refuse_nul=True))
            reader = self.dialect.reader(lines, strict=True)
            number, line = -1, 1
            try:
                for cells in reader:
                    if not cells or (len(cells) == 1 and self._is_blank(cells[0], number)):
                        self.stats.blank_lines += count_blank
                    else:
                        number += 1
                        if number or not body:
                            yield number, line, cells
                    line = reader.line_num + 1
            except LineProblem as problem:
                raise BadText(self.name, problem.what, record=number + 1, line=reader.line_num + 1, offset=problem.offset) from None
            except csv.Error as error:
                raise BadText(self.name, _advice(error), record=number + 1, line=line) from None

    def _is_blank(self, cell: str, number: int) -> bool:
        """Whether a record of one cell is a line of spaces; in a file of one column those would be data."""
        return not cell.strip() and (number < 0 or len(self._columns) > 1)


def _one_character(what: str, value: str) -> str:
    if len(value) != 1 or value in "\r\n\0":
        raise InputError(f"the {what} must be one character, not {value!r}")
    return value


def _advice(error: csv.Error) -> str:
    if "field limit" in str(error):
        return f"a field is over {MAX_LINE_CHARACTERS:,} characters; is the end of a quoted field missing?"
    if "unexpected end of data" in str(error):
        return "a quoted field starts here and never ends"
    return f"broken quoting ({error}); inside a quoted field a quote is written twice; where quotes are plain text, read the file with quote ''"
