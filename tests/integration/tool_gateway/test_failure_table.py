"""SPEC 4.4, line by line: a provider that misbehaves on a real socket, the engine, and receipts in a real database.

Each line is tried by one call of a `read`, an `idempotent` and a `non_idempotent` tool. The provider does what the line says once, and answers well
from then on.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar, cast

import msgspec
import pytest
from pydantic import BaseModel
from tests.integration.tool_gateway.socket_server import Server, Talk, reset, saying

from rowmill import Bearer, HttpTool, Provider, registry, secret
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill.runtime.deliveries import Delivery
from rowmill.tools import tool_of
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.receipts import ClaimReceipts
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_receipt_store.gateway_store import GatewayStore
from rowmill_receipt_store.handlers import Handlers
from rowmill_receipt_store.leasing import Leasing
from rowmill_receipt_store.merging import Merger
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.standing_store import StandingStore
from rowmill_receipt_store.store import SCHEMA, Store
from rowmill_receipt_store.window_store import WindowStore
from rowmill_tool_gateway.credentials import Credentials, Redactor
from rowmill_tool_gateway.engine import Engine
from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.http_tools import HttpCarrier
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.toolbox import Toolbox

pytestmark = pytest.mark.servers

ReplyT = TypeVar("ReplyT", bound=Message)
EFFECTS = ("read", "idempotent", "non_idempotent")
COST = Decimal("0.01")
STALL = 0.3
"""Seconds of silence in a body that are too many here."""
_numbers = itertools.count()


def http(status: int, body: bytes = b"{}", *headers: bytes) -> bytes:
    length = () if any(header.startswith((b"Content-Length", b"Transfer-Encoding")) for header in headers) else (b"Content-Length: %d" % len(body),)
    return b"\r\n".join([b"HTTP/1.1 %d X" % status, b"X-Request-Id: req-7", *length, *headers, b"", body])


def says(status: int, body: bytes = b"{}", *headers: bytes) -> Talk:
    return saying(http(status, body, *headers))


async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
    reset(writer)


async def pours(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
    """50 MiB in chunks, to nobody who reads them all."""
    writer.write(http(200, b"", b"Transfer-Encoding: chunked"))
    for _number in range(50):
        writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        await writer.drain()


REFUSES = "nobody listens"
RESETS = "resets the connection without reading the request"
BOMB = gzip.compress(b" " * (50 * 2**20), compresslevel=1, mtime=0)
GZIP = b"Content-Encoding: gzip"

# What follows, for each effect.
REPEATS = "repeats"  # asked again, which succeeds
FAILS = "fails"
UNKNOWN = "outcome_unknown"  # nobody asks again until an operator decides
WAITS = "waits"  # the row is parked; not its failure
RUN_WAITS = "run waits"
REPEATS_OR_UNKNOWN = (REPEATS, REPEATS, UNKNOWN)
REPEATS_ALL = (REPEATS, REPEATS, REPEATS)
FAILS_ALL = (FAILS, FAILS, FAILS)
WAITS_ALL = (WAITS, WAITS, WAITS)
RUN_WAITS_ALL = (RUN_WAITS, RUN_WAITS, RUN_WAITS)
FREE, PAID = False, True

TABLE: list[tuple[str, Any, tuple[str, str, str], bool, str, str]] = [
    # what happened                         the provider                                read, idempotent, non_ charged category     code
    ("connection refused", REFUSES, REPEATS_ALL, FREE, "unreachable", "connection_failed"),
    ("reset before it was read", RESETS, REPEATS_OR_UNKNOWN, PAID, "no_answer", "no_answer"),
    ("reset after it was read", hangs_up, REPEATS_OR_UNKNOWN, PAID, "no_answer", "no_answer"),
    ("body truncated", saying(http(200, b'{"a":', b"Content-Length: 90"), close=True), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "unreadable_answer"),
    ("body stalled", says(200, b'{"a":', b"Content-Length: 90"), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "unreadable_answer"),
    ("not HTTP", saying(b"SSH-2.0-x\r\n\r\n", close=True), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "unreadable_answer"),
    ("not JSON", says(200, b'{"email": '), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "not_json"),
    ("NaN", says(200, b'{"email": NaN}'), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "not_json"),
    ("empty", says(200, b""), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "not_json"),
    ("HTML with 200", says(200, b"<html>busy</html>", b"Content-Type: text/html"), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "not_json"),
    ("gzip that is none", says(200, b"not zipped", GZIP), REPEATS_OR_UNKNOWN, PAID, "bad_answer", "unreadable_answer"),
    ("null", says(200, b"null"), FAILS_ALL, PAID, "bad_answer", "wrong_answer"),
    ("JSON that does not fit", says(200, b'{"email": 7}'), FAILS_ALL, PAID, "bad_answer", "wrong_answer"),
    ("gzip bomb", says(200, BOMB, GZIP), FAILS_ALL, PAID, "too_large", "too_large"),
    ("50 MiB", pours, FAILS_ALL, PAID, "too_large", "too_large"),
    ("50 MiB announced", says(200, b"", b"Content-Length: %d" % (50 * 2**20)), FAILS_ALL, PAID, "too_large", "too_large"),
    ("redirect", says(302, b"", b"Location: /elsewhere"), FAILS_ALL, PAID, "redirect", "http_302"),
    ("redirect that keeps the body", says(307, b"", b"Location: /elsewhere"), FAILS_ALL, PAID, "redirect", "http_307"),
    ("400", says(400, b'{"error": "no domain"}'), FAILS_ALL, PAID, "rejected", "http_400"),
    ("400 that says quota", says(400, b'{"error": {"code": "insufficient_quota"}}'), RUN_WAITS_ALL, FREE, "payment", "payment"),
    ("401, then a new credential", says(401), REPEATS_ALL, FREE, "auth", "http_401"),
    ("401 again", says(401), FAILS_ALL, FREE, "auth", "http_401"),
    ("402", says(402), RUN_WAITS_ALL, FREE, "payment", "payment"),
    ("403, then a new credential", says(403), REPEATS_ALL, FREE, "auth", "http_403"),
    ("403", says(403), FAILS_ALL, FREE, "auth", "http_403"),
    ("404", says(404), FAILS_ALL, PAID, "rejected", "http_404"),
    ("408", says(408), REPEATS_OR_UNKNOWN, PAID, "no_answer", "http_408"),
    ("422", says(422), FAILS_ALL, PAID, "rejected", "http_422"),
    ("425", says(425), WAITS_ALL, FREE, "rate_limited", "http_425"),
    ("429", says(429), WAITS_ALL, FREE, "rate_limited", "http_429"),
    ("429 with Retry-After", says(429, b"{}", b"Retry-After: 7"), WAITS_ALL, FREE, "rate_limited", "http_429"),
    ("500", says(500), REPEATS_OR_UNKNOWN, PAID, "no_answer", "http_500"),
    ("503", says(503), REPEATS_OR_UNKNOWN, PAID, "no_answer", "http_503"),
    ("503 with Retry-After", says(503, b"{}", b"Retry-After: 7"), (WAITS, WAITS, UNKNOWN), PAID, "no_answer", "http_503"),
]


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


class RealStore:
    """Asks the receipt-store's own handlers, without a broker between, and collects what the engine answers."""

    def __init__(self, database: Database) -> None:
        store = Store(database, queued_lease=10, running_lease=60, shard_lease=6, answer_bytes=2**23)
        receipts = Receipts(store, held_poll=0.25, output_limit=2**23)
        merger = Merger(statements=2, max_items=1000, max_bytes=2**24)
        leasing = Leasing(receipts, WindowStore(database), GatewayStore(database, life=6), StandingStore(database))
        presences = PresenceStore(database, lease=6, grace=2)
        no_operator: Any = None
        self._handlers = Handlers(cast("Any", self), receipts, presences, leasing, no_operator, merger)  # it answers through us
        self._replies: dict[str, Message] = {}
        self.failures: list[Message] = []
        self.outcomes: dict[str, CallOutcome] = {}
        self._arrived = asyncio.Event()

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        name = str(next(_numbers))
        delivery = Delivery(message=decode(message.message_type, encode(message)), body=b"", queue=key, message_id=name)
        if type(message).__name__ == "Fail":
            self.failures.append(message)
        await (self._handlers.claim if isinstance(message, ClaimReceipts) else self._handlers.settle)(delivery)
        reply = self._replies.pop(name)
        assert isinstance(reply, answer)
        return reply

    async def reply(self, delivery: Delivery, message: Message) -> None:
        self._replies[delivery.message_id] = message

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        assert isinstance(message, ToolResults)
        self.outcomes |= {outcome.call_id: outcome for outcome in message.results}
        self._arrived.set()

    async def outcome(self, call_id: str) -> CallOutcome:
        async with asyncio.timeout(30):
            while call_id not in self.outcomes:
                self._arrived.clear()
                await self._arrived.wait()
        return self.outcomes[call_id]


