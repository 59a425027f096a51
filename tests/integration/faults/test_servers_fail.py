"""Broker and database are restarted, killed and away in the middle of a run, and at the start."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.running import survives

from rowmill.client import Client
from rowmill.dev.nodes import Node
from rowmill.dev.services import ServiceSet

pytestmark = pytest.mark.long

AWAY = 3.0
"""Seconds; at full size this is a minute."""


async def harm(node: Node, how: str) -> None:
    match how:
        case "restarted":
            await asyncio.to_thread(node.restart)
        case "killed":
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
        case _:
            await asyncio.to_thread(node.stop)
            await asyncio.sleep(AWAY)
            await asyncio.to_thread(node.start)


@pytest.mark.parametrize("how", ["restarted", "killed", "away"])
async def test_a_run_goes_on_when_the_broker_was(system: Harmed, client: Client, how: str) -> None:
    await asyncio.to_thread(system.nodes.broker.sync_new_queues)
    await survives(system, client, f"broker-{how}", lambda: harm(system.nodes.broker, how))


@pytest.mark.parametrize("how", ["restarted", "killed", "away"])
async def test_a_run_goes_on_when_the_database_was(system: Harmed, client: Client, how: str) -> None:
    await survives(system, client, f"database-{how}", lambda: harm(system.nodes.database, how))


async def test_services_started_without_a_broker_work_once_it_is_there(system: Harmed) -> None:
    await asyncio.to_thread(system.services.stop)
    await asyncio.to_thread(system.nodes.broker.stop)
    system.services = ServiceSet(system.environment, system.project / "logs")
    system.services.start(keep_alive=False)
    await asyncio.sleep(AWAY)
    assert system.all_run(), "a service gave up"
    await asyncio.to_thread(system.nodes.broker.start)
    await system.consuming()
    async with system.connected() as client:
        await survives(system, client, "late-broker", nothing)


async def nothing() -> None:
    """No fault."""
