"""Runs whose rows fail, and their retries, for tests with played neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from tests.integration.admission.admission_neighbours import Neighbours, settled

from rowmill.runtime.bus import Bus
from rowmill_contracts.counts import Problem
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.run_questions import RunShown, RunSummary
from rowmill_contracts.topology import RUNS_RETRY

FAILED = {0, 7, 411}
"""Rows of different pages."""


def failing(*attempts: Collection[int]) -> Callable[[RowTasks], list[SettledRow]]:
    """Which rows fail at their first attempt, at their second, and so on."""

    def work(tasks: RowTasks) -> list[SettledRow]:
        return [
            settled(row, "failed", Problem(code="no", message="no"))
            if row.attempt <= len(attempts) and row.index in attempts[row.attempt - 1]
            else settled(row, "completed")
            for row in tasks.rows
        ]

    return work


async def retry(bus: Bus, run_id: str, retry_id: str = "first") -> RunShown:
    return await bus.ask(RunRetry(run_id=run_id, retry_id=retry_id), RUNS_RETRY, RunShown)


async def ended(neighbours: Neighbours, run_id: str, times: int = 1) -> RunSummary:
    """The run once it has ended so many times."""
    await neighbours.until(lambda: sum(state in {"completed", "failed", "cancelled"} for state in neighbours.states(run_id)) >= times)
    summary = await neighbours.get(run_id)
    assert summary is not None
    return summary


def sent(neighbours: Neighbours, run_id: str) -> Counter[tuple[int, int]]:
    """(index, attempt) of rows that were published beyond each row's first time."""
    return Counter((row.index, row.attempt) for row in neighbours.sent(run_id)) - Counter((index, 1) for index in range(1000))


async def prepared_in_vain(neighbours: Neighbours, run_id: str) -> None:
    """Begin a retry of a run that has ended, and return while it waits for the receipt-store."""
    neighbours.receipts_away = True
    await neighbours.bus.publish(RunRetry(run_id=run_id), RUNS_RETRY)
    await neighbours.until(lambda: any(halt.retry for halt in neighbours.halts))
