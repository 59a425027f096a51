"""A small local stand-in for the three paid providers of the leads example.

It answers like hunter (`/v2/find`, `/v2/bulk`), apollo (`/match`) and crm (`/score`), always the same for the same domain, and keeps the
books that a provider would bill by: requests, items, and effects per idempotency key. It misbehaves on demand (429 with Retry-After,
500s, answers dropped after the effect, held answers), at start by its options and at run time through `POST /_control`.

    python provider.py --port 8799 --latency-ms 20 --rate-limit 50 --fail-rate 0.01 --drop-rate 0.001

Tests use `LeadsProvider` inside their own loop or `ProviderProcess` as a process of its own. It listens on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import signal
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from provider_books import Control, Drop, Ledger, Misbehaviour, RateWindow
from provider_http import HttpServer, Reply, Request, respond

OWNERS = {"/v2/find": "hunter", "/v2/bulk": "hunter", "/match": "apollo", "/score": "crm", "/echo": "echo"}

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def _chance(provider: str, domain: str) -> int:
    """A number from 0 to 99 that depends on nothing but its arguments."""
    return zlib.crc32(f"{provider}:{domain}".encode()) % 100


def hunter_answer(domain: str) -> dict[str, Any]:
    """Hunter knows 60 of 100 domains, and spells its answer in one of two ways."""
    chance = _chance("hunter", domain)
    if chance >= 60:
        return {"email": None}
    if chance % 2:
        return {"email": f"hello@{domain}"}
    return {"data": {"emails": [{"value": f"hello@{domain}"}]}}


def apollo_answer(domain: str) -> dict[str, Any]:
    """Apollo knows every second domain."""
    return {"email": f"team@{domain}" if _chance("apollo", domain) < 50 else None}


def crm_score(domain: str) -> int:
    """Crm scores every domain from 0 to 99."""
    return _chance("crm", domain)


class LeadsProvider:
    """The provider inside the caller's event loop: `async with LeadsProvider() as provider: provider.url`."""

    def __init__(
        self,
        *,
        latency_ms: float = 0.0,
        rate_limit: float | None = None,
        fail_rate: float = 0.0,
        drop_rate: float = 0.0,
        honour_keys: bool = True,
        seed: int = 0,
    ) -> None:
        self.latency_ms = latency_ms
        self.rate_limit = rate_limit
        self.fail_rate = fail_rate
        self.drop_rate = drop_rate
        self.honour_keys = honour_keys
        self.ledger = Ledger()
        self.url = ""
        self._seed = seed
        self._dice = random.Random(seed)
        self._windows = {owner: RateWindow() for owner in OWNERS.values()}
        self._orders: list[Misbehaviour | Drop] = []
        self._answers_flow = asyncio.Event()
        self._answers_flow.set()
        self._server = HttpServer(self._handle)
        self._operations: dict[str, Callable[[Request], bytes]] = {
            "/_stats": self._stats,
            "/_control": self._control,
            "/_reset": self._reset,
        }

    # Life

    async def start(self, port: int = 0) -> str:
        """Listen on 127.0.0.1 (port 0: a free one); the base URL."""
        self.url = f"http://127.0.0.1:{await self._server.start(port)}"
        return self.url

    async def stop(self) -> None:
        """Let held answers go, then close."""
        self._answers_flow.set()
        await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    # Books and orders

    def stats(self, *, brief: bool = False) -> dict[str, Any]:
        """What `GET /_stats` answers."""
        return self.ledger.snapshot(brief=brief)

    def control(self, order: Control) -> None:
        """What `POST /_control` does."""
        for name in ("latency_ms", "rate_limit", "fail_rate", "drop_rate", "honour_keys"):
            value = getattr(order, name)
            if value is not msgspec.UNSET:
                setattr(self, name, value)
        if order.hold is True:
            self._answers_flow.clear()
        elif order.hold is False:
            self._answers_flow.set()
        if order.reply_429 is not None:
            order.reply_429.status = 429
        if order.reply_500 is not None:
            order.reply_500.status = 500
        self._orders += [given for given in (order.reply, order.reply_429, order.reply_500, order.drop) if given is not None]

    def reset(self) -> None:
        """Forget what was counted and what was ordered; options given at the start or by control stay."""
        flying = self.ledger.in_flight
        self.ledger = Ledger()
        self.ledger.in_flight = flying
        self._orders.clear()
        self._dice = random.Random(self._seed)
        self._windows = {owner: RateWindow() for owner in OWNERS.values()}
        self._answers_flow.set()

    # Requests

    def _handle(self, request: Request) -> Reply | Coroutine[None, None, Reply]:
        path = request.path
        owner = OWNERS.get(path)
        if owner is None:
            operation = self._operations.get(path)
            return operation(request) if operation else _json({"error": f"no such path: {path}"}, 404)
        ledger = self.ledger
        ledger.requests[path] += 1
        in_flight = ledger.in_flight[owner] = ledger.in_flight[owner] + 1
        ledger.in_flight_max[owner] = max(ledger.in_flight_max[owner], in_flight)
        status, reply = self._answer(request, path, owner)
        if self.latency_ms or not self._answers_flow.is_set():
            return self._later(owner, status, reply)
        self._sent(owner, status)
        return reply

    async def _later(self, owner: str, status: int, reply: Reply) -> Reply:
        try:
            if self.latency_ms:
                await asyncio.sleep(self.latency_ms / 1000)
            await self._answers_flow.wait()
        finally:
            self._sent(owner, status)
        return reply

    def _sent(self, owner: str, status: int) -> None:
        self.ledger.in_flight[owner] -= 1
        if status:
            self.ledger.replies[status] += 1
        else:
            self.ledger.dropped += 1

    def _answer(self, request: Request, path: str, owner: str) -> tuple[int, Reply]:
        """Status (0: none, the connection is cut) and response of a request, whose effects are booked."""
        now = asyncio.get_running_loop().time()
        window = self._windows[owner]
        arrived = window.arrive(now)
        self.ledger.peak_per_second[owner] = max(self.ledger.peak_per_second[owner], arrived)
        order = self._next_order(path) if self._orders or self.fail_rate or self.drop_rate else None
        if order is None and self.rate_limit is not None and (wait := window.refuse(now, self.rate_limit)) is not None:
            return 429, _json({"error": "rate limit"}, 429, {"Retry-After": str(math.ceil(wait))})
        answer = b""
        if order is None or order.effect:
            try:
                answer = self._carry_out(request, path, owner)
            except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
                return 400, _json({"error": f"malformed request: {error!r}"}, 400)
        if isinstance(order, Drop):
            return 0, None
        if order is not None:
            headers = {} if order.retry_after is None else {"Retry-After": f"{order.retry_after}"}
            body = order.body.encode() if order.body is not None else b'{"error":"ordered"}'
            return order.status, respond(body, order.status, headers)
        return 200, respond(answer)

    def _next_order(self, path: str) -> Misbehaviour | Drop | None:
        """What this request meets instead of its answer: what was ordered first, else what the rates say."""
        for order in self._orders:
            if order.path is None or order.path == path:
                order.count -= 1
                if order.count <= 0:
                    self._orders.remove(order)
                return order
        if self.fail_rate and self._dice.random() < self.fail_rate:
            return Misbehaviour(status=500)
        if self.drop_rate and self._dice.random() < self.drop_rate:
            return Drop()
        return None

    def _carry_out(self, request: Request, path: str, owner: str) -> bytes:
        """Book the effects of a request and give its answer."""
        book, honour = self.ledger.book, self.honour_keys
        key = request.header(b"idempotency-key")
        if path == "/echo":
            text = request.body.decode(errors="replace")
            book(path, owner, text, key, honour_keys=honour)
            return _encode({"method": request.method, "headers": request.headers(), "query": request.query, "body": text})
        asked = _decode(request.body)
        if path in {"/v2/find", "/match"}:
            domain = asked["domain"]
            book(path, owner, domain, key, honour_keys=honour)
            return _encode(hunter_answer(domain) if owner == "hunter" else apollo_answer(domain))
        items = asked["items"] if owner == "hunter" else asked
        answers = [hunter_answer(item["domain"]) if owner == "hunter" else crm_score(item["domain"]) for item in items]
        for item in items:
            book(path, owner, item["domain"], item.get("key"), honour_keys=honour)
        return _encode({"results": answers} if owner == "hunter" else answers)

    # Operations

    def _stats(self, request: Request) -> bytes:
        return _json(self.stats(brief="brief" in request.query))

    def _control(self, request: Request) -> bytes:
        try:
            self.control(msgspec.json.decode(request.body, type=Control))
        except msgspec.DecodeError as error:
            return _json({"error": str(error)}, 400)
        return _json({"ok": True})

    def _reset(self, _: Request) -> bytes:
        self.reset()
        return _json({"ok": True})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    return respond(_encode(value), status, headers)


