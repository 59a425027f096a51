"""A gateway without servers: the real engine between a receipt-store in memory, a scripted HTTP port and a list of answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import pytest
from pydantic import BaseModel
from tests.fakes.clocks import LeapingLoop, LoopClock
from tests.fakes.receipts import MemoryReceipts

from rowmill import HttpTool, Provider, registry
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key
from rowmill.errors import AskTimeout
from rowmill.runtime.author_threads import AuthorThreads
from rowmill.runtime.deliveries import Delivery
from rowmill.tools import Tool, tool_of
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.receipts import ClaimReceipts
from rowmill_contracts.runs import ProviderServes
from rowmill_contracts.shards import ShardsFreed
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_tool_gateway.credentials import Credentials, Redactor
from rowmill_tool_gateway.engine import Engine
from rowmill_tool_gateway.function_clients import Clients
from rowmill_tool_gateway.functions import FunctionCarrier
from rowmill_tool_gateway.handlers import Handlers
from rowmill_tool_gateway.http_port import AiohttpPort, HttpRequest, HttpResponse, MaySend, NoResponse, always, not_sent
from rowmill_tool_gateway.http_tools import Carrier, HttpCarrier
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.toolbox import Toolbox

ReplyT = TypeVar("ReplyT", bound=Message)
Script = Callable[[HttpRequest], Awaitable[HttpResponse]]


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


def find_tool(*, effect: str = "read", **options: Any) -> Any:
    provider_options = {name: options.pop(name) for name in ("rate", "burst", "concurrency") if name in options}
    provider = Provider("hunter", base_url="http://127.0.0.1:1", **provider_options)

    @provider.post("/v2/find", effect=effect, cost=Decimal("0.01"), **options)  # type: ignore[arg-type]
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    return Find


def raw_of(outcome: CallOutcome) -> Any:
    return msgspec.json.decode(outcome.result)["raw"]


async def lost(_: HttpRequest) -> HttpResponse:
    raise NoResponse("no_answer", "the connection was lost")


class Neighbours:
    """The bus as the engine sees it. Requests and answers are encoded and decoded, as on the wire.

    ``silent``: messages of these types are carried out, and their answers lost.
    """

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.silent: set[type[Message]] = set()
        self.asked: list[Message] = []
        self.carried_out: list[Message] = []
        self.outcomes: dict[str, CallOutcome] = {}
        self._arrived = asyncio.Event()

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        request = decode(message.message_type, encode(message))
        self.asked.append(request)
        await asyncio.sleep(0)
        reply = decode(None if (made := self.store.answer(request)) is None else made.message_type, encode(made))
        self.carried_out.append(request)
        if type(message) in self.silent:
            raise AskTimeout(f"no answer to {message.message_type}")
        assert isinstance(reply, answer)
        return reply

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        assert isinstance(message, ToolResults)
        for outcome in message.results:
            assert outcome.call_id not in self.outcomes, "answered twice"
            self.outcomes[outcome.call_id] = outcome
        self._arrived.set()

    async def outcome(self, call_id: str) -> CallOutcome:
        while call_id not in self.outcomes:
            self._arrived.clear()
            await self._arrived.wait()
        return self.outcomes[call_id]

    @property
    def claims(self) -> int:
        """Receipts that were claimed, looks not counted."""
        return sum(len(request.claims) for request in self.asked if isinstance(request, ClaimReceipts) and not request.only_cached)


class ScriptedPort:
    """``script`` answers each request; requests are kept. ``connect``: awaited before the right to send is asked for."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.script: Script = answering({"email": "a@example"})
        self.connect: Callable[[], Awaitable[None]] | None = None

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        if self.connect is not None:
            await self.connect()
        if not may_send():
            raise not_sent()
        self.requests.append(request)
        return await self.script(request)

    async def close(self) -> None: ...


def answering(document: Any, status: int = 200, **headers: str) -> Script:
    """Every request gets this answer; a document that is a function is given the request's body."""

    async def script(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0)
        body = document(msgspec.json.decode(request.body or b"null")) if callable(document) else document
        return HttpResponse(status, msgspec.json.encode(body), {name.replace("_", "-"): value for name, value in headers.items()})

    return script


def in_turn(*scripts: Script) -> Script:
    """One script after the other, the last one from then on."""
    left = list(scripts)

    async def script(request: HttpRequest) -> HttpResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return script


