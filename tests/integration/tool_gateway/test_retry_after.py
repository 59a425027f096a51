"""What a provider says about coming back later, on a real socket: seconds, a date, nothing, nonsense, a year."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from email.utils import formatdate

import pytest
from tests.integration.tool_gateway.socket_server import Server, saying
from tests.unit.tool_gateway.conftest import FindIn, FindOut, Rig

from rowmill import HttpTool, Provider, registry
from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.settings import ToolGatewaySettings

REJECTED, FIRST, LONGEST = 0.5, 0.1, 100.0


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with registry.isolated():
        made = Rig(ToolGatewaySettings(rejected_wait=REJECTED, retry_first=FIRST, longest_closing=LONGEST))
        made.port = DirectPort(connect_timeout=5.0, body_stall=5.0, body_limit=10_000)  # type: ignore[assignment]  # a real one
        yield made
        await made.stop()


@pytest.mark.parametrize("status", [429, 425])
@pytest.mark.parametrize(
    ("said", "closed"),
    [
        ("7", 7.0),
        ("1.5", 1.5),
        (7, 7.0),  # as a date
        (-60, FIRST),  # as a date that is over
        ("0", FIRST),
        (None, REJECTED),
        ("-5", REJECTED),
        ("soon", REJECTED),
        ("NaN", REJECTED),
        ("", REJECTED),
        ("9" * 400, REJECTED),
        ("31536000", LONGEST),
    ],
)
async def test_a_lane_is_closed_for_as_long_as_the_provider_says_within_reason(
    rig: Rig, server: Server, said: str | int | None, closed: float, status: int
) -> None:
    provider = Provider("hunter", base_url=server.url, concurrency=8)

    @provider.post("/v2/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]): ...

    value = formatdate(time.time() + said, usegmt=True) if isinstance(said, int) else said
    header = b"" if value is None else b"Retry-After: " + value.encode() + b"\r\n"
    server.talk = saying(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n" % status + header + b"\r\n{}")
    [outcome] = await rig.ask([rig.item(Find, {"domain": "a.example"})])
    [lane] = rig.engine.dispatcher.lanes
    left = lane.closed_until - rig.clock.monotonic()
    assert closed - 3.0 < left <= closed
    assert lane.share == 0.5
    assert len(server.requests) == 1
    assert {receipt.state for receipt in rig.store.receipts.values()} <= {"released", "failed"}
    if said == "31536000":
        assert outcome.failure is not None
        assert (outcome.outcome, outcome.failure.code) == ("failed", "provider_unavailable"), "a call may wait for an hour"
    else:
        assert outcome.outcome == "deferred"
        assert outcome.wait_ms >= 1000 * min(closed, left)
