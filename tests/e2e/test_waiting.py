"""A provider is down, and rows wait for it: others are not held up, nobody holds the waiting ones, and they come back in order, at its rate."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncpg
import pytest
from tests.e2e.stage import BOUND
from tests.e2e.waiting.books import Books, most_within, order_of
from tests.e2e.waiting.provider import NotingProvider
from tests.e2e.waiting.system import WaitingSystem

from rowmill.client import Client
from rowmill.client.lanes import ask_lanes
from rowmill.dev import ServerSet
from rowmill.doctor.health import look
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.topology import EXECUTOR_ROWS, gateway_calls

HOLDERS = {EXECUTOR_ROWS, *(gateway_calls(shard) for shard in range(SHARDS))}
SCOUTS = 2
"""Rows under way at a time at most that find out whether the provider serves."""
TOLERANCE = 0.05
"""Seconds, between the last check and the provider's own clock."""


@dataclass
class Size:
    """``window``: rows of a run that are admitted before the first of them ends. ``rate``: requests a second that the provider allows. ``beside``:
    rows of the run beside them. ``hand``, ``longest``: real seconds for which a call waits in hand, and until a row that is not called back asks
    again.
    """

    runs: int
    rows: int
    window: int
    rate: int
    beside: int
    hand: float
    longest: float
    patience: float = BOUND


SMALL = Size(runs=4, rows=100, window=40, rate=50, beside=100, hand=3.0, longest=60.0)
FULL = Size(runs=50, rows=2_000, window=1_000, rate=400, beside=5_000, hand=5.0, longest=300.0, patience=600.0)


class Outage:
    """One test's system, with a provider that is away until the end."""

    def __init__(self, size: Size, servers: ServerSet, broker_url: str, database_url: str, client: Client, books: Books) -> None:
        self._size = size
        self._servers = servers
        self._broker_url = broker_url
        self._database_url = database_url
        self._client = client
        self.books = books

    async def all_wait(self) -> None:
        """Return at a moment when every admitted row waits in admission's table, and executors and gateways hold none, but for the one or two that
        find out whether the provider serves; these have waited, too.
        """
        everyone = self._size.runs * self._size.window
        async with asyncio.timeout(self._size.patience):
            while not (
                await self.books.waiting() >= everyone - SCOUTS and len(await self.books.asked()) == everyone and await self._nobody_holds_any()
            ):
                await asyncio.sleep(0.05)

    async def _nobody_holds_any(self) -> bool:
        """By what the broker counts as delivered and not acknowledged, and by the gateways' own counts of calls in hand."""
        health = await look(self._broker_url, self._database_url, getattr(self._servers.broker, "control", None))
        if any(queue.queue in HOLDERS and queue.ready + (queue.unacknowledged or 0) > SCOUTS for queue in health.queues):
            return False
        shown = await ask_lanes(self._client.bus, seconds=10.0, provider="away", enough=bool)
        return bool(shown) and all(lane.waiting + lane.in_flight <= SCOUTS for answer in shown for lane in answer.lanes)


async def rows_a_second(system: WaitingSystem, client: Client, size: Size, word: str) -> float:
    """Work a run at the provider that is there."""
    loop = asyncio.get_running_loop()
    job = await client.start(system.play("steady"), rows=[{"name": f"{word}:{row}"} for row in range(size.beside)])
    began = loop.time()
    async with asyncio.timeout(size.patience):
        summary = await job.wait()
    assert (summary.state, summary.counts.completed) == ("completed", size.beside)
    return size.beside / (loop.time() - began)


