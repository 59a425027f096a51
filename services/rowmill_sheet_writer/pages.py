"""Page records: the rows of one page of one run, in input order, with their marks; how a settled row changes them.

Pure. A record is made once, by the first lookup of its page, and then only its marks and ends change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from rowmill.errors import MalformedMessage
from rowmill_contracts.rows import LookupRow, SettledRow
from rowmill_contracts.runs import PageProgress
from rowmill_sheet_writer.counts import DatasetId, Tally
from rowmill_sheet_writer.marks import (
    DEAD_LETTERED,
    DUPLICATE,
    FAILED,
    FIRST_END,
    SENT,
    SKIPPED,
    End,
    Standing,
    end_at,
    letter_of,
    rank_of,
    replaces,
)

KEY_BYTES: Final = 32

Settling = Literal["changed", "repeated", "superseded", "unknown"]
"""``repeated``: this end is on record already. ``superseded``: another end counts. ``unknown``: the record has no such row to settle."""


class PageId(NamedTuple):
    """Sorts in the order in which page records are locked."""

    run_id: str
    dataset: str
    page: int

    @property
    def dataset_id(self) -> DatasetId:
        return DatasetId(self.run_id, self.dataset)


@dataclass(slots=True)
class PageRecord:
    """``keys``: 32 bytes a row. ``letters``: see `marks`. ``ends``: only what differs from `FIRST_END`. ``inputs``: of rows whose input is not the
    sheet row's. ``changed``: the record differs from what is stored.
    """

    page_id: PageId
    sheet_id: int
    first_index: int
    keys: bytes
    letters: list[str]
    ends: dict[int, End] = field(default_factory=dict)
    inputs: dict[int, msgspec.Raw] = field(default_factory=dict)
    changed: bool = False

    def key_at(self, position: int) -> bytes:
        return self.keys[KEY_BYTES * position : KEY_BYTES * position + KEY_BYTES]

    @property
    def open(self) -> int:
        """Rows that were sent and have not ended."""
        return self.letters.count(SENT)

    @property
    def progress(self) -> PageProgress:
        return PageProgress(page=self.page_id.page, open=self.open)

    def settle(self, row: SettledRow, key: bytes, tally: Tally) -> Settling:
        """Record how a row ended, and in ``tally`` what that changes about the counts."""
        position = row.index - self.first_index
        if not 0 <= position < len(self.letters) or self.key_at(position) != key:
            return "unknown"
        before = self.letters[position]
        after = letter_of(row)
        ended = end_at(self.letters, self.ends, position)
        if before == SENT:
            if row.attempt < ended.attempt:
                return "superseded"
        else:
            if before in {DUPLICATE, SKIPPED}:
                return "unknown"
            if not replaces(Standing(0, row.attempt, rank_of(after)), Standing(0, ended.attempt, rank_of(before))):
                return "repeated" if before == after and row.attempt == ended.attempt else "superseded"
        end = End(row.attempt, row.calls, row.cost)
        tally.move(before, after)
        tally.pay(ended, end)
        if after in {FAILED, DEAD_LETTERED} and tally.first_error is None:
            tally.first_error = row.error
        self.letters[position] = after
        if end != FIRST_END:
            self.ends[position] = end
        else:
            self.ends.pop(position, None)
        self.changed = True
        return "changed"

    def reopen(self, attempt: int, letters: str, tally: Tally) -> list[int]:
        """Let rows that ended with one of these letters, at an older attempt, be worked again; the places of all that are out at this attempt."""
        for position, letter in enumerate(self.letters):
            ended = end_at(self.letters, self.ends, position)
            if letter in letters and ended.attempt < attempt:
                tally.move(letter, SENT)
                self.letters[position] = SENT
                self.ends[position] = End(attempt, ended.calls, ended.cost)
                self.changed = True
        return [position for position, letter in enumerate(self.letters) if letter == SENT and self.ends.get(position, FIRST_END).attempt == attempt]


def key_bytes(key: str) -> bytes:
    """A row key's 32 bytes.

    Raises:
        MalformedMessage: it is not 64 hexadecimal digits.

    """
    try:
        packed = bytes.fromhex(key)
    except ValueError:
        packed = b""
    if len(packed) != KEY_BYTES or len(key) != 2 * KEY_BYTES:
        raise MalformedMessage(f"row key {key[:80]!r} is not the 64 hexadecimal digits of a SHA-256")
    return packed


def page_keys(rows: Sequence[LookupRow]) -> bytes:
    """The keys of a page's rows, one after the other.

    Raises:
        MalformedMessage: a key is not one, or the rows' indexes do not follow each other.

    """
    for position, row in enumerate(rows):
        if row.index != rows[0].index + position:
            raise MalformedMessage(f"row {position} of the page has index {row.index}, not {rows[0].index + position}")
    return b"".join([key_bytes(row.key) for row in rows])
