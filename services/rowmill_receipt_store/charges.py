"""Budgets of runs and the charges of dispatches (SPEC 4.7). Pure.

A charge belongs to (run, receipt, dispatch). A claim reserves for the dispatch to come, a completion settles, a release or an expired
unsent claim refunds, and what was sent without a known outcome stays charged. A dispatch is charged money, and one call, or one retry where an
earlier dispatch of the same call stands charged to the same run.

A budget is spent by what has ended. While calls under way have what is left of it, another one waits: they may cost less than they reserved, or come
back.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Literal

import msgspec

Fate = Literal["refund", "replace", "unknown"]
Kind = Literal["money", "calls", "retries", "wall_time"]

NOTHING = Decimal(0)


class Spend(msgspec.Struct, frozen=True):
    """What a dispatch is charged, or several are together."""

    money: Decimal = NOTHING
    calls: int = 0
    retries: int = 0

    def __add__(self, other: Spend) -> Spend:
        return Spend(self.money + other.money if other.money else self.money, self.calls + other.calls, self.retries + other.retries)

    def __sub__(self, other: Spend) -> Spend:
        return Spend(self.money - other.money if other.money else self.money, self.calls - other.calls, self.retries - other.retries)

    def __bool__(self) -> bool:
        return bool(self.money or self.calls or self.retries)


class Former(msgspec.Struct, frozen=True):
    """The charge of the lease that a claim replaces, and what becomes of it.

    ``refund``: it goes, nothing was sent. ``replace``: the new reservation is for the same run and dispatch. ``unknown``: it was sent, stays.
    ``counted``: it is tallied as a call of its run.
    """

    run_id: str
    dispatch: int
    fate: Fate
    held: Spend
    counted: bool = False


def former_charge(*, state: str, run_id: str, dispatch: int, held: Spend, by_run: str, counted: bool = False) -> Former | None:
    """What becomes of the charge of a lease that run ``by_run`` takes over; None: there is none."""
    if state == "queued" and (held or counted):
        return Former(run_id, dispatch + 1, "replace" if run_id == by_run else "refund", held, counted)
    if state == "running" and held:
        return Former(run_id, dispatch, "unknown", held, counted)
    return None


def net_spend(run_id: str, spend: Spend, former: Former | None) -> Spend:
    """What a claim adds to its run's charges: what it spends less what the lease it replaces had reserved for the same run."""
    if former is None or former.fate == "unknown" or former.run_id != run_id:
        return spend
    return spend - former.held


class Account(msgspec.Struct, frozen=True):
    """A run's budgets as they are stored: each kind's limit and what is left of it (None: not limited). ``late``: the wall time is over.
    ``open``: what calls have reserved that are under way, claimed or sent, and may come back.
    """

    money: Decimal | None = None
    money_left: Decimal | None = None
    calls: int | None = None
    calls_left: int | None = None
    retries: int | None = None
    retries_left: int | None = None
    wall_time: float | None = None
    late: bool = False
    open: Spend = Spend()


UNLIMITED = Account()


class Allowances:
    """What is left of the budgets of the runs of one page; claims are served in the page's order.

    A claim that does not fit leaves what is left to later, cheaper ones.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._taken: dict[str, Spend] = {}

    def know(self, run_id: str, account: Account) -> None:
        """Only the first word counts."""
        self._accounts.setdefault(run_id, account)

    def take(self, run_id: str, spend: Spend, net: Spend) -> Kind | None:
        """The budget that a claim does not fit, None where it fits all; then what is left shrinks by ``net``.

        What costs nothing of a kind always fits that kind's budget.
        """
        account = self._accounts.get(run_id, UNLIMITED)
        total = self._taken.get(run_id, Spend()) + net
        if account.late:
            return "wall_time"
        if spend.money and account.money_left is not None and total.money > account.money_left:
            return "money"
        if spend.calls and account.calls_left is not None and total.calls > account.calls_left:
            return "calls"
        if spend.retries and account.retries_left is not None and total.retries > account.retries_left:
            return "retries"
        self._taken[run_id] = total
        return None


def may_come_back(kind: Kind, account: Account, spend: Spend, under_way: Spend) -> bool:
    """Whether a claim that the budget of ``kind`` does not pay for waits: calls ``under_way`` have some of it, or others of its page were given what
    would have paid.
    """
    match kind:
        case "money":
            return under_way.money > 0 or (account.money_left is not None and spend.money <= account.money_left)
        case "calls":
            return under_way.calls > 0 or (account.calls_left is not None and spend.calls <= account.calls_left)
        case "retries":
            return under_way.retries > 0 or (account.retries_left is not None and spend.retries <= account.retries_left)
        case "wall_time":
            return False


def taken_reason(kind: Kind) -> str:
    """Why a call waits while its run goes on."""
    return f"budget: {kind}, what is left is taken by calls that are under way"


def spent_reason(kind: Kind, account: Account, spend: Spend, receipt: str) -> str:
    """Why a run waits whose budget of ``kind`` does not pay for the call of ``receipt`` (its short digest). Begins with ``budget``."""
    match kind:
        case "money":
            left = NOTHING if account.money_left is None or account.money_left < 0 else account.money_left
            return f"budget: money, {left} of {account.money} is left and receipt {receipt} may cost {spend.money:f}"
        case "calls":
            return f"budget: calls, all {account.calls} are made and receipt {receipt} would be one more"
        case "retries":
            return f"budget: retries, all {account.retries} are made and receipt {receipt} would be tried again"
        case "wall_time":
            return f"budget: wall time, {account.wall_time:g} s are over and receipt {receipt} is not sent"


def running_totals(nets: Iterable[tuple[str, Spend]]) -> list[Spend]:
    """For each claim of a page, in its order: what its run would be charged by the page up to and with it."""
    totals: dict[str, Spend] = {}
    through = []
    for run_id, net in nets:
        totals[run_id] = total = totals.get(run_id, Spend()) + net
        through.append(total)
    return through
