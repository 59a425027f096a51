"""A dataset's counts, and what commits change about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from rowmill_contracts.counts import Counts, Problem
from rowmill_sheet_writer.marks import CANCELLED, COMPLETED, DEAD_LETTERED, DUPLICATE, FAILED, MARKS, REUSED, SKIPPED, End


class DatasetId(NamedTuple):
    """A dataset of a run. Sorts in the order in which counts are locked."""

    run_id: str
    dataset: str


@dataclass(slots=True)
class Tally:
    """What commits change about a dataset's counts. ``by_letter``: rows by how they stand (see `marks`). ``first_error``: of the first row here
    that failed.
    """

    admitted: int = 0
    by_letter: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MARKS, 0))
    calls: int = 0
    cost: Decimal = Decimal(0)
    first_error: Problem | None = None

    @property
    def completed(self) -> int:
        return self.by_letter[COMPLETED]

    @property
    def failed(self) -> int:
        return self.by_letter[FAILED] + self.by_letter[DEAD_LETTERED]

    @property
    def cancelled(self) -> int:
        return self.by_letter[CANCELLED]

    @property
    def reused(self) -> int:
        return self.by_letter[REUSED]

    @property
    def duplicates(self) -> int:
        return self.by_letter[DUPLICATE]

    def admit(self, letters: Sequence[str]) -> None:
        """Count the rows of a page that was recorded now. Skipped ones are not admitted."""
        self.admitted += len(letters) - letters.count(SKIPPED)
        for letter in letters:
            self.by_letter[letter] += 1

    def move(self, before: str, after: str) -> None:
        self.by_letter[before] -= 1
        self.by_letter[after] += 1

    def pay(self, before: End, after: End) -> None:
        """A row's calls and cost are what it paid for in all, over its attempts: the later figure takes the earlier one's place."""
        self.calls += after.calls - before.calls
        self.cost += after.cost - before.cost


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
