"""One request, one answer: the port to providers for declared HTTP tools, and its implementation by aiohttp.

Owns connections, redirects (never followed), time limits and the size limit of bodies. What an answer means is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

from rowmill.errors import DefinitionError, RowmillError
from rowmill_tool_gateway.bodies import Bounds, whole_body
from rowmill_tool_gateway.body_budget import SMALL, BodyBudget
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseTooLarge
from rowmill_tool_gateway.routes import Routes

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

KEPT_URLS = 10_000
"""Parsed URLs that are kept; tools with the same URL for every call are parsed once."""

MaySend = Callable[[], bool]
"""Whether the request may still be sent. Asked once, when the connection stands and nothing is written yet; what is refused is never written."""


class Asked:
    """``may_send``, and whether it was asked: before that nothing was written."""

    def __init__(self, may_send: MaySend) -> None:
        self.asked = False
        self._may_send = may_send

    def __call__(self) -> bool:
        self.asked = True
        return self._may_send()


def always() -> bool:
    """Nothing stands against sending."""
    return True


may_send_here: ContextVar[MaySend] = ContextVar("may_send_here", default=always)
"""What the sessions of `AiohttpPort` ask for a request that comes from this context."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """``pool``: whose connections to use (the provider's name). ``timeout``: seconds until the whole answer must be there. ``fresh``: open a
    new connection, since on a kept one it cannot be told whether a lost request was seen.
    """

    pool: str
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | None
    timeout: float
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """``headers`` are looked up without regard to case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


NoResponseKind = Literal["not_sent", "never_opened", "no_answer", "bad_answer", "too_large", "misdefined"]


class NoResponse(RowmillError):
    """A request that ended without a usable answer. ``kind`` says how, in the words of `failures.Observation`."""

    code = "no_response"

    def __init__(self, kind: NoResponseKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def not_sent() -> NoResponse:
    """The end of a request that was refused."""
    return NoResponse("not_sent", "the right to send ended before the request was written")


def no_answer_in_time(request: HttpRequest, right: Asked) -> NoResponse:
    """The end of a request whose time is over."""
    if right.asked:
        return NoResponse("no_answer", f"no answer within {request.timeout:g} s")
    return NoResponse("never_opened", f"no connection to the provider within {request.timeout:g} s")


class HttpPort(Protocol):
    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        """Send once, never again by itself, and only if ``may_send`` says so right before the first byte. Raises `NoResponse`."""

    async def close(self) -> None: ...


class _Connector(aiohttp.TCPConnector):
    """Hands a connection over to be written to only while `may_send_here` says so; else it is kept for another request."""

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        if not may_send_here.get()():
            connection.release()
            raise not_sent()
        return connection


class AiohttpPort:
    """One session per provider, with kept connections. How many requests are open is the lanes' business. ``budget``: as `DirectPort`'s."""

    def __init__(
        self, *, connect_timeout: float, body_stall: float, body_limit: int, budget: BodyBudget | None = None, routes: Routes | None = None
    ) -> None:
        self._connect_timeout = connect_timeout
        self._routes = routes or Routes()
        self.bounds = Bounds(body_limit, body_stall, budget or BodyBudget(2 * body_limit, body_limit))
        self._sessions: dict[tuple[str, bool], aiohttp.ClientSession] = {}
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._urls: dict[str, URL] = {}

    def session(self, pool: str, *, fresh: bool = False) -> aiohttp.ClientSession:
        """The provider's session, for clients that bring their own layer. Raises `DefinitionError` for TLS files that cannot be used."""
        session = self._sessions.get((pool, fresh))
        if session is None:
            life: dict[str, Any] = {"force_close": True} if fresh else {"keepalive_timeout": 30}
            connector = _Connector(limit=self._routes.connections(pool) or 0, ssl=self._routes.tls(pool), **life)
            session = self._sessions[pool, fresh] = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, headers={"User-Agent": "rowmill"}
            )
            session._retry_connection = False  # noqa: SLF001 - aiohttp would send a lost GET again by itself, and it may cost money
        return session

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        ends = asyncio.get_running_loop().time() + request.timeout
        right = Asked(may_send)
        asked = may_send_here.set(right)
        try:
            response = await self.session(request.pool, fresh=request.fresh).request(
                request.method,
                self._url(request.url),
                data=request.body,
                headers=request.headers,
                allow_redirects=False,
                timeout=self._timeout(request.timeout),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientSSLError) as error:
            raise NoResponse("never_opened", f"no connection to the provider: {error}") from error
        except TimeoutError as error:
            raise no_answer_in_time(request, right) from error
        except aiohttp.ClientResponseError as error:
            raise NoResponse("bad_answer", f"the answer is not HTTP: {error.message}") from error
        except (aiohttp.InvalidURL, ValueError, DefinitionError) as error:
            raise NoResponse("misdefined", f"the request cannot be sent: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoResponse("no_answer", f"the connection was lost before the answer: {type(error).__name__}: {error}") from error
        finally:
            may_send_here.reset(asked)
        try:
            async with asyncio.timeout_at(ends):  # aiohttp's own limit does not see that we wait for the budget
                return HttpResponse(response.status, await self._body(response), response.headers)
        except ResponseTooLarge as error:
            raise NoResponse("too_large", str(error)) from error
        except BadResponse as error:
            raise NoResponse("bad_answer", str(error)) from error
        except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError) as error:
            raise NoResponse("bad_answer", f"the answer broke off: {type(error).__name__}: {error}") from error
        finally:
            response.release()

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        announced = response.content_length if "Content-Encoding" not in response.headers else None  # what comes is unfolded already
        content = response.content
        if content.is_eof() and content.total_bytes <= SMALL:
            return content.read_nowait(-1)  # it came with the headers: the common case
        try:
            return await whole_body(aiter(content.iter_any()), announced, self.bounds)
        except BaseException:
            response.close()
            raise

    def _timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(seconds)
        if timeout is None:
            if len(self._timeouts) > 1000:
                self._timeouts.clear()
            timeout = self._timeouts[seconds] = aiohttp.ClientTimeout(total=seconds, sock_connect=self._connect_timeout)
        return timeout

    def _url(self, text: str) -> URL:
        url = self._urls.get(text)
        if url is None:
            if len(self._urls) > KEPT_URLS:
                self._urls.clear()
            url = self._urls[text] = URL(text, encoded=True)
        return url

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
