"""A gateway killed with requests under way: the next one ends what it began, and no effect is repeated."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from provider import ProviderProcess
from tests.integration.tool_gateway.conftest import SCALE, Neighbours

from rowmill.project import Project
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers


@asynccontextmanager
async def gateway_process(settings: ToolGatewaySettings, scale: float = SCALE) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {
        **os.environ,
        "ROWMILL_BROKER_URL": settings.broker_url,
        "ROWMILL_PROJECT": str(settings.project),
        "ROWMILL_TIME_SCALE": str(scale),
    }
    command = [sys.executable, "-m", "rowmill", "serve", "tool-gateway", "--stop-with-parent"]
    process = await asyncio.create_subprocess_exec(*command, env=environ, cwd=settings.project, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def under_way(provider: ProviderProcess, count: int) -> None:
    async with asyncio.timeout(30):
        while provider.stats()["in_flight"] < count:
            await asyncio.sleep(0.05)


async def test_what_a_killed_gateway_had_under_way_is_ended_by_the_next(
    settings: ToolGatewaySettings, neighbours: Neighbours, provider: ProviderProcess, project: Path
) -> None:
    Project.find(project).load()
    reads = [neighbours.item("apollo.match", f"r{n}.example") for n in range(10)]
    orders = [neighbours.item("apollo.order", f"o{n}.example") for n in range(10)]
    charges = [neighbours.item("apollo.charge", f"c{n}.example") for n in range(5)]
    provider.control(hold=True)
    async with gateway_process(settings) as first:
        await neighbours.send([*reads, *orders, *charges])
        await under_way(provider, 25)
        first.kill()
        await first.wait()
    provider.control(hold=False)
    async with gateway_process(settings):
        outcomes = {item.call_id: await neighbours.outcome(item) for item in [*reads, *orders, *charges]}
    assert {outcomes[item.call_id].outcome for item in [*reads, *orders]} <= {"completed", "no_result"}
    assert {outcomes[item.call_id].outcome for item in charges} == {"unknown"}
    books = provider.stats()
    assert books["max_effects_per_key"] == 1
    assert books["requests"] == {"/match": 45}
    assert {shard.term for shard in neighbours.store.shards.values()} == {2}
