"""Marks: how each row of a page stands in its run, and which of two ends of a row counts.

Pure. Knows nothing of cells: a row's mark may change although a newer run has written its cells since, and the other way round.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final, NamedTuple

import msgspec

from rowmill_contracts.rows import RowMark, SettledRow

DUPLICATE: Final = "d"
REUSED: Final = "r"
SENT: Final = "s"
SKIPPED: Final = "k"
COMPLETED: Final = "c"
FAILED: Final = "f"
DEAD_LETTERED: Final = "l"
CANCELLED: Final = "x"

MARKS: Final[dict[str, RowMark]] = {
    DUPLICATE: "duplicate",
    REUSED: "reused",
    SENT: "sent",
    SKIPPED: "skipped",
    COMPLETED: "completed",
    FAILED: "failed",
    DEAD_LETTERED: "failed",
    CANCELLED: "cancelled",
}
"""A page record's letters, and the marks that others see."""

DEAD_LETTER_CODE: Final = "dead_lettered"
"""The error code of a row that was failed because its message died, not because of what it holds."""


class Standing(NamedTuple):
    """The order of writes to one row: run number, then attempt, then ``rank`` (see `replaces`)."""

    number: int
    attempt: int
    rank: int


PARTIAL_RANK: Final = 0
DEAD_RANK: Final = 1
ENDED_RANK: Final = 2
COMPLETED_RANK: Final = 3

_RANKS: Final = {
    SENT: PARTIAL_RANK,
    REUSED: COMPLETED_RANK,
    COMPLETED: COMPLETED_RANK,
    FAILED: ENDED_RANK,
    DEAD_LETTERED: DEAD_RANK,
    CANCELLED: ENDED_RANK,
}


def replaces(new: Standing, old: Standing) -> bool:
    """Whether a write takes the place of the one before it: a later run or attempt does; at the same attempt a terminal one that of a partial
    one, and any other end that of a dead-lettered one (which may be the end of a replay); else the first stays. So at one attempt it does not
    matter whether a row's death or its end is told first. The statement ``write_rows`` holds the same rule in SQL.
    """
    if new[:2] != old[:2]:
        return new[:2] > old[:2]
    return (old.rank == PARTIAL_RANK and new.rank > PARTIAL_RANK) or (old.rank == DEAD_RANK and new.rank > DEAD_RANK)


def letter_of(row: SettledRow) -> str:
    """The letter of a settled row."""
    if row.status == "completed":
        return COMPLETED
    if row.status == "cancelled":
        return CANCELLED
    return DEAD_LETTERED if row.error is not None and row.error.code == DEAD_LETTER_CODE else FAILED


def rank_of(letter: str) -> int:
    return _RANKS[letter]


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a row ended in its run, besides its mark: at which attempt, with how many live calls at which cost."""

    attempt: int = 1
    calls: int = 0
    cost: Decimal = Decimal(0)


FIRST_END: Final = End()
"""What is not written down: ended at the first attempt, without a live call."""

_UNENDED: Final = End(attempt=0)


def end_at(letters: list[str], ends: dict[int, End], position: int) -> End:
    """How the row at ``position`` ended; attempt 0 if it has not (or never will: duplicates, skipped rows).

    Of a row that is worked again: the attempt at which it is out, with what it paid for before.
    """
    if letters[position] == SENT:
        return ends.get(position, _UNENDED)
    return ends.get(position, FIRST_END) if letters[position] in "rcflx" else _UNENDED
