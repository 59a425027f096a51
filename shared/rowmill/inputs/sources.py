"""What a source of rows is, whatever it reads: columns, a check, and pages that fit a message.

Rows are handed out page by page under a count and a byte budget, so that an input of any size needs the memory of one page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

Row = dict[str, Any]

PAGE_ROWS = 200
PAGE_BYTES = 1024 * 1024

_encode = msgspec.json.Encoder().encode


@dataclass
class SourceStats:
    """What was found in a source: complete after `Source.check` for files, growing with the pages for everything else."""

    records: int = 0
    """Rows, without header, blank lines and records set aside."""
    blank_lines: int = 0
    set_aside: int = 0
    """Records of wrong width written to the file of bad rows."""


class Source(ABC):
    """Rows as JSON-ready dicts, in order. Files and lists can be paged again, iterators and streams once."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The file, or what kind of object it is; used in messages."""
        self.stats = SourceStats()

    @property
    @abstractmethod
    def columns(self) -> list[str] | None:
        """Column names in order, or None while they are not known."""

    def check(self) -> None:  # noqa: B027 - sources in memory have nothing to check ahead
        """Read a file through once without handing anything out, so that what is wrong with it is found before money is spent.

        Done at most once; `pages` does it first. Raises `InputError`. Sources in memory are not checked ahead.
        """

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """The rows one by one. Raises `InputError` that names the record."""

    def pages(self, max_rows: int = PAGE_ROWS, max_bytes: int = PAGE_BYTES) -> Iterator[list[Row]]:
        """The rows in pages of at most `max_rows`, and of at most `max_bytes` as JSON unless a single row is larger (it goes alone)."""
        self.check()
        yield from cut_pages(self.rows(), max_rows, max_bytes)


def cut_pages(rows: Iterable[Row], max_rows: int, max_bytes: int) -> Iterator[list[Row]]:
    """Gather rows into pages; holds one page and one row."""
    page: list[Row] = []
    size = 2  # the brackets
    for row in rows:
        length = len(_encode(row)) + 1  # and a comma
        if page and (len(page) >= max_rows or size + length > max_bytes):
            yield page
            page, size = [], 2
        page.append(row)
        size += length
    if page:
        yield page
