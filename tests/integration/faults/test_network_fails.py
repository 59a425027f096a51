"""Connections to broker and database are cut, stalled, half-open and slow in the middle of a run."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.proxy import FaultProxy
from tests.integration.faults.running import survives

from rowmill.client import Client

pytestmark = pytest.mark.long

STALLED = 1.5
"""Seconds; at full size this is half a minute."""

SLOW = 20_000.0
"""Bytes a second of each connection: a page takes seconds."""

SLOW_SECONDS = 3.0


async def harm(system: Harmed, place: str, how: str) -> None:
    match how:
        case "cut":
            for _ in range(3):
                system.network.order(place, FaultProxy.cut)
                await asyncio.sleep(0.3)
        case "stalled":
            system.network.order(place, FaultProxy.stall)
            await asyncio.sleep(STALLED)
            system.network.order(place, FaultProxy.heal)
        case "half-open":
            system.network.order(place, FaultProxy.half_open)
        case _:
            system.network.order(place, lambda proxy: proxy.slow(SLOW))
            await asyncio.sleep(SLOW_SECONDS)
            system.network.order(place, FaultProxy.heal)


@pytest.mark.parametrize("how", ["cut", "stalled", "half-open", "slow"])
async def test_a_run_goes_on_when_the_connections_to_the_broker_were(system: Harmed, client: Client, how: str) -> None:
    await survives(system, client, f"broker-net-{how}", lambda: harm(system, "broker", how))


@pytest.mark.parametrize("how", ["cut", "stalled", "half-open", "slow"])
async def test_a_run_goes_on_when_the_connections_to_the_database_were(system: Harmed, client: Client, how: str) -> None:
    await survives(system, client, f"database-net-{how}", lambda: harm(system, "database", how), within=150)
