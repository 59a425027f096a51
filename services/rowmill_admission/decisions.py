"""What the receipt-store is told of a run: every decision on it, numbered, so that a late copy of an older one changes nothing.

A decision is whole: it carries the run's state and its budget, so the newest alone says how the run stands.
"""

from __future__ import annotations

from typing import Literal

from rowmill.runtime.db import Connection
from rowmill_admission.owed import Owed
from rowmill_admission.runs import Run
from rowmill_admission.store import runs as run_store
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.topology import RECEIPTS_SETTLE


async def decision_on(connection: Connection, run: Run, action: Literal["stop", "halt", "resume"], reason: str) -> Owed:
    """The message for a decision that is taken now on a locked run, under the run's next number."""
    number = await run_store.decide(connection, run.run_id)
    return Owed(
        run.run_id,
        HaltRun(run_id=run.run_id, action=action, reason=reason, budget=run.options.budget, decision=number),
        RECEIPTS_SETTLE,
        asked=True,
    )
