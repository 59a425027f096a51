"""The HTTP client of blocking tool functions: threads ask, the loop sends, over the client that other functions of the provider use.

So a thread's requests have the same credential, connections, bounds and right to send as everyone's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import httpx

from rowmill_tool_gateway.http_port import may_send_here, not_sent
from rowmill_tool_gateway.rights import Right

OF_THE_LOOP = frozenset({"content-length", "transfer-encoding"})
"""Headers about how a body came, which the thread gets whole."""


def blocking_client(client: httpx.AsyncClient) -> httpx.Client:
    """A client for threads beside the running loop, whose requests ``client`` sends: base URL, headers and credential are that one's."""
    return httpx.Client(
        transport=_ThroughTheLoop(client, asyncio.get_running_loop()),
        base_url=client.base_url,
        headers=client.headers,
        timeout=None,  # noqa: S113 - the call's own limit ends it
        trust_env=False,
    )


class _ThroughTheLoop(httpx.BaseTransport):
    def __init__(self, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._thread = threading.get_ident()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if threading.get_ident() == self._thread:
            raise RuntimeError("call.blocking_http would stop the gateway: declare the function with blocking=True, or await call.http")
        right = may_send_here.get()
        if isinstance(right, Right) and right.over:
            raise not_sent()
        content = request.read()
        carried = httpx.Request(request.method, request.url, headers=request.headers, content=content, extensions=request.extensions)
        under_way = asyncio.run_coroutine_threadsafe(self._client.send(carried), self._loop)
        if isinstance(right, Right):
            right.carries(under_way)
        try:
            response = under_way.result()
        except concurrent.futures.CancelledError as error:
            raise httpx.ReadTimeout("the time of the call is over", request=request) from error
        headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in OF_THE_LOOP]
        return httpx.Response(response.status_code, headers=headers, content=response.content)
