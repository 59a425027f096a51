"""Tool functions as the gateway carries them out: what their endings mean, and what they are given."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from tests.integration.tool_gateway.socket_server import Server, reset, saying

from rowmill import Bearer, Provider, ToolCall, registry, secret
from rowmill.runtime.author_threads import AuthorThreads
from rowmill.tools import tool_of
from rowmill_contracts.tools import Effect
from rowmill_tool_gateway.credentials import Credentials, Redactor
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.function_clients import Clients
from rowmill_tool_gateway.functions import FunctionCarrier
from rowmill_tool_gateway.http_port import AiohttpPort, NoResponse
from rowmill_tool_gateway.results import Ended, Result

LIMIT = 2**20
place: ContextVar[str] = ContextVar("place", default="nowhere")


class Given(BaseModel):
    domain: str = "a.example"


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry.isolated():
        yield


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    yield running
    await running.stop()


async def carried(tool: Any, timeout: float = 5.0, environment: Mapping[str, str] = MappingProxyType({})) -> Ended:
    port = AiohttpPort(connect_timeout=5.0, body_stall=0.3, body_limit=LIMIT)
    credentials = Credentials(environment, Redactor())
    threads = AuthorThreads(2)
    carrier = FunctionCarrier(tool_of(tool), Clients(port, credentials), credentials, threads, result_limit=LIMIT)
    [ended] = await carrier.carry([b"{}"], ["k0"], timeout)
    await port.close()
    threads.shutdown(wait=False)
    return ended


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "bad_answer", "not_json"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{", "bad_answer", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1), "too_large", None),
        (b"HTTP/1.1 402 X\r\nContent-Length: 2\r\n\r\n{}", "answered", None),
        (b"HTTP/1.1 302 X\r\nContent-Length: 0\r\n\r\n", "answered", None),
    ],
    ids=["not JSON", "stalled", "too large", "402", "302"],
)
async def test_what_a_function_meets_is_classed_as_what_a_declared_tool_meets(server: Server, answer: bytes, kind: str, code: str | None) -> None:
    provider = Provider("crm", base_url=server.url)

    @provider.tool("score", effect="read")
    async def score(given: Given, call: ToolCall) -> Any:
        found = await call.http.post("/score")
        found.raise_for_status()
        return found.json()

    server.talk = saying(answer)
    seen = await carried(score)
    assert isinstance(seen, Observation)
    assert (seen.kind, seen.code) == (kind, code)


async def test_a_function_one_of_whose_requests_was_sent_did_not_do_nothing(server: Server, unused_tcp_port: int) -> None:
    """Its second request never opened a connection; repeating the whole would repeat the first."""
    provider = Provider("crm", base_url=server.url)

    @provider.tool("order", effect="non_idempotent")
    async def order(given: Given, call: ToolCall) -> int:
        if given.domain == "a.example":
            await call.http.post("/order")
        await call.http.post(f"http://127.0.0.1:{unused_tcp_port}/confirm")
        return 1

    seen = await carried(order)
    assert isinstance(seen, Observation)
    assert seen.kind == "no_answer"
    assert len(server.requests) == 1


async def test_a_function_whose_only_request_was_lost_after_it_was_sent_may_have_had_its_effect(server: Server) -> None:
    provider = Provider("crm", base_url=server.url)

    @provider.tool("order", effect="non_idempotent")
    async def order(given: Given, call: ToolCall) -> int:
        return (await call.http.post("/order")).json()  # type: ignore[no-any-return]

    async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        reset(writer)

    server.talk = hangs_up
    seen = await carried(order)
    assert isinstance(seen, Observation)
    assert seen.kind == "no_answer"


async def test_a_blocking_function_runs_in_a_thread_with_the_context_of_its_call() -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")
    place.set("here")

    @provider.tool("where", effect="read", blocking=True)
    def where(given: Given, call: ToolCall) -> list[str]:
        return [place.get(), str(threading.current_thread() is threading.main_thread())]

    ended = await carried(where)
    assert isinstance(ended, Result)
    assert json.loads(ended.output)["raw"] == ["here", "False"]


@pytest.mark.parametrize(("effect", "kind"), [("read", "never_opened"), ("non_idempotent", "no_answer")])
async def test_a_blocking_functions_own_client_does_not_say_that_nothing_was_sent(effect: Effect, kind: str) -> None:
    """It may have ordered on one connection before another did not open, and an order must not be placed again."""
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect=effect, blocking=True)
    def order(given: Given, call: ToolCall) -> str:
        raise httpx.ConnectError("refused")

    seen = await carried(order)
    assert isinstance(seen, Observation)
    assert seen.kind == kind


async def test_the_timeout_of_a_blocking_function_ends_its_call_and_not_its_thread() -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")
    go_on, over = threading.Event(), threading.Event()

    @provider.tool("slow", effect="read", blocking=True)
    def slow(given: Given, call: ToolCall) -> int:
        go_on.wait(30)
        over.set()
        return 1

    seen = await carried(slow, timeout=0.05)
    assert isinstance(seen, Observation)
    assert (seen.kind, seen.code) == ("no_answer", "timeout")
    assert not over.is_set()
    go_on.set()
    assert await asyncio.to_thread(over.wait, 10), "it goes on, and what it does then is done"


async def test_a_blocking_function_sends_as_others_do(server: Server) -> None:
    provider = Provider("crm", base_url=server.url, auth=Bearer(secret("CRM_KEY")), headers={"X-Account": "seven"})

    @provider.tool("score", effect="read", blocking=True)
    def score(given: Given, call: ToolCall) -> Any:
        return call.blocking_http.post("/score", json={"domain": given.domain}).raise_for_status().json()

    server.talk = saying(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"score": 7}')
    ended = await carried(score, environment={"CRM_KEY": "k3y"})
    assert isinstance(ended, Result)
    assert json.loads(ended.output)["raw"] == {"score": 7}
    [asked] = server.requests
    assert asked.startswith(b"POST /score HTTP/1.1\r\n")
    for line in (b"authorization: bearer k3y", b"x-account: seven", b'{"domain":"a.example"}'):
        assert line in asked.lower()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{", "bad_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1), "too_large"),
        (b"HTTP/1.1 429 X\r\nContent-Length: 2\r\n\r\n{}", "answered"),
    ],
    ids=["stalled", "too large", "429"],
)
async def test_what_a_blocking_function_meets_is_classed_alike(server: Server, answer: bytes, kind: str) -> None:
    provider = Provider("crm", base_url=server.url)

    @provider.tool("score", effect="read", blocking=True)
    def score(given: Given, call: ToolCall) -> Any:
        return call.blocking_http.post("/score").raise_for_status().json()

    server.talk = saying(answer)
    seen = await carried(score)
    assert isinstance(seen, Observation)
    assert seen.kind == kind


async def test_a_blocking_function_whose_time_is_over_sends_no_more(server: Server) -> None:
    """Its request is given up, and what its thread asks for afterwards is refused."""
    provider = Provider("crm", base_url=server.url)
    raised: list[Exception] = []
    over = threading.Event()

    @provider.tool("slow", effect="read", blocking=True)
    def slow(given: Given, call: ToolCall) -> int:
        for path in ("/slow", "/late"):
            try:
                call.blocking_http.post(path)
            except Exception as error:
                raised.append(error)
        over.set()
        return 1

    async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        await asyncio.to_thread(over.wait, 30)
        reset(writer)

    server.talk = says_nothing
    seen = await carried(slow, timeout=0.2)
    assert isinstance(seen, Observation)
    assert (seen.kind, seen.code) == ("no_answer", "timeout")
    assert await asyncio.to_thread(over.wait, 10)
    assert [type(error) for error in raised] == [httpx.ReadTimeout, NoResponse]
    assert [request.split()[1] for request in server.requests] == [b"/slow"]


async def test_the_client_of_threads_refuses_the_loop(server: Server) -> None:
    provider = Provider("crm", base_url=server.url)

    @provider.tool("score", effect="read")
    async def score(given: Given, call: ToolCall) -> Any:
        return call.blocking_http.get("/score").json()

    seen = await carried(score)
    assert isinstance(seen, Observation)
    assert seen.kind == "crashed"
    assert "blocking=True" in seen.message
    assert server.requests == []
