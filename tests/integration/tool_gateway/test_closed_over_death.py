"""A provider said when to come back to a gateway that then died: the next one, a new process, does not ask it before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.tool_gateway.conftest import loaded_project
from tests.integration.tool_gateway.socket_server import Server, saying
from tests.integration.tool_gateway.test_restart import gateway_process
from tests.integration.tool_gateway.test_sharing import Executor, executor  # noqa: F401 - a fixture

from rowmill.client.lanes import ask_lanes
from rowmill.runtime.db import Database
from rowmill_contracts.events import LaneView
from rowmill_receipt_store.app import App as ReceiptStore
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers

SCALE = 0.1
CLOSED = 3600 * SCALE
"""Seconds that a lane is closed at most."""
BOUND = 60.0
TOLD = "SELECT holder FROM standings JOIN shards USING (shard, term) WHERE lane = 'acme/away' AND holder IS NOT NULL AND closed_until > now()"

PLAYS = """
from pydantic import BaseModel
from rowmill import HttpTool, Provider

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

provider = Provider("away", base_url="{url}")

@provider.post("/find", effect="read", id="find")
class Find(HttpTool[FindIn, FindOut]): ...
"""


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    running.talk = saying(b"HTTP/1.1 429 Too Many\r\nRetry-After: 3600\r\nContent-Length: 2\r\n\r\n{}")
    yield running
    await running.stop()


@pytest.fixture
def project(tmp_path: Path, server: Server) -> Iterator[Path]:
    with loaded_project(tmp_path, PLAYS.format(url=server.url)):
        yield tmp_path


@pytest.fixture
async def receipts(broker_url: str, database_url: str) -> AsyncIterator[Database]:
    store = ReceiptStore(ReceiptStoreSettings(broker_url=broker_url, database_url=database_url, time_scale=SCALE))
    await store.start()
    database = await Database.connect(database_url, schema="receipts", size=1)
    yield database
    await database.close()
    await store.stop()


async def held(executor: Executor) -> LaneView:  # noqa: F811
    """The lane as `rowmill lanes` shows it, once a gateway has it."""
    async with asyncio.timeout(BOUND):
        while True:
            await executor.send_again()
            for answer in await ask_lanes(executor.bus, seconds=0.3):
                for lane in answer.lanes:
                    if lane.held:
                        return lane


async def test_a_new_gateway_does_not_ask_a_provider_that_told_a_dead_one_when_to_come_back(
    broker_url: str,
    project: Path,
    receipts: Database,
    executor: Executor,  # noqa: F811
    server: Server,
) -> None:
    settings = ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)
    async with gateway_process(settings, SCALE) as mortal:
        await executor.send([executor.call("away.find")], started_at=1.0)
        async with asyncio.timeout(BOUND):
            while not (rows := await receipts.fetch(TOLD)):
                await executor.send_again()  # it may have come before the gateway had the shard
                await asyncio.sleep(0.02)
        mortal.kill()
        await mortal.wait()
    next_one = App(settings)
    await next_one.start()
    try:
        await executor.send([executor.call("away.find")], started_at=1.0)
        lane = await held(executor)
        assert lane.closed_seconds is not None
        assert CLOSED - 60.0 < lane.closed_seconds <= CLOSED + 10.0
        assert len(server.requests) == 1
        [row] = await receipts.fetch("SELECT holder FROM shards WHERE shard = $1", lane.shard)
        assert row["holder"] != rows[0]["holder"]
    finally:
        await next_one.stop()