class ProviderProcess:
    """The provider as a process of its own: `with ProviderProcess("--latency-ms", "20") as provider: provider.url`."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self._command = [sys.executable, str(Path(__file__).resolve()), "--port", str(port), *options]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            self.__exit__(None, None, None)
            raise RuntimeError(f"the provider did not start: {line!r}")
        self.url = line.split()[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def stats(self, *, brief: bool = False) -> dict[str, Any]:
        stats: dict[str, Any] = self._ask("/_stats?brief" if brief else "/_stats", None)
        return stats

    def control(self, **order: Any) -> None:
        self._ask("/_control", _encode(order))

    def reset(self) -> None:
        self._ask("/_reset", b"")

    def _ask(self, path: str, body: bytes | None) -> Any:
        with urllib.request.urlopen(self.url + path, body, timeout=10) as answer:  # noqa: S310 - our own loopback address
            return _decode(answer.read())


async def _serve(options: argparse.Namespace) -> None:
    provider = LeadsProvider(latency_ms=options.latency_ms, rate_limit=options.rate_limit, fail_rate=options.fail_rate, drop_rate=options.drop_rate)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(f"ready {await provider.start(options.port)}", flush=True)
    await stopped.wait()
    await provider.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8799, help="0 picks a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--rate-limit", type=float, help="requests per second for each provider; above it: 429 with Retry-After")
    parser.add_argument("--fail-rate", type=float, default=0.0, help="share of requests answered with 500, without an effect")
    parser.add_argument("--drop-rate", type=float, default=0.0, help="share of requests whose answer is lost after the effect")
    options = parser.parse_args()
    with contextlib.suppress(ImportError):  # as fast as it goes where uvloop is installed
        import uvloop  # noqa: PLC0415

        uvloop.run(_serve(options))
        return
    asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
