"""Cells: what is kept of a column's outcome besides its value, and what the sheet knew before (SPEC 2.9)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Any, Literal

import msgspec

from rowmill.steps import ProgramOutcome, WaterfallAttempt
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import NULL

CellStatus = Literal["completed", "failed", "cached", "missed", "skipped"]


class CellMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Times are seconds since the epoch. ``reads``: the columns that the resolver read, ``"*"`` for all. ``cost``: what this row paid for it.

    ``missed``: a waterfall gave nothing while a provider of it was unavailable, so a later run tries again. ``attempts``: a waterfall's legs.
    ``steps``: those that did not simply complete.
    """

    status: CellStatus | msgspec.UnsetType = msgspec.UNSET
    version: str = ""
    reads: list[str] | Literal["*"] = []
    completed_at: float | None = None
    stale_at: float | None = None
    error: Problem | None = None
    provider: str = ""
    calls: int = 0
    cost: Decimal = Decimal(0)
    attempts: list[WaterfallAttempt] = []
    steps: dict[str, str] = {}

    def note(self, outcome: ProgramOutcome) -> None:
        """Keep how a program of steps went."""
        self.attempts = outcome.attempts
        self.steps = {name: status for name, status in outcome.statuses.items() if status != "completed"}
        if outcome.value is None and any(attempt.status == "unavailable" for attempt in outcome.attempts):
            self.status = "missed"


class KnownCell(msgspec.Struct):
    """A cell that the sheet has. ``reusable``: nothing that the sheet writer can see rules it out."""

    value: msgspec.Raw = NULL
    meta: dict[str, Any] = {}
    reusable: bool = False


decode_known = msgspec.json.Decoder(dict[str, KnownCell]).decode
encode_cells = msgspec.json.Encoder(decimal_format="string").encode


def still_reusable(cell: KnownCell, changed: AbstractSet[str]) -> bool:
    """Whether a cell may be taken over although the columns ``changed`` of its row were computed anew, with another outcome."""
    if not cell.reusable:
        return False
    reads = cell.meta.get("reads", ())
    return not changed or (reads != "*" and changed.isdisjoint(reads))
