"""A dataset's counts, and what commits change about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

from rowmill_contracts.counts import Counts, Problem
from rowmill_sheet_writer.marks import CANCELLED, COMPLETED, DEAD_LETTERED, DUPLICATE, FAILED, REUSED, SKIPPED, End


class DatasetId(NamedTuple):
    """A dataset of a run. Sorts in the order in which counts are locked."""

    run_id: str
    dataset: str


_COUNTED: Final = {
    DUPLICATE: "duplicates",
    REUSED: "reused",
    COMPLETED: "completed",
    FAILED: "failed",
    DEAD_LETTERED: "failed",
    CANCELLED: "cancelled",
}
"""The count that a letter adds to."""


@dataclass(slots=True)
class Tally:
    """What commits change about a dataset's counts. ``first_error``: of the first row here that failed."""

    admitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    reused: int = 0
    duplicates: int = 0
    calls: int = 0
    cost: Decimal = Decimal(0)
    first_error: Problem | None = None

    def admit(self, letters: Iterable[str]) -> None:
        """Count the rows of a page that was recorded now. Skipped ones are not admitted."""
        for letter in letters:
            if letter != SKIPPED:
                self.admitted += 1
                self._add(letter, 1)

    def move(self, before: str, after: str) -> None:
        if before != after:
            self._add(before, -1)
            self._add(after, 1)

    def pay(self, before: End, after: End) -> None:
        """A row's calls and cost are what it paid for in all, over its attempts: the later figure takes the earlier one's place."""
        self.calls += after.calls - before.calls
        self.cost += after.cost - before.cost

    def _add(self, letter: str, rows: int) -> None:
        name = _COUNTED.get(letter)
        if name is not None:
            setattr(self, name, getattr(self, name) + rows)


@dataclass(frozen=True, slots=True)
class Raise:
    """What a commit adds to a dataset's counts."""

    sheet_id: int
    number: int
    tally: Tally


@dataclass(frozen=True, slots=True)
class DatasetCounts:
    """A dataset's counts at a version, which rises with every change of them."""

    counts: Counts
    version: int
    first_error: Problem | None = None
