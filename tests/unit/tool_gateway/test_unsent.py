"""What is told of requests that ended before their first byte, and which words about that are believed."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import httpcore
import httpx
import pytest

from rowmill_tool_gateway.bodies import Bounds
from rowmill_tool_gateway.body_budget import BodyBudget
from rowmill_tool_gateway.http_library import LibraryPort
from rowmill_tool_gateway.http_port import AiohttpPort, HttpRequest, NoResponse
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