@dataclass
class Rig:
    bus: RealStore
    database: Database
    environ: dict[str, str] = field(default_factory=lambda: {"KEY": "the-first-credential"})

    async def call(self, url: str, effect: str) -> tuple[CallOutcome, str, Decimal, msgspec.Struct | None]:
        """The outcome of one call, and how its receipt, its run's account and the failure that was stored for it stand then."""
        provider = Provider(f"p{next(_numbers)}", base_url=url, auth=Bearer(secret("KEY")))

        @provider.post("/find", effect=effect, cost=COST)  # type: ignore[arg-type]
        class Find(HttpTool[FindIn, FindOut]): ...

        settings = ToolGatewaySettings(retry_first=0.01, retry_limit=0.02, hand=6.0)
        credentials = Credentials(self.environ, Redactor())
        port = DirectPort(connect_timeout=5, body_stall=STALL, body_limit=settings.body_limit)
        toolbox = Toolbox(lambda tool: HttpCarrier(tool, port, credentials, result_limit=settings.result_limit))
        clock = SystemClock()
        engine = Engine(self.bus, toolbox, credentials, settings, holder=f"gateway-{next(_numbers)}", clock=clock)
        engine.start()
        tool, encoded = tool_of(Find), canonical({"domain": "a.example"})
        key = receipt_key("acme", "", tool.id, tool.version, encoded, tool.provider.credential_scope)
        run = f"run-{key[:12]}"
        item = CallItem(call_id=key, tool=tool.id, receipt_key=key, input=msgspec.Raw(encoded), row="leads/1", asked=clock.now())
        engine.take(ToolCalls(run_id=run, org="acme", play="leads", started_at=clock.now(), calls=[item]), "replies")
        outcome = await self.bus.outcome(key)
        while engine.hand.pages:
            await asyncio.sleep(0)
        await engine.stop(5)
        await port.close()
        [receipt] = await self.database.fetch("SELECT state FROM receipts WHERE key = $1", bytes.fromhex(key))
        [account] = await self.database.fetch("SELECT coalesce(sum(coalesce(spent, reserved)), 0) AS charged FROM charges WHERE run_id = $1", run)
        stored = [failed.failure for message in self.bus.failures for failed in getattr(message, "failures", ()) if failed.key == key]
        return outcome, receipt["state"], account["charged"], stored[0] if stored else None


