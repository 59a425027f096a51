"""The HTTP port without layers: HTTP/1.1 on kept connections, one request on each at a time.

Declared tools send small JSON requests by the thousand; a general client spends three times as much on each as all the rest of the gateway (measured
by tests/bench/gateway_micro.py). What is not needed here is not here: redirects, cookies, proxies, HTTP/2, streaming.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

from rowmill.errors import DefinitionError
from rowmill_tool_gateway.body_budget import BodyBudget, BodyShare
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseParser, ResponseTooLarge
from rowmill_tool_gateway.http_port import KEPT_URLS, HttpRequest, HttpResponse, MaySend, NoResponse, NoResponseKind, always, not_sent
from rowmill_tool_gateway.routes import Routes

KEEP_SECONDS: Final = 15.0
"""How long an unused connection is kept; servers close theirs later than this, so that few are lost at the moment of their use."""
_TARGET = re.compile(r"[!-~]+\Z")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect", "upgrade", "te", "accept-encoding"})
"""Headers that say how a request is framed; they are set here and nowhere else."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a URL leads. ``host_line``: the header that names it."""

    host: str
    port: int
    secure: bool
    target: str
    host_line: str


class _Connection(asyncio.Protocol):
    """One connection, carrying one exchange at a time. After each, `closed` says whether it can carry another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, body_stall: float, body_limit: int, budget: BodyBudget) -> None:
        self.closed = False
        self.idle_since = 0.0
        self._loop = loop
        self._body_stall = body_stall
        self._body_limit = body_limit
        self._budget = budget
        self._share: BodyShare | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._stall: asyncio.TimerHandle | None = None

    async def exchange(self, data: bytes, method: str, timeout: float, late: str) -> HttpResponse:
        """Send a request and wait for its whole answer, for ``timeout`` seconds, else say that it is ``late``. Raises `NoResponse`."""
        self._parser = parser = ResponseParser(method, self._body_limit)
        answer: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._answer = answer
        limit = self._loop.call_later(timeout, self._fail, "no_answer", late)
        if self.closed or self._transport is None:
            self._fail("never_opened", "the connection was lost before anything was sent")
        else:
            self._transport.write(data)
        try:
            return await answer
        finally:
            limit.cancel()
            self._silence_ends()
            if self._share is not None:
                self._share.done()
                self._share = None
            self._parser = self._answer = None
            if not (parser.complete and parser.reusable):
                self.close()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        parser, answer = self._parser, self._answer
        if parser is None or answer is None or answer.done():
            self.close()  # nobody asked
            return
        try:
            parser.feed(data)
            if parser.complete:
                answer.set_result(HttpResponse(parser.status, parser.body(), parser.headers))
            elif parser.in_body:
                self._read_on_if_there_is_room(parser)
        except BadResponse as error:
            self._fail("bad_answer", str(error))
        except ResponseTooLarge as error:
            self._fail("too_large", str(error))

    def _read_on_if_there_is_room(self, parser: ResponseParser) -> None:
        """The rest of the body is still to come: wait for it, or, while others hold the budget, leave it where it is."""
        self._silence_ends()
        if self._share is None:
            self._share = self._budget.share(self._read_on)
        if self._share.want(parser.size, parser.announced):
            self._silence_begins()
        elif self._transport is not None:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.resume_reading()
            self._silence_begins()

    def _silence_begins(self) -> None:
        self._stall = self._loop.call_later(self._body_stall, self._fail, "bad_answer", f"the answer stalled for {self._body_stall:g} s")

    def _silence_ends(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        parser, answer = self._parser, self._answer
        if parser is None or answer is None or answer.done():
            return
        if not parser.started:
            self._fail("no_answer", "the connection was lost before the answer" + (f": {error}" if error else ""))
            return
        try:
            parser.end()
            answer.set_result(HttpResponse(parser.status, parser.body(), parser.headers))
        except BadResponse as broken:
            self._fail("bad_answer", str(broken))
        except ResponseTooLarge as large:
            self._fail("too_large", str(large))

    def _fail(self, kind: NoResponseKind, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoResponse(kind, message))


class DirectPort:
    """Connections are kept per provider and origin, the newest used first. How many are open is the lanes' business. ``budget``: shared with whoever
    else reads bodies; by default its own. ``routes``: what was declared of providers' connections.
    """

    def __init__(
        self, *, connect_timeout: float, body_stall: float, body_limit: int, budget: BodyBudget | None = None, routes: Routes | None = None
    ) -> None:
        self._connect_timeout = connect_timeout
        self._body_stall = body_stall
        self._body_limit = body_limit
        self._budget = budget or BodyBudget(2 * body_limit, body_limit)
        self._idle: dict[tuple[str, str, int, bool], list[_Connection]] = {}
        self._places: dict[str, _Place] = {}
        self._names: set[tuple[str, ...]] = set()
        self._routes = routes or Routes()
        self._gates: dict[str, asyncio.Semaphore] = {}

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        most = self._routes.connections(request.pool)
        if most is None:
            return await self._send(request, may_send, request.timeout)
        gate = self._gates.setdefault(request.pool, asyncio.Semaphore(most))
        ends = asyncio.get_running_loop().time() + request.timeout
        try:
            async with asyncio.timeout(request.timeout):
                await gate.acquire()
        except TimeoutError as error:
            raise NoResponse("never_opened", f"none of the {most} connections to {request.pool} was free within {request.timeout:g} s") from error
        try:
            return await self._send(request, may_send, ends - asyncio.get_running_loop().time())
        finally:
            gate.release()

    async def _send(self, request: HttpRequest, may_send: MaySend, timeout: float) -> HttpResponse:
        try:
            place = self._place(request.url)
            data = self._encoded(request, place)
        except ValueError as error:
            raise NoResponse("misdefined", f"the request cannot be sent: {error}") from error
        loop = asyncio.get_running_loop()
        key = (request.pool, place.host, place.port, place.secure)
        idle = self._idle.setdefault(key, [])
        connection = None if request.fresh else _still_open(idle, loop.time())
        if connection is None:
            started = loop.time()
            connection = await self._open(loop, place, request.pool, timeout)
            timeout -= loop.time() - started
        try:
            if not may_send():  # nothing is awaited from here to the first byte
                raise not_sent()
            return await connection.exchange(data, request.method, timeout, f"no answer within {request.timeout:g} s")
        finally:
            if request.fresh:
                connection.close()
            elif not connection.closed:
                connection.idle_since = loop.time()
                idle.append(connection)

    async def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    async def _open(self, loop: asyncio.AbstractEventLoop, place: _Place, pool: str, timeout: float) -> _Connection:
        try:
            secure: dict[str, Any] = {"ssl": self._routes.tls(pool), "server_hostname": place.host} if place.secure else {}
        except DefinitionError as error:
            raise NoResponse("misdefined", str(error)) from error
        try:
            async with asyncio.timeout(min(self._connect_timeout, timeout)):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._body_stall, self._body_limit, self._budget), place.host, place.port, **secure
                )
        except TimeoutError as error:
            raise NoResponse("never_opened", f"no connection to {place.host}:{place.port} in time") from error
        except (OSError, ValueError) as error:  # refused, unknown name, no trust in its certificate
            raise NoResponse("never_opened", f"no connection to {place.host}:{place.port}: {error}") from error
        return connection

    def _place(self, url: str) -> _Place:
        place = self._places.get(url)
        if place is None:
            if len(self._places) >= KEPT_URLS:
                self._places.clear()
            place = self._places[url] = _place_of(url)
        return place

    def _encoded(self, request: HttpRequest, place: _Place) -> bytes:
        """The request's bytes. Raises `ValueError` for headers that would change how it is read."""
        names = tuple(request.headers)
        if names not in self._names:
            for name in names:
                if _TOKEN.match(name) is None or name.lower() in _OURS:
                    raise ValueError(f"header {name!r} cannot be set")
            self._names.add(names)
        body = request.body
        lines = [
            f"{request.method} {place.target} HTTP/1.1",
            place.host_line,
            "Accept-Encoding: gzip, deflate",
            *[f"{name}: {value}" for name, value in request.headers.items()],
        ]
        if body is not None or request.method in {"POST", "PUT", "PATCH"}:
            lines.append(f"Content-Length: {len(body or b'')}")
        lines.append("\r\n")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) or head.count("\r") != len(lines) or "\0" in head:
            raise ValueError("a header value holds a line break")
        return head.encode("latin-1") + (body or b"")


def _still_open(idle: list[_Connection], now: float) -> _Connection | None:
    """The connection that was used last, if any can be used; those that waited too long are closed."""
    while idle:
        connection = idle.pop()
        if not connection.closed and now - connection.idle_since < KEEP_SECONDS:
            return connection
        connection.close()
    return None


def _place_of(url: str) -> _Place:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"{url!r} is no http or https URL")
    secure = parts.scheme == "https"
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode("ascii")
    port = parts.port or (443 if secure else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if _TARGET.match(target) is None:
        raise ValueError(f"{url!r} holds characters that must be quoted")
    named = f"[{host}]" if ":" in host else host
    return _Place(host, port, secure, target, f"Host: {named}:{parts.port}" if parts.port else f"Host: {named}")
