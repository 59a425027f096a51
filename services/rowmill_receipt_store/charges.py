"""Budgets of runs and the charges of dispatches (SPEC 4.7). Pure.

A charge belongs to (run, receipt, dispatch). A claim reserves for the dispatch to come, a completion settles, a release or an expired
unsent claim refunds, and what was sent without a known outcome stays charged.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Literal

import msgspec

Fate = Literal["refund", "replace", "unknown"]

NOTHING = Decimal(0)


class Former(msgspec.Struct, frozen=True):
    """The charge of the lease that a claim replaces, and what becomes of it.

    ``refund``: it goes, nothing was sent. ``replace``: the new reservation is for the same run and dispatch. ``unknown``: it was sent, stays.
    """

    run_id: str
    dispatch: int
    fate: Fate
    amount: Decimal


def former_charge(*, state: str, run_id: str, dispatch: int, reserved: Decimal, by_run: str, cost: Decimal) -> Former | None:
    """What becomes of the reservation of a lease that run ``by_run`` takes over at ``cost``; None: there is none."""
    if not reserved:
        return None
    if state == "queued":
        return Former(run_id, dispatch + 1, "replace" if run_id == by_run and cost else "refund", reserved)
    if state == "running":
        return Former(run_id, dispatch, "unknown", reserved)
    return None


def net_cost(run_id: str, cost: Decimal, former: Former | None) -> Decimal:
    """What a claim adds to its run's charges: its cost less what the lease it replaces had reserved for the same run."""
    if former is None or former.fate == "unknown" or former.run_id != run_id:
        return cost
    return cost - former.amount


class Allowances:
    """What is left of the budgets of the runs of one page; claims are served in the page's order.

    A claim that does not fit leaves what is left to later, cheaper ones.
    """

    def __init__(self) -> None:
        self._left: dict[str, Decimal | None] = {}

    def know(self, run_id: str, remaining: Decimal | None) -> None:
        """``remaining``: budget less charges as they are stored (None: no budget). Only the first word counts."""
        self._left.setdefault(run_id, remaining)

    def take(self, run_id: str, cost: Decimal, net: Decimal) -> bool:
        """Whether a claim fits; if so, what is left shrinks by ``net``. What costs nothing always fits."""
        left = self._left.get(run_id)
        if left is None or not cost:
            return True
        if net > left:
            return False
        self._left[run_id] = left - net
        return True


def running_totals(nets: Iterable[tuple[str, Decimal]]) -> list[Decimal]:
    """For each claim of a page, in its order: what its run would be charged by the page up to and with it."""
    totals: dict[str, Decimal] = {}
    through = []
    for run_id, net in nets:
        total = totals.get(run_id, NOTHING) + net if net else totals.get(run_id, NOTHING)
        totals[run_id] = total
        through.append(total)
    return through