@pytest.fixture
def _own_registry() -> Iterator[None]:
    with registry.isolated():
        yield


@pytest.fixture
async def database(database_url: str, _own_registry: None) -> AsyncIterator[Database]:
    found = await Database.connect(database_url, schema=SCHEMA, server_settings=SERVER_SETTINGS)
    await found.migrate("rowmill_receipt_store")
    yield found
    await found.close()


def once(wrong: Talk) -> Talk:
    """``wrong`` at first, a good answer from then on."""
    talks = iter([wrong])

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        await next(talks, says(200, b'{"email":"a@example"}'))(reader, writer, request)

    return talk


@pytest.mark.parametrize("line", TABLE, ids=[line[0].replace(" ", "-") for line in TABLE])
async def test_what_happened_and_what_follows(database: Database, line: Any) -> None:
    await asyncio.gather(*(_follows(Rig(RealStore(database), database), line, effect) for effect in EFFECTS))


async def _follows(rig: Rig, line: Any, effect: str) -> None:
    what, provider, all_follow, charged, category, code = line
    follows = all_follow[EFFECTS.index(effect)]
    server = Server()
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    opening: list[asyncio.Task[None]] = []
    server.talk = once(provider) if callable(provider) else says(200, b'{"email":"a@example"}')
    if provider is REFUSES:
        opening.append(asyncio.create_task(_once_it_failed(rig, lambda: server.start(at=bound))))
    else:
        await server.start(at=bound)
        server.unread = provider is RESETS
    if server.unread:
        opening.append(asyncio.create_task(_once_it_failed(rig, lambda: _read_from_now_on(server))))
    if what.endswith("then a new credential"):
        refuse = server.talk

        async def renew(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
            rig.environ["KEY"] = "the-next-credential"
            await refuse(reader, writer, request)

        server.talk = renew
    outcome, receipt, account, failure = await rig.call(url, effect)
    await asyncio.gather(*opening)
    await server.stop()
    bound.close()

    once_or_not = COST if charged else Decimal(0)
    expected = {
        REPEATS: ("completed", "completed", once_or_not + COST),
        FAILS: ("failed", "failed", once_or_not),
        UNKNOWN: ("unknown", "outcome_unknown", COST),
        WAITS: ("deferred", "released", once_or_not),
        RUN_WAITS: ("halted", "released", Decimal(0)),
    }[follows]
    assert (outcome.outcome, receipt, account) == expected, f"{what}, {effect}"
    tool = failure.tool.removesuffix(".find")  # type: ignore[union-attr]
    seen = msgspec.structs.asdict(failure)  # type: ignore[arg-type]
    assert (seen["category"], seen["code"], seen["provider"], seen["origin"]) == (category, code, tool, "provider")
    assert seen["retryable"] is (follows in {REPEATS, WAITS, RUN_WAITS} and category != "auth")
    assert seen["message"]
    assert "credential" not in seen["message"]
    answered = code.startswith("http_") or code == "payment"
    assert (seen["status"] is not None, seen["request_id"]) == (answered, "req-7" if answered else None)
    assert seen["retry_after"] == (7.0 if "Retry-After" in what else None)
    if answered and code != "payment":
        assert seen["status"] == int(code.removeprefix("http_"))
    if follows == WAITS:
        assert outcome.wait_ms >= (7000 if "Retry-After" in what else 1000)
    if follows == RUN_WAITS:
        assert outcome.reason.startswith(f"payment: provider {tool} answered {seen['status']}")
    if follows != REPEATS and provider not in {REFUSES, RESETS}:
        assert len(server.requests) == 1


async def _once_it_failed(rig: Rig, act: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(30):
        while not rig.bus.failures:
            await asyncio.sleep(0.001)
    await act()


async def _read_from_now_on(server: Server) -> None:
    server.unread = False


async def test_a_failure_that_repeats_fails_after_five_tries_each_of_them_charged(database: Database) -> None:
    rig = Rig(RealStore(database), database)
    server = Server()
    server.talk = says(500)
    await server.start()
    outcome, receipt, account, _ = await rig.call(server.url, "read")
    await server.stop()
    assert (outcome.outcome, receipt, account, len(server.requests)) == ("failed", "failed", 5 * COST, 5)
