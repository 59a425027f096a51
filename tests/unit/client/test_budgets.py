"""Budgets as people write them, in code and as options of commands, and as messages carry them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill.budgets import budget_of, budget_typed
from rowmill.errors import UsageError
from rowmill_contracts.budgets import Limits, is_amount, limits_of
from rowmill_contracts.runs import RunOptions, RunStart


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (Decimal("5.00"), Decimal("5.00")),
        ("5", Decimal(5)),
        ({"money": "5.00"}, Decimal("5.00")),
        ({"calls": 100}, Limits(calls=100)),
        (
            {"money": Decimal(1), "calls": 3, "retries": 0, "wall_time": "1h30m"},
            Limits(money=Decimal(1), calls=3, retries=0, wall_time=5400.0),
        ),
        ({"wall_time": 60, "calls": None}, Limits(wall_time=60.0)),
        (Limits(calls=1), Limits(calls=1)),
    ],
)
def test_a_budget_is_money_or_limits_by_kind(given: Any, expected: Any) -> None:
    assert budget_of(given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("much", "much"),
        (Decimal(-1), "-1"),
        (Decimal("NaN"), "NaN"),
        ({"call": 3}, "'call'"),
        ({"calls": -1}, "calls"),
        ({"calls": 1.5}, "1.5"),
        ({"retries": "few"}, "retries"),
        ({"wall_time": "soon"}, "wall time"),
        ({"wall_time": 1e12}, "wall time 1e\\+12 s must be from 0 to 315360000 s, which are 10 years"),
        ({"calls": 10**15}, "calls must be from 0 to below 10.15, not 1000000000000000"),
        ({"calls": 10**5000}, "more than 30 digits"),
        ({"retries": 2**63}, "retries"),
        (Limits(wall_time=float("nan")), "wall time"),
        (Limits(money=Decimal(-1)), "amount"),
    ],
)
def test_what_is_no_budget_is_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        budget_of(given)


def test_options_say_money_or_a_kind_each() -> None:
    assert budget_typed([]) is None
    assert budget_typed(["5.00"]) == Decimal("5.00")
    assert budget_typed(["5.00", "calls=10", "wall-time=2m"]) == Limits(money=Decimal("5.00"), calls=10, wall_time=120.0)
    for words, named in ((["5", "money=6"], "twice"), (["rows=3"], "rows=3"), (["calls=x"], "calls")):
        with pytest.raises(UsageError, match=named):
            budget_typed(words)


def test_messages_carry_either_form_and_no_kind_that_nobody_would_keep() -> None:
    for budget in (Decimal("0.50"), Limits(calls=3, wall_time=60.0)):
        start = RunStart(play="leads", options=RunOptions(budget=budget))
        assert msgspec.json.decode(msgspec.json.encode(start), type=RunStart).options.budget == budget
    by_hand = msgspec.json.decode(b'{"play": "leads", "options": {"budget": {"money": "0.5", "calls": 3}}}', type=RunStart)
    assert limits_of(by_hand.options.budget) == Limits(money=Decimal("0.5"), calls=3)
    assert limits_of(msgspec.json.decode(b'{"play": "leads", "options": {"budget": 5.5}}', type=RunStart).options.budget).money == Decimal("5.5")
    with pytest.raises(msgspec.ValidationError, match="cals"):
        msgspec.json.decode(b'{"play": "leads", "options": {"budget": {"cals": 3}}}', type=RunStart)


@pytest.mark.parametrize("amount", ["0", "0.01", "999999999999999.99", "0.000000000000000001", "1E+3"])
def test_amounts_of_money_are_kept(amount: str) -> None:
    assert is_amount(Decimal(amount))


@pytest.mark.parametrize("amount", ["-1", "NaN", "Infinity", "1E+15", "1E+140000", "1E-140000", "0E-140000", "0E+140000", "0.0000000000000000001"])
def test_what_no_book_can_hold_is_no_amount(amount: str) -> None:
    assert not is_amount(Decimal(amount))
    with pytest.raises(UsageError, match="budget"):
        budget_of(Decimal(amount))
