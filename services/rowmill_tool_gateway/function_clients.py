"""The HTTP clients that tool functions are given: httpx, over the connections that declared tools use too.

What such a client adds: the provider's credential, for its own origin alone; the bounds of every response body; and errors that say truly whether
anything was sent, since a non_idempotent call may be repeated only where nothing was.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rowmill.providers import Provider, is_loopback
from rowmill_tool_gateway.blocking_clients import blocking_client
from rowmill_tool_gateway.bodies import Bounds, pieces_of, whole_body
from rowmill_tool_gateway.credentials import Credentials, Redactor, SecretMisplaced
from rowmill_tool_gateway.http_library import NEVER_OPENED, LibraryPort, writes_to_provider
from rowmill_tool_gateway.http_parsing import unfolded_body
from rowmill_tool_gateway.http_port import may_send_here, not_sent
from rowmill_tool_gateway.rights import Right
from rowmill_tool_gateway.routes import Routes

_NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientSSLError)

__all__ = ["NEVER_OPENED", "Clients"]


class Sessions(Protocol):
    """Where a provider's connections are kept."""

    bounds: Bounds

    def session(self, pool: str, *, fresh: bool = False) -> aiohttp.ClientSession: ...


class Clients:
    """One client per provider. ``library``: transports of the providers that declare HTTP/2 or a proxy."""

    def __init__(self, sessions: Sessions, credentials: Credentials, library: LibraryPort | None = None, routes: Routes | None = None) -> None:
        self._sessions = sessions
        self._credentials = credentials
        self._library = library
        self._routes = routes or Routes()
        self._clients: dict[tuple[str, bool], httpx.AsyncClient] = {}
        self._blocking: dict[httpx.AsyncClient, httpx.Client] = {}

    def client(self, provider: Provider, *, fresh: bool) -> httpx.AsyncClient:
        """Never follows redirects, has no timeout of its own (the call's counts), reads no proxy settings. Raises `DefinitionError`."""
        client = self._clients.get((provider.name, fresh))
        if client is None:
            client = self._clients[provider.name, fresh] = httpx.AsyncClient(
                transport=_Bounded(self._transport(provider.name, fresh=fresh), self._sessions.bounds, self._credentials.redactor),
                base_url=provider.base_url,
                headers={"Accept-Encoding": "gzip, deflate", **provider.headers},
                auth=_ProviderAuth(provider, self._credentials),
                timeout=None,  # noqa: S113 - the call's own limit ends it
                trust_env=False,
            )
        return client

    def blocking(self, client: httpx.AsyncClient) -> httpx.Client:
        """``client`` for threads beside this loop, which carries out what they ask for."""
        made = self._blocking.get(client)
        if made is None:
            made = self._blocking[client] = blocking_client(client)
        return made

    def _transport(self, provider: str, *, fresh: bool) -> httpx.AsyncBaseTransport:
        if self._library is not None and self._routes.needs_library(provider):
            return _Asking(self._library.transport(provider, fresh=fresh))
        self._sessions.session(provider, fresh=fresh)  # its TLS files are read now, not within the author's code
        return AiohttpTransport(client=lambda: self._sessions.session(provider, fresh=fresh), trust_env=False)

    def forget(self) -> None:
        """Drop the clients; their connections belong to the ports, which are closed where they are kept."""
        self._clients.clear()
        self._blocking.clear()


class _ProviderAuth(httpx.Auth):
    """Adds the credential to requests to the provider's own origin, and to no other: an author's absolute URL must not carry it away."""

    def __init__(self, provider: Provider, credentials: Credentials) -> None:
        self._provider = provider
        self._credentials = credentials
        self._origin = _origin(httpx.URL(provider.base_url))

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        if _origin(request.url) == self._origin:
            for name, value in (await self._credentials.headers(self._provider)).items():
                request.headers[name] = value
        yield request


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


class _Asking(httpx.AsyncBaseTransport):
    """Asks `may_send_here` right before a request is written, as the sessions of aiohttp do by themselves."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        may_send = may_send_here.get()

        async def trace(event: str, facts: dict[str, Any]) -> None:
            if writes_to_provider(event, facts) and not may_send():
                raise not_sent()

        request.extensions = {**request.extensions, "trace": trace}
        return await self._transport.handle_async_request(request)


class _Bounded(httpx.AsyncBaseTransport):
    """Bounds what is read of each response, tells a connection that never opened from one that was lost, and lets no secret out where others
    would read it.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, bounds: Bounds, redactor: Redactor) -> None:
        self._transport = transport
        self._bounds = bounds
        self._redactor = redactor

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._redactor.holds(str(request.url).encode()):
            raise SecretMisplaced("a request's URL holds the value of a secret; URLs stand in logs everywhere, so send it in a header")
        in_clear = request.url.scheme != "https" and not is_loopback(request.url.host)
        if in_clear and any(self._redactor.holds(value) for _, value in request.headers.raw):
            raise SecretMisplaced(f"a header of a request to {request.url.host} holds the value of a secret, which is sent only over https")
        right = may_send_here.get()
        if not isinstance(right, Right):
            return await self._sent(request)
        right.asking += 1
        try:
            return await self._sent(request)
        except NEVER_OPENED as error:
            right.unopened.append(error)
            raise
        finally:
            right.asking -= 1

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._transport.handle_async_request(request)
        except NEVER_OPENED as error:
            # httpx-aiohttp calls every lost connection one that timed out while it was opened, whatever had been sent on it.
            if not isinstance(error.__cause__, aiohttp.ClientConnectionError):
                raise
            truly = httpx.ConnectError if isinstance(error.__cause__, _NO_CONNECTION) else httpx.ReadError
            raise truly(f"{type(error.__cause__).__name__}: {error}") from error.__cause__
        encoding = response.headers.pop("Content-Encoding", "")
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - of an async transport
        response.stream = _Stream(response.stream, response.headers.get("Content-Length"), encoding, self._bounds)
        return response

    async def aclose(self) -> None:
        """The connections belong to the ports."""


class _Stream(httpx.AsyncByteStream):
    """A body within its bounds; one that came compressed is unfolded here, where what it unfolds to is bounded too."""

    def __init__(self, stream: httpx.AsyncByteStream, length: str | None, encoding: str, bounds: Bounds) -> None:
        self._stream = stream
        self._announced = int(length) if length is not None and length.isascii() and length.isdigit() else None
        self._encoding = encoding
        self._bounds = bounds
        self._pieces: AsyncGenerator[bytes, None] | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        source = aiter(self._stream)
        if self._encoding.strip().lower() in {"", "identity"}:
            self._pieces = pieces_of(source, self._announced, self._bounds)
            async for piece in self._pieces:
                yield piece
        else:
            yield unfolded_body(await whole_body(source, self._announced, self._bounds), self._encoding, self._bounds.limit)

    async def aclose(self) -> None:
        if self._pieces is not None:
            await self._pieces.aclose()  # gives back what the body holds of the budget, if the author did not read it to its end
        await self._stream.aclose()
