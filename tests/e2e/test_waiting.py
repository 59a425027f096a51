"""A provider is down, and rows wait for it: others are not held up, nobody holds the waiting ones, and they come back at its rate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from tests.e2e.stage import BOUND, SCALE
from tests.e2e.waiting.provider import NotingProvider
from tests.e2e.waiting.system import WaitingSystem

from rowmill.client import Client, Job
from rowmill.dev import ServerSet
from rowmill.doctor.health import look
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.topology import EXECUTOR_ROWS, gateway_calls

HOLDERS = {EXECUTOR_ROWS, *(gateway_calls(shard) for shard in range(SHARDS))}
TOLERANCE = 0.05
"""Seconds, between the last check and the provider's own clock."""
FIRST_WAIT, LONGEST_WAIT = 0.8, 60.0
"""Real seconds between a provider's first refusals, and until a row that is not called back asks again."""


@dataclass
class Size:
    """``window``: rows of a run that are admitted before the first of them ends. ``rate``: requests a second that the provider allows."""

    runs: int
    rows: int
    window: int
    rate: int


class Books:
    """What admission and the sheet-writer have written about the runs that wait."""

    def __init__(self, connection: asyncpg.Connection, jobs: list[Job]) -> None:
        self._connection = connection
        self._runs = [job.run_id for job in jobs]
        self.typical_waits = 0
        """Times that nine rows of ten have waited at most. The others found out whether the provider serves again."""

    async def waiting(self) -> int:
        row = await self._connection.fetchrow(
            "SELECT count(*) FILTER (WHERE w.state = 'waiting') AS waiting, "
            " coalesce(percentile_disc(0.9) WITHIN GROUP (ORDER BY w.waits), 0) AS typical"
            " FROM admission.waits w JOIN admission.datasets d USING (dataset_seq) WHERE d.run_id = ANY ($1)",
            self._runs,
        )
        assert row is not None
        self.typical_waits = max(self.typical_waits, row["typical"])
        return int(row["waiting"])

    async def admitted(self) -> list[int]:
        """Rows that were admitted, by run."""
        rows = await self._connection.fetch("SELECT sum(row_count) AS rows FROM sheets.pages WHERE run_id = ANY ($1) GROUP BY run_id", self._runs)
        return [row["rows"] for row in rows]


async def all_wait(size: Size, books: Books, servers: ServerSet, broker_url: str, database_url: str) -> None:
    """Return at a moment when every admitted row waits in admission's table, and neither executors nor gateways hold any."""
    async with asyncio.timeout(BOUND):
        while True:
            if await books.waiting() == size.runs * size.window:
                health = await look(broker_url, database_url, getattr(servers.broker, "control", None))
                held = [queue for queue in health.queues if queue.queue in HOLDERS and (queue.ready or queue.unacknowledged)]
                if not held and await books.waiting() == size.runs * size.window:
                    return
            await asyncio.sleep(0.05)


def most_within(times: list[float], seconds: float) -> int:
    """The most arrivals in any window of that length."""
    first, most = 0, 0
    for last, time in enumerate(times):
        while time - times[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.servers
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [Size(4, 100, 40, 50), pytest.param(Size(50, 2_000, 1_000, 400), marks=pytest.mark.long)], ids=["small", "full"])
async def test_rows_wait_for_free_and_come_back_without_a_burst(
    servers: ServerSet, broker_url: str, database_url: str, tmp_path: Path, size: Size
) -> None:
    away, there = NotingProvider(), NotingProvider()
    settings = {
        "ROWMILL_PROVIDERS__AWAY__BASE_URL": away.url,
        "ROWMILL_PROVIDERS__AWAY__RATE": f"{size.rate}/s",
        "ROWMILL_PROVIDERS__THERE__BASE_URL": there.url,
        "ROWMILL_RUN_ROOM": str(size.window),
        "ROWMILL_PAGE_ROWS": str(size.window // 2),
        "ROWMILL_HAND": str(FIRST_WAIT / SCALE),
        "ROWMILL_PROBE_FIRST": str(FIRST_WAIT / SCALE),
        "ROWMILL_PROBE_LIMIT": str(3 * FIRST_WAIT / SCALE),
        "ROWMILL_AWAY_WAIT": str(LONGEST_WAIT / SCALE),
        "ROWMILL_WAIT_POLL": str(0.1 / SCALE),
    }
    loop = asyncio.get_running_loop()
    async with there, WaitingSystem(tmp_path, broker_url, database_url, settings) as system, Client(broker_url) as client:
        connection = await asyncpg.connect(database_url)
        began = loop.time()
        jobs = [await client.start(system.play("stranded"), rows=[{"name": f"{run}:{row}"} for row in range(size.rows)]) for run in range(size.runs)]
        books = Books(connection, jobs)
        await all_wait(size, books, servers, broker_url, database_url)

        steady = await client.start(system.play("steady"), rows=[{"name": f"steady:{row}"} for row in range(size.rows)])
        async with asyncio.timeout(BOUND):
            beside = await steady.wait()
        assert (beside.state, beside.counts.completed) == ("completed", size.rows), "a run beside them ends while they wait"
        await all_wait(size, books, servers, broker_url, database_url)
        assert await books.admitted() == [size.window] * size.runs, "no run admits more than its window"

        async with away:
            over = asyncio.gather(*(job.wait() for job in jobs))
            while not over.done():
                await books.waiting()
                await asyncio.sleep(0.1)
            summaries = await over
        lasted = loop.time() - began
        await connection.close()

    assert [(summary.state, summary.counts.completed) for summary in summaries] == [("completed", size.rows)] * size.runs
    names = [name for _, name in away.arrivals]
    assert len(names) == len(set(names)) == size.runs * size.rows, "each was asked for once"
    assert most_within([time for time, _ in away.arrivals], 1.0 - TOLERANCE) <= size.rate, "no burst when it is back"
    assert books.typical_waits <= 8 + lasted / LONGEST_WAIT, f"most rows were replayed {books.typical_waits} times in {lasted:.0f} s"
