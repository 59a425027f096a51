"""Counts of a dataset's or run's rows, as absolute numbers."""

from __future__ import annotations

from decimal import Decimal

import msgspec


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """completed + failed + cancelled + reused + duplicates = admitted once a dataset is over (SPEC 2.8).

    Of a run, ``calls`` were made live, whatever came of them, and ``cost`` is what it was charged for them (`rowmill_contracts.charges`). Of a
    dataset they are those by which its rows got what they have now, so datasets do not add up to their run.
    """

    admitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    reused: int = 0
    duplicates: int = 0
    calls: int = 0
    cost: Decimal = Decimal(0)

    @property
    def terminal(self) -> int:
        """Rows that have ended in any way."""
        return self.completed + self.failed + self.cancelled + self.reused + self.duplicates


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels: a stable code, a sentence for a person, and where it happened."""

    code: str
    message: str
    column: str | None = None
    row: int | None = None
    tool: str | None = None
    traceback_digest: str | None = None
