"""Processes that stand still for a while, and that live through many restarts of the broker."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.running import survives

from rowmill.client import Client
from rowmill.runtime.hosting import SERVICES

pytestmark = pytest.mark.long

FROZEN = 1.5
"""Seconds; at full size this is half a minute."""

GROWTH = 20 * 1024 * 1024
"""Bytes that a process may have more after many restarts of the broker than after the first two: what two runs may differ by."""


@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_goes_on_when_a_process_was_frozen(system: Harmed, client: Client, service: str) -> None:
    async def fault() -> None:
        system.freeze(service)
        await asyncio.sleep(FROZEN)
        system.resume(service)

    await survives(system, client, f"frozen-{service}", fault)


def sizes(system: Harmed) -> dict[str, int]:
    return {process.name: psutil.Process(process.pid).memory_info().rss for process in system.services.processes}


async def restart(system: Harmed, times: int) -> None:
    url = system.nodes.broker.url
    for _ in range(times):
        await asyncio.to_thread(system.nodes.broker.kill)
        await asyncio.to_thread(system.nodes.broker.start)
        assert system.nodes.broker.url == url, "services would look for it in vain"
        await system.consuming()


async def memory_over_restarts(system: Harmed, client: Client, restarts: int) -> None:
    """A run under two restarts, many more without work, and a run under two again."""
    await asyncio.to_thread(system.nodes.broker.sync_new_queues)
    await survives(system, client, f"first-of-{restarts}", lambda: restart(system, 2))
    before = sizes(system)
    await restart(system, restarts - 4)
    await survives(system, client, f"last-of-{restarts}", lambda: restart(system, 2))
    grown = {name: size - before[name] for name, size in sizes(system).items()}
    assert max(grown.values()) < GROWTH, grown


@pytest.mark.timeout(600)
async def test_memory_stays_flat_over_ten_restarts_of_the_broker(system: Harmed, client: Client) -> None:
    await memory_over_restarts(system, client, 10)


@pytest.mark.timeout(1_200)
async def test_memory_stays_flat_over_fifty_restarts_of_the_broker(system: Harmed, client: Client) -> None:
    await memory_over_restarts(system, client, 50)
