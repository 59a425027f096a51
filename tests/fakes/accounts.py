"""A run's budgets and charges as the receipt-store in memory keeps them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from rowmill_contracts.budgets import Limits
from rowmill_contracts.receipts import Claim
from rowmill_receipt_store.charges import Kind


@dataclass
class Run:
    """How it stands, by its newest decision, and what it was charged: by dispatch, a key and a number."""

    state: str = "running"
    reason: str = ""
    decision: int = 0
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    counts: bool = False
    exceeded: bool = False
    charges: dict[tuple[str, int], Decimal] = field(default_factory=dict)
    counted: dict[tuple[str, int], Literal["calls", "retries"]] = field(default_factory=dict)
    charged_to: dict[tuple[str, int], str] = field(default_factory=dict)
    spent: set[tuple[str, int]] = field(default_factory=set)

    def late(self, now: float) -> bool:
        """Whether its wall time is over."""
        return self.deadline is not None and self.deadline <= now

    def charged(self) -> Decimal:
        return sum(self.charges.values(), Decimal(0))

    def refund(self, key: str, dispatch: int) -> tuple[Decimal, Literal["calls", "retries"] | None]:
        return self.charges.pop((key, dispatch), Decimal(0)), self.counted.pop((key, dispatch), None)

    def unpaid(self, cost: Decimal, kind: Literal["calls", "retries"], now: float) -> Kind | None:
        """The budget that does not pay for one more dispatch; None: all do."""
        limit = getattr(self.limits, kind)
        if self.late(now):
            return "wall_time"
        if self.limits.money is not None and cost and self.charged() + cost > self.limits.money:
            return "money"
        return kind if limit is not None and list(self.counted.values()).count(kind) >= limit else None

    def has_some(self, kind: Kind, dispatches: Collection[tuple[str, int]]) -> bool:
        """Whether some of these have part of the budget of ``kind``."""
        if kind == "money":
            return any(self.charges.get(dispatch) for dispatch in dispatches)
        return any(self.counted.get(dispatch) == kind for dispatch in dispatches)

    def pays(self, claim: Claim) -> bool:
        """Whether a budget pays for the claim, which is then confirmed right before it is sent."""
        by_number = self.limits.calls is not None or self.limits.retries is not None
        return (self.limits.money is not None and claim.cost > 0) or (by_number and claim.counted)
