"""What the receipt-store is told of a run: every decision on it, numbered, so that a late copy of an older one changes nothing.

A decision is whole: it carries the run's state and its budgets, so the newest alone says how the run stands.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rowmill.runtime.db import Connection
from rowmill.runtime.deliveries import Rejected
from rowmill_admission.owed import Owed
from rowmill_admission.runs import Run
from rowmill_admission.store import runs as run_store
from rowmill_contracts.budgets import Budget, Limits, budget_of, limits_of, unfit
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.topology import RECEIPTS_SETTLE

KINDS = Limits.__struct_fields__


def raised(before: Budget, given: Budget) -> Budget:
    """A run's budget with the limits of the kinds that are given in the place of what stood before.

    Raises:
        Rejected: a limit cannot be kept, such as money that is no amount.

    """
    limits = checked(given)
    return budget_of(msgspec.structs.replace(limits_of(before), **{kind: limit for kind in KINDS if (limit := getattr(limits, kind)) is not None}))


def checked(budget: Budget) -> Limits:
    """The limits of a budget. Raises `Rejected` where one cannot be kept, such as money that is no amount, or centuries of wall time."""
    limits = limits_of(budget)
    if (why := unfit(limits)) is not None:
        raise Rejected(why)
    return limits


async def decision_on(connection: Connection, run: Run, action: Literal["stop", "halt", "resume"], reason: str, *, retry: bool = False) -> Owed:
    """The message for a decision that is taken now on a locked run, under the run's next number. ``retry``: its failed rows are worked again."""
    number, deadline = await run_store.decide(connection, run.run_id, limits_of(run.options.budget).wall_time)
    return Owed(
        run.run_id,
        HaltRun(run_id=run.run_id, action=action, reason=reason, budget=run.options.budget, deadline=deadline, decision=number, retry=retry),
        RECEIPTS_SETTLE,
        asked=True,
    )
