"""Calls that last: a row with several of them takes far longer than the broker lets a message stay unacknowledged, and nothing trips over that."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.e2e.stage import BOUND, SCALE
from tests.e2e.waiting.provider import NotingProvider
from tests.e2e.waiting.system import WaitingSystem

from rowmill.client import Client
from rowmill.client.reading import SheetReader
from rowmill.dev.private import PrivateServers

CALL = 3.0
"""Real seconds that a call lasts; stands for 10 minutes."""
HOLD = 1.0
"""Real seconds that a message is held for a request that was sent; stands for 5 minutes."""
BROKER_LIMIT_MS = 4_000
"""How long the broker lets a message stay unacknowledged; stands for its 30 minutes."""
BROKER_LOOKS_MS = 250


@pytest.mark.servers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("calls", [3, pytest.param(10, marks=pytest.mark.long)])
async def test_a_row_of_calls_that_last_never_trips_the_brokers_limit(own_servers: PrivateServers, tmp_path: Path, calls: int) -> None:
    for setting, value in (("consumer_timeout", BROKER_LIMIT_MS), ("channel_tick_interval", BROKER_LOOKS_MS)):
        await asyncio.to_thread(own_servers.broker.control, "eval", f"application:set_env(rabbit, {setting}, {value}).")
    async with NotingProvider(lasts=CALL) as provider:
        settings = {
            "ROWMILL_PROVIDERS__SLOW__BASE_URL": provider.url,
            "ROWMILL_IN_FLIGHT_HOLD": str(HOLD / SCALE),
            "ROWMILL_CALL_HOLD": str(HOLD / SCALE),
            "ROWMILL_IN_FLIGHT_AGAIN": str(HOLD / 2 / SCALE),
            "ROWMILL_CALL_HOLD_PARK": str(HOLD / 2 / SCALE),
        }
        async with (
            WaitingSystem(tmp_path, own_servers.broker.url, own_servers.database.url, settings) as system,
            Client(own_servers.broker.url) as client,
        ):
            job = await client.start(system.play("patient"), calls=calls, rows=[{"name": "first"}, {"name": "second"}])
            async with asyncio.timeout(BOUND + calls * CALL):
                summary = await job.wait()
            rows = [row async for row in SheetReader(client.bus).rows(job.run_id, "patient")]
    assert (summary.state, summary.counts.completed) == ("completed", 2), summary.error
    names = [[f"{word}-{number}" for number in range(calls)] for word in ("first", "second")]
    assert [msgspec.json.decode(row.data)["worked"] for row in rows] == names
    assert Counter(name for _, name in provider.arrivals) == Counter(name for of_row in names for name in of_row)
    logged = "".join(log.read_text(errors="replace") for log in (own_servers.folder / "rabbitmq" / "log").glob("*.log"))
    assert "timed out waiting for" not in logged, logged[-2000:]
