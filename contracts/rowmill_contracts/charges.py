"""What runs were charged: asked of the receipt-store, whose books are the only ones (docs/adr/0022-what-a-run-was-charged.md)."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Final

import msgspec

from rowmill_contracts.envelope import Message, message

MAX_RUNS: Final = 1000
"""Runs that are asked for at once at most."""


class RunCharges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``cost``: what the run was charged so far, for every dispatch, whatever came of it: what it cost, or what is reserved for it while nobody
    knows. ``calls``: its dispatches, also those that cost nothing. Both may fall: what was not sent is refunded. ``version`` rises with each change.
    ``counted_calls``, ``counted_retries``: what its budgets of calls and retries have paid for, as far as it has, or had, such a budget.
    """

    run_id: str
    version: int = 0
    cost: Decimal = Decimal(0)
    calls: int = 0
    counted_calls: int = 0
    counted_retries: int = 0


@message()
class AskCharges(Message, frozen=True, kw_only=True):
    """What were these runs charged by now?"""

    run_ids: Annotated[list[str], msgspec.Meta(max_length=MAX_RUNS)]


@message()
class ChargesTold(Message, frozen=True, kw_only=True):
    """Of each run that was asked for, in that order; one that the books do not know was charged nothing."""

    runs: list[RunCharges]
