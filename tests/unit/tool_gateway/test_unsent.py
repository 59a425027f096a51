"""What is told of requests that ended before their first byte, and which words about that are believed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast
from unittest.mock import Mock

import aiohttp
import httpcore
import httpx
import pytest
from tests.unit.tool_gateway.conftest import FindIn, Rig

from rowmill import Provider, ToolCall
from rowmill.tools import tool_of
from rowmill_tool_gateway.bodies import Bounds
from rowmill_tool_gateway.body_budget import BodyBudget
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.http_library import LibraryPort
from rowmill_tool_gateway.http_port import AiohttpPort, HttpRequest, MaySend, NoResponse, always, may_send_here
from rowmill_tool_gateway.rights import Right
from rowmill_tool_gateway.routes import Routes

REQUEST = HttpRequest("hunter", "POST", "http://127.0.0.1:1/find", {}, b"{}", timeout=0.02)


class Stalling:
    """A transport that begins to write a request of this method, or none, and then stalls."""

    def __init__(self, method: str | None) -> None:
        self.method = method

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.method is not None:
            begun = httpcore.Request(self.method, "http://127.0.0.1:1/")
            await request.extensions["trace"]("http11.send_request_headers.started", {"request": begun})
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("writes", "kind"), [(None, "never_opened"), ("CONNECT", "never_opened"), ("POST", "no_answer")])
async def test_a_timeout_before_the_first_byte_by_the_library_is_a_connection_that_never_opened(
    monkeypatch: pytest.MonkeyPatch, writes: str | None, kind: str
) -> None:
    port = LibraryPort(Routes(), Bounds(100, 5, BodyBudget(200, 100)), connect_timeout=5)
    monkeypatch.setattr(port, "transport", lambda *_, **__: Stalling(writes))
    with pytest.raises(NoResponse) as caught:
        await port.send(REQUEST)
    assert caught.value.kind == kind


async def test_a_timeout_before_the_first_byte_is_a_connection_that_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stalling(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", stalling)
    port = AiohttpPort(connect_timeout=5, body_stall=5, body_limit=100)
    with pytest.raises(NoResponse) as caught:
        await port.send(REQUEST)
    assert caught.value.kind == "never_opened"
    await port.close()


# ---- functions ----------------------------------------------------------------------------------------------------------------------------


def once() -> MaySend:
    """The right to begin, and none to send."""
    rights = iter([True])
    return lambda: next(rights, False)


async def carried(rig: Rig, function: Any, may_send: MaySend = always) -> str:
    [seen] = await rig._carrier(tool_of(function)).carry([b'{"domain":"a.example"}'], ["key"], 20.0, may_send)
    assert isinstance(seen, Observation)
    return seen.kind


@pytest.mark.parametrize(("effect", "kind"), [("read", "never_opened"), ("non_idempotent", "no_answer")])
async def test_a_functions_own_client_does_not_say_that_nothing_was_sent(rig: Rig, effect: Any, kind: str) -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect=effect)
    async def order(given: FindIn, call: ToolCall) -> str:
        raise httpx.ConnectError("refused")

    assert await carried(rig, order) == kind


@pytest.mark.parametrize(("waits", "kind"), [(False, "never_opened"), (True, "no_answer")])
async def test_a_connection_of_ours_that_never_opened_is_believed_where_the_function_did_nothing_else(rig: Rig, waits: bool, kind: str) -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect="non_idempotent")
    async def order(given: FindIn, call: ToolCall) -> str:
        if waits:
            await asyncio.sleep(0)  # as a client of its own does
        return (await call.http.post("/order")).text

    assert await carried(rig, order) == kind


@pytest.mark.parametrize(
    ("effect", "waits", "kind"), [("read", True, "not_sent"), ("non_idempotent", False, "not_sent"), ("non_idempotent", True, "no_answer")]
)
async def test_a_refused_request_is_believed_where_the_function_did_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, effect: Any, waits: bool, kind: str
) -> None:
    async def connected(*_: Any) -> Any:
        await asyncio.sleep(0)
        return Mock()

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connected)
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect=effect)
    async def order(given: FindIn, call: ToolCall) -> str:
        if waits:
            await asyncio.sleep(0)
        return (await call.http.post("/order")).text

    assert await carried(rig, order, once()) == kind


async def test_the_right_of_a_call_ends_with_it_whatever_its_function_began(rig: Rig) -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")
    rights: list[Right] = []

    @provider.tool("order", effect="read")
    async def order(given: FindIn, call: ToolCall) -> str:
        rights.append(cast("Right", may_send_here.get()))
        return "done"

    await rig._carrier(tool_of(order)).carry([b'{"domain":"a.example"}'], ["key"], 20.0)
    assert may_send_here.get() is always, "what comes after it has a right of its own"
    [right] = rights
    assert not right()
    begun: Future[httpx.Response] = Future()
    right.carries(begun)
    assert begun.cancelled(), "a thread had come so far when the call ended"
