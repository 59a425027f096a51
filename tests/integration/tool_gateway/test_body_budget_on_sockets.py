"""Large bodies at the same time, on real connections: within the budget of the process, and each to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.integration.tool_gateway.socket_server import Server, Talk, saying

from rowmill_tool_gateway.body_budget import STEP, BodyBudget
from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.http_port import AiohttpPort, HttpPort, HttpRequest, NoResponse

MIB = 2**20
LIMIT = 32 * MIB
STALL = 0.5


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(2 * LIMIT, LIMIT)


@pytest.fixture(params=[DirectPort, AiohttpPort])
async def port(request: pytest.FixtureRequest, budget: BodyBudget) -> AsyncIterator[HttpPort]:
    made: HttpPort = request.param(connect_timeout=5.0, body_stall=STALL, body_limit=LIMIT, budget=budget)
    yield made
    await made.close()


def large(size: int, *, announced: bool) -> Talk:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: %d\r\n\r\n" % size if announced else b"Transfer-Encoding: chunked\r\n\r\n"))
        for _number in range(size // MIB):
            writer.write(b" " * MIB if announced else b"100000\r\n" + b" " * MIB + b"\r\n")
            await writer.drain()
        writer.write(b"" if announced else b"0\r\n\r\n")

    return talk


async def send(port: HttpPort, url: str, timeout: float = 60.0) -> int:
    return len((await port.send(HttpRequest("hunter", "POST", url, {}, b"{}", timeout))).body)


@pytest.mark.parametrize("announced", [True, False])
async def test_ten_bodies_of_20_mib_at_once_all_end_within_the_budget(port: HttpPort, server: Server, budget: BodyBudget, announced: bool) -> None:
    server.talk = large(20 * MIB, announced=announced)
    assert await asyncio.gather(*(send(port, server.url) for _ in range(10))) == [20 * MIB] * 10
    assert 20 * MIB <= budget.most <= 2 * LIMIT
    assert (budget.held, budget.waiting) == (0, 0)


async def test_bodies_that_stall_give_their_room_to_the_others(port: HttpPort, server: Server, budget: BodyBudget) -> None:
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LIMIT, b" " * MIB)
    stalled = [asyncio.ensure_future(send(port, server.url)) for _ in range(2)]
    async with asyncio.timeout(20):
        while budget.held < 2 * LIMIT:
            await asyncio.sleep(0.01)
    server.talk = large(20 * MIB, announced=True)
    assert await asyncio.gather(*(send(port, server.url) for _ in range(3))) == [20 * MIB] * 3
    for request in stalled:
        with pytest.raises(NoResponse, match="stalled"):
            await request
    assert budget.held == 0


@pytest.mark.parametrize("gives_up", ["timeout", "cancelled"])
async def test_who_waits_and_gives_up_leaves_nothing_behind(port: HttpPort, server: Server, budget: BodyBudget, gives_up: str) -> None:
    holding = budget.share(lambda: None)
    assert holding.want(1, LIMIT)
    assert budget.share(lambda: None).want(1, LIMIT)
    server.talk = large(20 * MIB, announced=True)
    waiting = asyncio.ensure_future(send(port, server.url, timeout=0.5 if gives_up == "timeout" else 60.0))
    async with asyncio.timeout(20):
        while not budget.waiting:
            await asyncio.sleep(0.01)
    if gives_up == "cancelled":
        waiting.cancel()
    [ended] = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, NoResponse if gives_up == "timeout" else asyncio.CancelledError)
    assert (budget.waiting, budget.held) == (0, 2 * LIMIT)
    holding.done()
    assert await send(port, server.url) == 20 * MIB


async def test_what_is_not_read_is_not_sent(server: Server, budget: BodyBudget) -> None:
    """Backpressure reaches the provider: while there is no budget, it can write no more than the sockets hold."""
    assert all(budget.share(lambda: None).want(1, LIMIT) for _ in range(2))
    written = 0

    async def counting(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LIMIT)
        for _number in range(LIMIT // STEP):
            writer.write(b" " * STEP)
            await writer.drain()
            written += STEP

    server.talk = counting
    port = DirectPort(connect_timeout=5.0, body_stall=STALL, body_limit=LIMIT, budget=budget)
    with pytest.raises(NoResponse, match="within"):
        await send(port, server.url, timeout=1.0)
    assert written < LIMIT / 2
    await port.close()
