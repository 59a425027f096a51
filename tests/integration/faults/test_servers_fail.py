"""Broker and database are restarted, killed and away in the middle of a run, and at the start."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.running import survives

from rowmill.client import Client

AWAY = 3.0
"""Seconds; at full size this is a minute."""


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name.removeprefix("test_")).strip("-")[:40].lower()


async def harm(node: object, how: str) -> None:
    match how:
        case "restarted":
            await asyncio.to_thread(node.restart)  # type: ignore[attr-defined]
        case "killed":
            await asyncio.to_thread(node.kill)  # type: ignore[attr-defined]
            await asyncio.to_thread(node.start)  # type: ignore[attr-defined]
        case _:
            await asyncio.to_thread(node.stop)  # type: ignore[attr-defined]
            await asyncio.sleep(AWAY)
            await asyncio.to_thread(node.start)  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["restarted", "killed", "away"])
async def test_a_run_goes_on_when_the_broker_was(system: Harmed, client: Client, word: str, how: str) -> None:
    await asyncio.to_thread(system.nodes.broker.sync_new_queues)
    await survives(system, client, f"broker-{how}", lambda: harm(system.nodes.broker, how))


@pytest.mark.parametrize("how", ["restarted", "killed", "away"])
async def test_a_run_goes_on_when_the_database_was(system: Harmed, client: Client, word: str, how: str) -> None:
    await survives(system, client, f"database-{how}", lambda: harm(system.nodes.database, how))
