"""Just enough HTTP/1.1 for a provider on loopback: bodies with Content-Length, connections kept alive.

A web framework would spend several times more per request than answering takes, and on a small machine that time is missing from what is
being watched or measured. Clients that need more (chunked request bodies, HTTP/2) get a plain refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

Reply = bytes | None
"""A whole response, or None: cut the connection without one."""


@dataclass(slots=True)
class Request:
    """One request; `head` is its request line and headers as received."""

    method: str
    path: str
    query: str
    head: bytes
    body: bytes

    def header(self, name: bytes) -> str | None:
        """The value of the header of this lower-case name."""
        start = self.head.lower().find(b"\r\n" + name + b":")
        if start < 0:
            return None
        start += len(name) + 3
        end = self.head.find(b"\r\n", start)
        return self.head[start : end if end >= 0 else None].strip().decode("latin-1")

    def headers(self) -> dict[str, str]:
        """All headers."""
        pairs = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        return {name.decode("latin-1"): value.strip().decode("latin-1") for name, _, value in pairs}


Handler = Callable[[Request], Reply | Coroutine[None, None, Reply]]

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def respond(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    """A JSON response."""
    if status == 200 and not headers:
        return _OK % (len(body), body)
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    named = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status} {phrase}\r\n{lines}\r\n".encode("latin-1") + body


class HttpServer:
    """Hands requests to `handler`: its answer is sent at once, or when its coroutine is done."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[asyncio.Transport] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen on 127.0.0.1 (port 0: a free one); the port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", port, backlog=1024)
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def stop(self) -> None:
        """Let answers that are on their way finish for a second, then close everything."""
        if self._server is None:
            return
        self._server.close()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=1)
        for task in self.tasks:
            task.cancel()
        for transport in list(self.connections):
            transport.close()
        await asyncio.sleep(0)  # connections hear that they are closed
        await self._server.wait_closed()
        self._server = None


class _Connection(asyncio.Protocol):
    """One client. It has at most one request in hand; what it sends meanwhile waits in the buffer."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._buffer = b""
        self._busy = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - named by asyncio
        if self._transport is not None:
            self._server.connections.discard(self._transport)
            self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._busy and (request := self._next_request()) is not None:
            answer = self._server.handler(request)
            if answer is None or isinstance(answer, bytes):
                self._send(request, answer)
            else:
                self._busy = True
                task = asyncio.get_running_loop().create_task(self._send_later(request, answer))
                self._server.tasks.add(task)
                task.add_done_callback(self._server.tasks.discard)

    def _next_request(self) -> Request | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._buffer[:end]
        method, target, _ = head[: head.find(b"\r\n") if b"\r\n" in head else end].decode("latin-1").split(" ", 2)
        path, _, query = target.partition("?")
        request = Request(method, path, query, head, b"")
        length = request.header(b"content-length")
        if length is None and request.header(b"transfer-encoding") is not None:
            self._send(request, respond(b'{"error":"send a Content-Length"}', 411, {"Connection": "close"}))
            self._close()
            return None
        stop = end + 4 + int(length or 0)
        if len(self._buffer) < stop:
            return None
        request.body = self._buffer[end + 4 : stop]
        self._buffer = self._buffer[stop:]
        return request

    def _send(self, request: Request, answer: Reply) -> None:
        if self._transport is None:
            return
        if answer is None:
            self._transport.abort()
            return
        self._transport.write(answer)
        if (request.header(b"connection") or "").lower() == "close":
            self._close()

    async def _send_later(self, request: Request, answer: Coroutine[None, None, Reply]) -> None:
        self._send(request, await answer)
        self._busy = False
        self.data_received(b"")

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