@pytest.mark.servers
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [SMALL, pytest.param(FULL, marks=pytest.mark.long)], ids=["small", "full"])
async def test_rows_wait_for_free_and_come_back_in_order_without_a_burst(
    servers: ServerSet, broker_url: str, database_url: str, tmp_path: Path, size: Size
) -> None:
    away, there = NotingProvider(), NotingProvider()
    settings = {
        "ROWMILL_TIME_SCALE": "1",  # at a twentieth, a busy machine loses its shards and claims, and with them the order
        "ROWMILL_PAGE_GATHER": "0.005",
        "ROWMILL_CLAIM_AHEAD": "0.1",
        "ROWMILL_PROVIDERS__AWAY__BASE_URL": away.url,
        "ROWMILL_PROVIDERS__AWAY__RATE": f"{size.rate}/s",
        "ROWMILL_PROVIDERS__THERE__BASE_URL": there.url,
        "ROWMILL_RUN_ROOM": str(size.window),
        "ROWMILL_PAGE_ROWS": str(size.window // 2),
        "ROWMILL_HAND": str(size.hand),
        "ROWMILL_PROBE_FIRST": str(size.hand / 4),
        "ROWMILL_PROBE_LIMIT": str(2 * size.hand),
        "ROWMILL_AWAY_WAIT": str(size.longest),
        "ROWMILL_WAIT_POLL": str(0.1),
    }
    loop = asyncio.get_running_loop()
    async with there, WaitingSystem(tmp_path, broker_url, database_url, settings) as system, Client(broker_url) as client:
        connection = await asyncpg.connect(database_url)
        alone = await rows_a_second(system, client, size, "alone")
        memory = system.memory()
        began = loop.time()
        jobs = [await client.start(system.play("stranded"), rows=[{"name": f"{run}:{row}"} for row in range(size.rows)]) for run in range(size.runs)]
        outage = Outage(size, servers, broker_url, database_url, client, Books(connection, jobs))
        await outage.all_wait()
        waited = loop.time() - began

        outage_told = await jobs[0].outages()
        beside = await rows_a_second(system, client, size, "beside")
        await outage.all_wait()
        memory_waiting = system.memory()
        assert await outage.books.admitted() == [size.window] * size.runs, "no run admits more than its window"
        asked = await outage.books.asked()
        assert len(asked) == size.runs * size.window

        returned = loop.time()
        async with away:
            over = asyncio.gather(*(job.wait() for job in jobs))
            while not over.done():
                await outage.books.waiting()
                await asyncio.sleep(size.hand / 8)
            summaries = await over
        lasted = loop.time() - began
        await connection.close()

    names, times = [name for _, name in away.arrivals], [time for time, _ in away.arrivals]
    assert [(found.provider, found.why) for found in outage_told] == [("away", "connection_failed")]
    assert size.window - SCOUTS <= outage_told[0].rows <= size.window
    order = order_of(names, asked, scouts=round(size.longest / (2 * size.hand)) + 4)
    books = outage.books
    figures = {
        "rows a second of a run beside them, alone and while they wait": [round(alone), round(beside), round(beside / alone, 2)],
        "seconds until all wait, from the provider's return to its first and to its last request": [
            round(waited, 1),
            round(times[0] - returned, 1),
            round(times[-1] - returned, 1),
        ],
        "requests a second, and the most in any second": [round((len(times) - 1) / (times[-1] - times[0]), 1), most_within(times, 1.0)],
        "seconds that the provider itself slept": round(away.slept, 3),
        "megabytes before and while they wait": [memory, memory_waiting],
        "waits of nine rows of ten, and of one": [books.typical_waits, books.most_waits],
        "order": asdict(order) | {"overtaking": len(order.overtaking)},
    }
    print(json.dumps(figures, indent=1))  # noqa: T201 - what is measured is shown, not asserted
    assert [(summary.state, summary.counts.completed) for summary in summaries] == [("completed", size.rows)] * size.runs
    assert len(names) == len(set(names)) == size.runs * size.rows, "each was asked for once"
    seconds = 1 if away.slept < 0.5 else 1 + math.ceil(away.slept)
    assert most_within(times, seconds - TOLERANCE - away.slept) <= seconds * size.rate, "no burst when it is back"
    assert not order.overtaking, "of each run those that had waited come before any that had not"
    assert order.early < size.window / 2, "of each run the oldest come first"
    assert order.apart < size.window / 2, "runs come in turn"
    assert books.typical_waits <= 8 + lasted / size.longest, f"most rows were replayed {books.typical_waits} times in {lasted:.0f} s"
    assert books.most_waits <= 8 + 2 * lasted / size.hand, f"one that found out was replayed {books.most_waits} times in {lasted:.0f} s"
