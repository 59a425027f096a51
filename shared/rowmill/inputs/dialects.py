"""Which delimiter and quote a CSV file uses, judged by whether its records come out as wide as its header."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

_DELIMITERS = [",", ";", "\t", "|"]
_SPELT = {"tab": "\t", r"\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
_SAMPLE_RECORDS = 500


@dataclass(frozen=True)
class Dialect:
    """How records are cut into fields."""

    delimiter: str
    quote: str
    """One character, or "" when fields are never quoted."""

    def reader(self, lines: Iterable[str], *, strict: bool) -> CsvReader:
        """The standard reader for this dialect. Strict: what could only be guessed (text after a closing quote) raises `csv.Error`."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote or None, quoting=quoting, strict=strict)


class CsvReader(Protocol):
    """What the csv module's reader offers; the module has no name for its type."""

    @property
    def line_num(self) -> int: ...
    def __iter__(self) -> Iterator[list[str]]: ...
    def __next__(self) -> list[str]: ...


def spelt_delimiter(delimiter: str) -> str:
    """The character that a person means by "tab", "comma" and the like."""
    return _SPELT.get(delimiter.lower(), delimiter)


def detect_dialect(
    sample: str,
    *,
    complete: bool,
    delimiter: str | None = None,
    quote: str | None = None,
    prefer_tab: bool = False,
) -> Dialect:
    """The dialect of the file that `sample` is the start of. What is given is kept; `complete`: the sample is the whole file.

    A delimiter counts only if the header holds it. Among those, the one for which most records are as wide as the header wins, then the one
    with more columns. Without any, the file has one column.
    """
    if quote is None:
        quote = _detect_quote(sample, [delimiter] if delimiter else _DELIMITERS)
    if delimiter is not None:
        return Dialect(delimiter, quote)
    candidates = ["\t", *_DELIMITERS] if prefer_tab else _DELIMITERS
    best, best_score = candidates[0], (0.0, 1)
    for candidate in candidates:
        score = _score(sample, Dialect(candidate, quote), complete=complete)
        if score > best_score:
            best, best_score = candidate, score
    return Dialect(best, quote)


def _score(sample: str, dialect: Dialect, *, complete: bool) -> tuple[float, int]:
    """Share of records as wide as the header, and that width; (0, 1) when the header is one column."""
    records = [record for record in _records(sample, dialect) if record]
    if not complete and len(records) > 1:
        records.pop()  # may be cut short
    width = len(records[0]) if records else 1
    if width == 1:
        return 0.0, 1
    body = records[1:]
    return (sum(len(record) == width for record in body) / len(body) if body else 1.0), width


def _records(sample: str, dialect: Dialect) -> list[list[str]]:
    return list(islice(dialect.reader(io.StringIO(sample, newline=""), strict=False), _SAMPLE_RECORDS))


def _detect_quote(sample: str, delimiters: list[str]) -> str:
    """The double quote, unless none opens a field and single quotes enclose whole fields on at least half of the lines."""
    cut = "".join(map(re.escape, delimiters))
    if re.search(rf'(?:^|[{cut}])"', sample, re.MULTILINE):
        return '"'
    lines = [line for line in sample.splitlines() if line.strip()]
    enclosed = re.compile(rf"(?:^|[{cut}])'(?:[^']|'')*'(?:$|[{cut}])")
    return "'" if lines and sum(1 for line in lines if enclosed.search(line)) * 2 >= len(lines) else '"'
