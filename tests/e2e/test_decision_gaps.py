"""What admission has stored of a stop or a resumption and not said when it dies right there: it is said after all, and nothing is sent meanwhile.

How services come to die there: `test_gaps`.
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from tests.e2e.gaps.gap import Gap
from tests.e2e.stage import BOUND, Books, Stage, leads
from tests.e2e.test_gaps import LOOKED, OWED, _stage, arm, died  # noqa: F401 - a fixture

from rowmill.client import Client, Job
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import RUNS_STOP

ROWS = 200
LONG = 55
"""Seconds after which the provider says that it can be asked again: longer than this lasts, and no longer than a leg of a waterfall waits (60)."""

STOPS = [
    Gap("admission", "HaltRun", "before", OWED),
    Gap("admission", "HaltRun", "after", OWED),
    Gap("admission", "RowsSettled", "before", LOOKED),
    Gap("admission", "RowsSettled", "after", LOOKED),
    Gap("admission", "RowsSettled", "lost", LOOKED),
    Gap("admission", "RunEvent", "before", OWED, key="run.cancelled"),
]
RESUMPTIONS = [
    Gap("admission", "HaltRun", "before", OWED, number=2),
    Gap("admission", "HaltRun", "after", OWED, number=2),
    Gap("admission", "RowTasks", "before", LOOKED, returning=True),
    Gap("admission", "RowTasks", "after", LOOKED, returning=True),
]

pytestmark = pytest.mark.long


async def waiting(system: Stage, job: Job, rows: int) -> None:
    """Return once so many rows of the run stand in admission's table as waiting."""
    sql = "SELECT count(*) FROM admission.waits w JOIN admission.datasets d USING (dataset_seq) WHERE d.run_id = $1 AND w.state = 'waiting'"
    connection = await asyncpg.connect(system.database_url)
    try:
        async with asyncio.timeout(BOUND):
            while await connection.fetchval(sql, job.run_id) < rows:
                await asyncio.sleep(0.05)
    finally:
        await connection.close()


@pytest.mark.parametrize("gap", STOPS, ids=lambda gap: gap.name.replace(" ", "-"))
async def test_a_stop_survives_the_gap(system: Stage, client: Client, word: str, gap: Gap) -> None:
    system.provider.control(latency_ms=0, reply_429={"path": "/match", "count": 1_000_000, "retry_after": LONG})
    [process] = arm(system, [gap])
    await system.consuming()
    rows = leads(ROWS, word)
    due = Books.of(row["domain"] for row in rows)
    job = await client.start(system.play(), leads=rows)
    await waiting(system, job, due.apollo)
    async with asyncio.timeout(BOUND):
        while (summary := await job.status()) is None or summary.counts.completed < ROWS - due.apollo:
            await asyncio.sleep(0.05)
    asked = Books.told(await asyncio.to_thread(system.provider.stats))

    await client.bus.publish(RunStop(run_id=job.run_id, reason="enough"), RUNS_STOP)
    if gap.deadly:
        await died(system, process)
    async with asyncio.timeout(BOUND):
        summary = await job.wait()

    counts = summary.counts
    assert (summary.state, counts.admitted, counts.cancelled, counts.completed) == ("cancelled", ROWS, due.apollo, ROWS - due.apollo)
    await system.quiet()
    await system.well(job)
    assert Books.told(await asyncio.to_thread(system.provider.stats)) == asked, "something was sent after the stop"


@pytest.mark.parametrize("gap", RESUMPTIONS, ids=lambda gap: gap.name.replace(" ", "-"))
async def test_a_resumption_survives_the_gap(system: Stage, client: Client, word: str, gap: Gap) -> None:
    system.provider.control(latency_ms=200)
    [process] = arm(system, [gap])
    await system.consuming()
    rows = leads(ROWS, word)
    due = Books.of(row["domain"] for row in rows)
    job = await client.start(system.play(), leads=rows)
    async with asyncio.timeout(BOUND):
        while Books.told(await asyncio.to_thread(system.provider.stats)).total < due.total / 4:
            await asyncio.sleep(0.02)
    await job.pause()
    async with asyncio.timeout(BOUND):
        while (summary := await job.status()) is None or summary.waiting_for != "pause":
            await asyncio.sleep(0.05)
    await system.quiet()
    assert Books.told(await asyncio.to_thread(system.provider.stats)).total < due.total, "paused too late to show anything"

    system.provider.control(latency_ms=0)
    resuming = asyncio.create_task(job.resume())
    await died(system, process)
    await resuming
    async with asyncio.timeout(BOUND):
        await job.wait()
    assert (await system.audit(client, job, rows)).counts.completed == ROWS
    assert Books.told(await asyncio.to_thread(system.provider.stats)) == due
