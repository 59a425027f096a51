"""Processes that stand still for a while, that are told to stop, and that live through many restarts of the broker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from tests.e2e.stage import BOUND
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.running import logged, survives

from rowmill.client import Client
from rowmill.dev.services import STOP_TIMEOUT, ServiceProcess, ServiceSet
from rowmill.dev.working_set import SIGNS
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


HEARTBEAT = "1"
"""Seconds; 8 unless it is set, so that half a minute is longer than the broker waits for a process. A frozen second and a half is not."""


async def start_anew(system: Harmed, heartbeat: str) -> None:
    for process in system.services.processes:
        process._environment["ROWMILL_HEARTBEAT_SECONDS"] = heartbeat
        process.signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, STOP_TIMEOUT)
        process.start()
    await system.consuming()


SHARED = [queue for service, queue in SIGNS.items() if service != "tool-gateway"]
"""Queues that every process of their service consumes; of one of a shard the broker counts the gateway alone that is served."""


@asynccontextmanager
async def second_set(system: Harmed, client: Client) -> AsyncIterator[ServiceSet]:
    """Another process of each service, which takes its part in the work."""
    others = ServiceSet(system.environment, system.project / "other-logs")
    others.start(keep_alive=False)
    try:
        async with asyncio.timeout(BOUND):
            while min(consumers for _, consumers in (await client.bus.depths(SHARED)).values()) < 2:
                await asyncio.sleep(0.1)
        yield others
    finally:
        await asyncio.to_thread(others.stop)


@pytest.mark.timeout(600)
async def test_a_run_goes_on_when_the_broker_took_a_frozen_process_for_dead(system: Harmed, client: Client) -> None:
    """Its connections are ended and its messages handed to a second instance; when it goes on it knows of neither."""

    async def given_up(service: str) -> None:
        before = logged(system, "missed heartbeats from client")
        system.freeze(service)
        try:
            async with asyncio.timeout(BOUND):
                while logged(system, "missed heartbeats from client") == before:
                    await asyncio.sleep(0.05)
        finally:
            system.resume(service)

    async with second_set(system, client) as others:
        try:
            await start_anew(system, HEARTBEAT)
            for service in SERVICES:
                await survives(system, client, f"given-up-{service}", lambda: given_up(service))  # noqa: B023 - waited for right here
        finally:
            await start_anew(system, "8")
        fell = [f"{process.name} {process.exit_status}:\n{process.last_words(40)}" for process in others.processes if process.pid is None]
        assert not fell, "\n\n".join(fell)


async def test_a_run_goes_on_by_one_of_two_when_the_other_is_killed(system: Harmed, client: Client) -> None:
    """Nobody starts it again. Gateways, whose requests are asked for again, are killed elsewhere (tests/e2e/test_chaos.py)."""
    async with second_set(system, client) as others:
        for service in ("admission", "sheet-writer", "receipt-store", "row-executor"):

            async def killed(process: ServiceProcess = others[service]) -> None:
                process.signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait, 10)

            await survives(system, client, f"alone-{service}", killed)
        assert [process.name for process in others.processes if process.pid is not None] == ["tool-gateway"]


@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_goes_on_when_a_process_was_told_to_stop(system: Harmed, client: Client, service: str) -> None:
    """It finishes or hands back what it has in hand, so that nothing is asked for twice."""

    async def fault() -> None:
        process = system.services[service]
        process.signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, STOP_TIMEOUT)
        assert process.exit_status == 0, process.last_words(40)
        process.start()

    await survives(system, client, f"stopped-{service}", fault)


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
