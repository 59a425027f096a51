"""What a run may spend at most, as messages carry it."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Final

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a run may spend at most, of each kind (None: as much as it likes). A kind that is not known is refused: it would limit nothing.

    ``calls``: requests made for it for the first time. ``retries``: requests made again for the same call. ``wall_time``: seconds from its
    start, those not counted in which it waits for a person (paused, a spent budget, an unpaid provider).
    At most below 10^15 of each, and 10 years.
    """

    money: Decimal | None = None
    calls: Annotated[int, msgspec.Meta(ge=0)] | None = None
    retries: Annotated[int, msgspec.Meta(ge=0)] | None = None
    wall_time: Annotated[float, msgspec.Meta(ge=0)] | None = None


Budget = Decimal | Limits | None
"""A budget as options carry it: money alone, or limits by kind."""


def limits_of(budget: Budget) -> Limits:
    """The limits that a budget says, whichever way it is written."""
    if budget is None:
        return Limits()
    return budget if isinstance(budget, Limits) else Limits(money=budget)


def budget_of(limits: Limits) -> Budget:
    """The shortest way to write limits: money alone as an amount, which every version understands."""
    if limits == Limits():
        return None
    return limits.money if limits == Limits(money=limits.money) else limits


SPENT: Final = tuple(f"budget: {kind}," for kind in ("money", "calls", "retries"))
"""How the reason begins for which a run is halted whose budget pays for no further call."""


def is_spent_budget(reason: str) -> bool:
    """Whether a run that was halted for this reason may still send what is claimed for it: the budget paid for that before it was spent."""
    return reason.startswith(SPENT)


_UNPAID: Final = re.compile(r"receipt (\w+) may cost ([0-9.]+)")


def unpaid_call(reason: str) -> tuple[str, Decimal] | None:
    """The receipt, and what it may cost, that a budget of money did not pay for, where a run is halted for that."""
    found = _UNPAID.search(reason) if reason.startswith(SPENT[0]) else None
    return None if found is None else (found[1], Decimal(found[2]))


MOST_MONEY: Final = Decimal(10) ** 15
MONEY_DIGITS: Final = 18
"""Digits of an amount after its point."""


def is_amount(value: Decimal) -> bool:
    """Whether this is money that can be kept: from 0 to below 10^15, with at most 18 digits after the point. What databases can hold is far more, but
    has its bounds too, and nobody means it.
    """
    exponent = value.as_tuple().exponent
    return isinstance(exponent, int) and 0 <= value < MOST_MONEY and -MONEY_DIGITS <= exponent <= MONEY_DIGITS


MOST_COUNTED: Final = 10**15
MOST_SECONDS: Final = 10 * 365 * 86400.0
"""Of a run's wall time: 10 years. What is millennia away is a date for a database, and none for who reads it."""


def _short(number: int) -> str:
    """A number of any length, as far as a person reads it."""
    return str(number) if number < 10**30 else "a number of more than 30 digits"


def unfit(limits: Limits) -> str | None:
    """Why these limits cannot be kept, to a person; None: they can."""
    if limits.money is not None and not is_amount(limits.money):
        return f"budget {limits.money} is not an amount"
    for kind in ("calls", "retries"):
        number = getattr(limits, kind)
        if number is not None and not 0 <= number < MOST_COUNTED:
            return f"budget of {kind} must be from 0 to below 10^15, not {_short(number)}"
    if limits.wall_time is not None and not 0 <= limits.wall_time <= MOST_SECONDS:
        return f"budget of wall time {limits.wall_time:g} s must be from 0 to {MOST_SECONDS:.0f} s, which are 10 years"
    return None