class Rig:
    """``ask``: hand in calls of one run and wait for their outcomes, in order."""

    def __init__(
        self, settings: ToolGatewaySettings, store: MemoryReceipts | None = None, environ: dict[str, str] | None = None, holder: str = ""
    ) -> None:
        self.clock = LoopClock()
        self.settings = settings
        scale = settings.time_scale
        self.store = store or MemoryReceipts(self.clock.now, queued=10 * scale, running=60 * scale, shard=6 * scale, held_poll=0.01)
        self.bus = Neighbours(self.store)
        self.port = ScriptedPort()
        self.credentials = Credentials(environ or {}, Redactor())
        self.sessions = AiohttpPort(connect_timeout=5, body_stall=5, body_limit=2**20)
        self._threads = AuthorThreads(2)
        self._numbers = itertools.count(1)
        self.holder = holder or f"gateway-{id(self)}"
        self.stepped_back: list[int] = []
        self.others: list[Rig] = []
        """Gateways that hear what this one says to all."""
        self.serving: list[ProviderServes] = []
        self.sooner: list[ProviderServes] = []
        """What was said of idle lanes."""
        self.engine = Engine(
            self.bus,
            Toolbox(self._carrier),
            self.credentials,
            settings,
            holder=self.holder,
            clock=self.clock,
            jitter=lambda: 0.0,
            serves=self._serves,
            step_back=self._step_back,
            tell_freed=self._tell_freed,
            sooner=self._sooner,
        )
        self.engine.start()

    async def _step_back(self, shard: int) -> None:
        self.stepped_back.append(shard)

    async def _tell_freed(self, shards: list[int]) -> None:
        hint = Delivery(message=ShardsFreed(shards=shards), body=b"", queue="", message_id="hint")
        for other in self.others:
            await Handlers(other.engine, other.bus).control(hint)

    def _serves(self, org: str, provider: str, message: Callable[[], ProviderServes | None]) -> None:
        told = message()
        assert told is not None
        assert (told.org, told.provider) == (org, provider)
        self.serving.append(told)

    def _sooner(self, message: ProviderServes) -> bool:
        self.sooner.append(message)
        return True

    def _carrier(self, tool: Tool) -> Carrier:
        if tool.kind == "http":
            return HttpCarrier(tool, self.port, self.credentials, result_limit=self.settings.result_limit)
        clients = Clients(self.sessions, self.credentials)
        return FunctionCarrier(tool, clients, self.credentials, self._threads, result_limit=self.settings.result_limit)

    def item(self, tool: Any, given: dict[str, Any], *, row: str = "leads/1", org: str = "acme", **facts: Any) -> CallItem:
        described = tool_of(tool)
        encoded = canonical(given)
        key = receipt_key(org, "", described.id, described.version, encoded, described.provider.credential_scope)
        return CallItem(call_id=f"{id(self)}-{next(self._numbers)}", tool=described.id, receipt_key=key, input=msgspec.Raw(encoded), row=row, **facts)

    def hand_in(self, items: list[CallItem], *, run: str = "run-1", org: str = "acme", started_at: float | None = None, **facts: Any) -> ToolCalls:
        message = ToolCalls(
            run_id=run, org=org, play="leads", started_at=self.clock.now() if started_at is None else started_at, calls=items, **facts
        )
        decoded = decode(message.message_type, encode(message))
        assert isinstance(decoded, ToolCalls)
        self.engine.take(decoded, "replies.executor")
        return decoded

    async def ask(self, items: list[CallItem], **facts: Any) -> list[CallOutcome]:
        self.hand_in(items, **facts)
        return [await self.bus.outcome(item.call_id) for item in items]

    async def stop(self) -> None:
        await self.engine.stop(2.0)
        await self.sessions.close()
        self._threads.shutdown(wait=False)


class Hold:
    """A provider that answers when it is told to."""

    def __init__(self, rig: Rig) -> None:
        self._answer = asyncio.Event()
        self.open = 0
        self.then = answering({"email": "a@example"})
        rig.port.script = self._held

    async def _held(self, request: HttpRequest) -> HttpResponse:
        self.open += 1
        await self._answer.wait()
        self.open -= 1
        return await self.then(request)

    def answer(self) -> None:
        self._answer.set()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Where a test is marked ``leaping`` what its gateways wait for takes no time."""
    return {"loop": LeapingLoop if item.get_closest_marker("leaping") else asyncio.SelectorEventLoop}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry.isolated():
        yield


@pytest.fixture
def settings() -> ToolGatewaySettings:
    return ToolGatewaySettings(time_scale=0.05)


@pytest.fixture
async def rig(settings: ToolGatewaySettings) -> AsyncIterator[Rig]:
    made = Rig(settings)
    yield made
    await made.stop()
