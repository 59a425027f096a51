"""Whether a run could go on with the budget that it is given, and how much it needs."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from rowmill_admission.resuming import too_little
from rowmill_contracts.budgets import Limits
from rowmill_contracts.charges import RunCharges
from rowmill_receipt_store.charges import Account, Kind, Spend, spent_reason

CHARGED = RunCharges(run_id="r", cost=Decimal("0.490"), calls=12, counted_calls=10, counted_retries=2)
ACCOUNT = Account(money=Decimal("0.50"), money_left=Decimal("0.01"), calls=10, calls_left=0, retries=2, retries_left=0, wall_time=60.0, late=True)
AS_IT_WAS: dict[str, Any] = {"money": Decimal("0.50"), "calls": 10, "retries": 2, "wall_time": 60.0}


def told(kind: Kind, **limits: Any) -> str:
    """What is said where a run waits for its budget of that kind, in the receipt-store's words."""
    reason = spent_reason(kind, ACCOUNT, Spend(Decimal("0.0200")), "abc123")
    return too_little("r", reason, Limits(**(AS_IT_WAS | limits)), CHARGED, 61.5)


@pytest.mark.parametrize(
    ("kind", "enough", "says"),
    [
        (
            "money",
            Decimal("0.51"),
            "0.49 is charged and receipt abc123 may cost 0.02, so 0.5 is not enough; to go on it needs at least --budget 0.51",
        ),
        ("calls", 11, "10 are made; to go on it needs at least --budget calls=11"),
        ("retries", 3, "2 are made; to go on it needs at least --budget retries=3"),
        ("wall_time", 63, "it has worked for 62 s; to go on it needs at least --budget wall-time=63s"),
    ],
)
def test_a_budget_with_which_a_run_would_stop_at_once_is_too_little_and_what_is_needed_is_enough(kind: Kind, enough: Any, says: str) -> None:
    assert told(kind) == f"run r would wait for its budget of {kind.replace('_', ' ')} again at once: {says}"
    assert told(kind, **{kind: enough}) == ""
    assert told(kind, **{kind: None}) == ""


def test_a_run_that_waits_for_something_else_may_go_on_whatever_is_spent() -> None:
    asks_to_be_paid = ("payment", "payment: provider p answered 402: budget: calls")
    for reason in ("pause", *asks_to_be_paid, "", "budget", "budget: money, receipt abc123 cost 0.03, more than the 0.01 reserved for it"):
        assert too_little("r", reason, Limits(**AS_IT_WAS), CHARGED, 61.5) == ""
