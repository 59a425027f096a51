"""Budgets as people write them: an amount of money, or limits by kind. Which call a spent budget stops is the receipt-store's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from rowmill.durations import seconds
from rowmill.errors import DefinitionError, UsageError
from rowmill_contracts.budgets import Budget, Limits, is_amount, limits_of, unfit
from rowmill_contracts.budgets import budget_of as shortest

BudgetLike = Decimal | int | str | Mapping[str, Any] | Limits
"""Money (``Decimal("5.00")``), or limits: ``{"money": "5.00", "calls": 1000, "retries": 50, "wall_time": "1h"}``."""

_COUNTED = ("calls", "retries")
_KINDS = ("money", *_COUNTED, "wall_time")


def budget_of(given: BudgetLike | None) -> Decimal | Limits | None:
    """The budget as messages carry it: money alone stays an amount.

    Raises `UsageError` naming the kind and the value.
    """
    if given is None:
        return None
    if isinstance(given, Limits):
        return _fit(given)
    if not isinstance(given, Mapping):
        return money("budget", given)
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise UsageError(f"budget {unknown[0]!r} is not known; a run has budgets of {', '.join(_KINDS)}")
    said = {kind: value for kind, value in given.items() if value is not None}
    limits = Limits(
        money=money("budget of money", said["money"]) if "money" in said else None,
        calls=_count("calls", said["calls"]) if "calls" in said else None,
        retries=_count("retries", said["retries"]) if "retries" in said else None,
        wall_time=_time(said["wall_time"]) if "wall_time" in said else None,
    )
    return shortest(_fit(limits))


def _fit(limits: Limits) -> Limits:
    if (why := unfit(limits)) is not None:
        raise UsageError(why)
    return limits


def budget_typed(words: Iterable[str]) -> Decimal | Limits | None:
    """What the ``--budget`` options of a command say: ``5.00``, ``calls=1000``, ``retries=50``, ``wall-time=1h``; None where there are none.

    Raises `UsageError` naming the option.
    """
    said: dict[str, str] = {}
    for word in words:
        kind, found, value = word.partition("=")
        kind, value = (kind.strip().replace("-", "_"), value) if found else ("money", word)
        if kind not in _KINDS:
            raise UsageError(f"--budget {word!r}: write an amount such as 5.00, or calls=1000, retries=50, wall-time=1h")
        if kind in said:
            raise UsageError(f"--budget {word!r}: {kind.replace('_', ' ')} is given twice")
        said[kind] = value
    try:
        return budget_of(said) if said else None
    except UsageError as error:
        raise UsageError(f"--budget: {error}") from None


def as_typed(budget: Budget) -> list[str]:
    """The ``--budget`` options that say it (`budget_typed`)."""
    limits = limits_of(budget)
    said = {"": limits.money, "calls=": limits.calls, "retries=": limits.retries, "wall-time=": limits.wall_time}
    return [f"{kind}{value:g}s" if kind == "wall-time=" else f"{kind}{value}" for kind, value in said.items() if value is not None]


def money(name: str, given: Any) -> Decimal:
    """The amount that ``given`` says. Raises `UsageError` naming it where it is none, or negative."""
    try:
        amount = Decimal(str(given)) if isinstance(given, Decimal | int | str) and not isinstance(given, bool) else None
    except InvalidOperation:
        amount = None
    if amount is None:
        raise UsageError(f"{name} {given!r} is not an amount; write it as 5.00")
    if not amount.is_finite() or amount < 0:
        raise UsageError(f"{name} {given!r} must be zero or more")
    if not is_amount(amount):
        raise UsageError(f"{name} {given!r} must be below 10^15, with at most 18 digits after its point")
    return amount


def _count(kind: str, given: Any) -> int:
    try:
        number = int(given) if isinstance(given, int | str) and not isinstance(given, bool) else -1
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"budget of {kind} {given!r} is not a number of {kind}; write a whole number, zero or more")
    return number


def _time(given: Any) -> float:
    try:
        return seconds(given)
    except DefinitionError as error:
        raise UsageError(f"budget of wall time: {error}") from None
