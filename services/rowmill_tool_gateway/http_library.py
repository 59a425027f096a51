"""The HTTP port for providers that declare HTTP/2 or a proxy: httpx's transports, without its client (no redirects, cookies or environment).

It costs several times what `http_direct` does for each call (docs/adr/0004-declared-tools-are-sent-without-a-client-library.md has figures), so only
those providers pay for it. A non_idempotent request goes over a connection of its own, which is HTTP/1.1: many requests on one connection
share its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from rowmill.errors import DefinitionError
from rowmill_tool_gateway.bodies import Bounds, pieces_of
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseTooLarge, unfolded_body
from rowmill_tool_gateway.http_port import Asked, HttpRequest, HttpResponse, MaySend, NoResponse, always, no_answer_in_time, not_sent
from rowmill_tool_gateway.routes import Routes

KEEP_SECONDS = 15.0
NEVER_OPENED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Nothing was sent to the provider; a proxy that refuses is one that did not open."""


def writes_to_provider(event: str, facts: Mapping[str, Any]) -> bool:
    """Whether this step of a transport is the first that writes to the provider. What asks a proxy for a way to it does not."""
    return event.endswith(".send_request_headers.started") and getattr(facts.get("request"), "method", b"") != b"CONNECT"


class LibraryPort:
    """One transport per provider, and another one for requests that want a connection of their own."""

    def __init__(self, routes: Routes, bounds: Bounds, *, connect_timeout: float) -> None:
        self._routes = routes
        self._bounds = bounds
        self._connect_timeout = connect_timeout
        self._transports: dict[tuple[str, bool], httpx.AsyncHTTPTransport] = {}

    def transport(self, provider: str, *, fresh: bool = False) -> httpx.AsyncHTTPTransport:
        """For clients that bring their own layer. Raises `DefinitionError` for TLS files that cannot be used."""
        made = self._transports.get((provider, fresh))
        if made is None:
            declared = self._routes.of(provider)
            http2 = declared is not None and declared.http2 and not fresh
            made = self._transports[provider, fresh] = httpx.AsyncHTTPTransport(
                verify=self._routes.tls(provider, http2=http2),
                http2=http2,
                proxy=None if declared is None else declared.proxy,
                trust_env=False,
                limits=httpx.Limits(
                    max_connections=self._routes.connections(provider),
                    max_keepalive_connections=0 if fresh else None,
                    keepalive_expiry=KEEP_SECONDS,
                ),
            )
        return made

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        right = Asked(may_send)
        try:
            async with asyncio.timeout(request.timeout):
                return await self._send(request, right)
        except TimeoutError as error:
            raise no_answer_in_time(request, right) from error
        except ResponseTooLarge as error:
            raise NoResponse("too_large", str(error)) from error
        except (BadResponse, httpx.DecodingError) as error:
            raise NoResponse("bad_answer", str(error)) from error
        except NEVER_OPENED as error:
            raise NoResponse("never_opened", f"no connection to the provider: {type(error).__name__}: {error}") from error
        except (DefinitionError, httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, ValueError) as error:
            raise NoResponse("misdefined", f"the request cannot be sent: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            raise NoResponse("no_answer", f"the connection was lost before the answer: {type(error).__name__}: {error}") from error

    async def _send(self, request: HttpRequest, may_send: MaySend) -> HttpResponse:
        async def trace(event: str, facts: dict[str, Any]) -> None:
            """Called by the transport at each of its steps."""
            if writes_to_provider(event, facts) and not may_send():
                raise not_sent()

        made = httpx.Request(
            request.method,
            request.url,
            headers={**request.headers, "Accept-Encoding": "gzip, deflate"},
            content=request.body,
            extensions={"timeout": {"connect": self._connect_timeout, "pool": request.timeout}, "trace": trace},
        )
        response = await self.transport(request.pool, fresh=request.fresh).handle_async_request(made)
        try:
            length = response.headers.get("Content-Length", "")
            announced = int(length) if length.isascii() and length.isdigit() and request.method != "HEAD" else None
            body = await self._body(response, announced)
        finally:
            await response.aclose()
        encoding = response.headers.get("Content-Encoding", "")
        return HttpResponse(response.status_code, unfolded_body(body, encoding, self._bounds.limit), response.headers)

    async def _body(self, response: httpx.Response, announced: int | None) -> bytes:
        try:
            return b"".join([piece async for piece in pieces_of(aiter(response.stream), announced, self._bounds)])  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise BadResponse(f"the answer broke off: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()
        self._transports.clear()
