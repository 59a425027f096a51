"""What a source of rows is, whatever it reads: columns, a check, and pages that fit a message.

Rows are handed out page by page under a count and a byte budget, so that an input of any size needs the memory of one page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

Row = dict[str, Any]
Item = TypeVar("Item")

PAGE_ROWS = 500
PAGE_BYTES = 1024 * 1024

_encode = msgspec.json.Encoder().encode


@dataclass
class SourceStats:
    """What was found in a source: complete after `Source.check` for files, growing with the pages for everything else."""

    records: int = 0
    """Rows, without header, blank lines and records set aside."""
    blank_lines: int = 0
    set_aside: int = 0
    """Bad records written to the file of bad rows."""


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
        yield from _cut(((row, len(_encode(row))) for row in self.rows()), max_rows, max_bytes)

    def encoded_pages(self, max_rows: int = PAGE_ROWS, max_bytes: int = PAGE_BYTES) -> Iterator[list[bytes]]:
        """The same pages with each row as JSON, for who sends them on: a row is encoded once."""
        self.check()
        yield from _cut(((text, len(text)) for text in map(_encode, self.rows())), max_rows, max_bytes)


def _cut(sized: Iterable[tuple[Item, int]], max_rows: int, max_bytes: int) -> Iterator[list[Item]]:
    """Gather items of known size into pages; holds one page and one item."""
    page: list[Item] = []
    total = 2  # the brackets
    for item, size in sized:
        if page and (len(page) >= max_rows or total + size + 1 > max_bytes):
            yield page
            page, total = [], 2
        page.append(item)
        total += size + 1  # and a comma
    if page:
        yield page
