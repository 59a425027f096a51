"""What a call costs in the gateway: CPU per call of the engine alone and with the HTTP client, the receipt-store answered in memory.

Run by hand: ``python tests/bench/gateway_micro.py [CALLS]``. Prints figures and asserts nothing. The provider is a process of its own; neither it
nor a broker is part of the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop
from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "leads"))

from provider import ProviderProcess  # noqa: E402 - found through the path above

from rowmill import Batch, HttpTool, Provider, registry  # noqa: E402
from rowmill.runtime.clock import SystemClock  # noqa: E402
from rowmill.tools import Tool, tool_of  # noqa: E402
from rowmill_contracts.envelope import Message, decode, encode  # noqa: E402
from rowmill_contracts.receipts import (  # noqa: E402
    ClaimAnswer,
    ClaimReceipts,
    Complete,
    Completed,
    ReceiptsClaimed,
    Release,
    Released,
    StoreAnswer,
)
from rowmill_contracts.shards import LeaseShard, ShardLease, ShardsLeased  # noqa: E402
from rowmill_contracts.tools import CallItem, ToolCalls, ToolResults  # noqa: E402
from rowmill_tool_gateway.credentials import Credentials, Redactor  # noqa: E402
from rowmill_tool_gateway.engine import Engine  # noqa: E402
from rowmill_tool_gateway.http_direct import DirectPort  # noqa: E402
from rowmill_tool_gateway.http_library import LibraryPort  # noqa: E402
from rowmill_tool_gateway.http_port import AiohttpPort, HttpRequest, HttpResponse, MaySend, always  # noqa: E402
from rowmill_tool_gateway.http_tools import HttpCarrier  # noqa: E402
from rowmill_tool_gateway.routes import Routes  # noqa: E402
from rowmill_tool_gateway.settings import ToolGatewaySettings  # noqa: E402
from rowmill_tool_gateway.toolbox import Toolbox  # noqa: E402

ReplyT = TypeVar("ReplyT", bound=Message)
PAGE = 200
PAGES_AT_ONCE = 10


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


class Granting:
    """Neighbours that grant and store everything; requests and answers are encoded and decoded, as on the wire."""

    def __init__(self) -> None:
        self.answered = 0

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        encode(message)
        reply: Message
        match message:
            case ClaimReceipts():
                reply = ReceiptsClaimed(answers=[ClaimAnswer(state="granted", lease_id=claim.lease_id, dispatch=1) for claim in message.claims])
            case Complete():
                reply = Completed(answers=[StoreAnswer(state="stored", completed_at=1.0)] * len(message.completions))
            case LeaseShard():
                reply = ShardsLeased(shards=[ShardLease(shard=shard, held=True, term=1, seconds=60) for shard in message.shards])
            case Release():  # on a busy machine a call waits for longer than the hand holds it
                reply = Released(released=len(message.leases))
            case _:
                raise AssertionError(message)
        decoded = decode(reply.message_type, encode(reply))
        await asyncio.sleep(0.001)
        assert isinstance(decoded, answer)
        return decoded

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        assert isinstance(message, ToolResults)
        encode(message)
        self.answered += len(message.results)


class InstantPort:
    """No HTTP at all: what is left is the engine."""

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        await asyncio.sleep(0)
        assert may_send()
        return HttpResponse(200, b'{"email":"hello@example"}')

    async def close(self) -> None: ...


def tools(url: str) -> tuple[Any, Any]:
    apollo = Provider("apollo", base_url=url, concurrency=100)
    hunter = Provider("hunter", base_url=url, concurrency=100)

    @apollo.post("/match", effect="read")
    class Match(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    @hunter.post("/v2/find", effect="read", batch=Batch(50, path="/v2/bulk", items="items", results="results"))
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email", "data.emails.0.value"]}  # noqa: RUF012 - as authors write it

    return Match, Find


async def measure(name: str, tool: Tool, port: Any, calls: int) -> None:
    settings = ToolGatewaySettings()
    credentials = Credentials({}, Redactor())
    bus = Granting()
    toolbox = Toolbox(lambda tool: HttpCarrier(tool, port, credentials, result_limit=settings.result_limit))
    engine = Engine(bus, toolbox, credentials, settings, holder="bench", clock=SystemClock())
    engine.start()
    numbers = itertools.count()

    def page() -> bytes:
        items = [
            CallItem(
                call_id=f"c{n}",
                tool=tool.id,
                receipt_key=f"{n:064x}",
                input=msgspec.Raw(b'{"domain":"d%d.example"}' % n),
                row=f"leads/{n:064x}",
                asked=1.0,
            )
            for n in itertools.islice(numbers, PAGE)
        ]
        return encode(ToolCalls(run_id="run-1", org="default", play="leads", started_at=1.0, calls=items))

    bodies = [page() for _ in range(calls // PAGE)]
    queue = iter(bodies)

    async def consume() -> None:
        for body in queue:
            message = decode(ToolCalls.message_type, body)
            assert isinstance(message, ToolCalls)
            await engine.take(message, "replies").done

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(consume() for _ in range(PAGES_AT_ONCE)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    sent = len(bodies) * PAGE
    print(f"{name:28} {sent / wall:9.0f} calls/s {1e6 * cpu / sent:7.1f} µs CPU/call  ({bus.answered} answered)")
    await engine.stop(5)


async def main(calls: int) -> None:
    with ProviderProcess() as provider, registry.isolated():
        match, find = tools(provider.url)
        await measure("single, no HTTP", tool_of(match), InstantPort(), calls)
        for kind in (DirectPort, AiohttpPort):
            for name, tool in (("single", match), ("batch of 50", find)):
                port = kind(connect_timeout=5, body_stall=5, body_limit=2**25)
                await measure(f"{name}, {kind.__name__}", tool_of(tool), port, calls)
                await port.close()
        sessions = AiohttpPort(connect_timeout=5, body_stall=5, body_limit=2**25)
        library = LibraryPort(Routes(), sessions.bounds, connect_timeout=5)
        for name, tool in (("single", match), ("batch of 50", find)):
            await measure(f"{name}, LibraryPort", tool_of(tool), library, calls)
        await library.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
