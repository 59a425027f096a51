"""A provider on a real socket that answers, or fails to, as a test says: bytes, not HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Reads one request after the other and lets ``talk`` answer; a connection is closed when ``talk`` closes it."""

    def __init__(self) -> None:
        self.talk: Talk = saying(FINE)
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.port = 0
        self.unread = False
        """Reset each connection when its first byte is there, and read no request."""
        self._server: asyncio.Server | None = None
        self._talking: set[asyncio.Task[None]] = set()

    async def start(self, context: ssl.SSLContext | None = None, *, at: socket.socket | None = None) -> None:
        """Listen, with TLS where there is a ``context``; on a socket that is bound already where one is given."""
        place: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if at is None else {"sock": at}
        self._server = await asyncio.start_server(self.serve, ssl=context, **place)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}" if context is None else f"https://localhost:{self.port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._talking:
            task.cancel()
        await asyncio.gather(*self._talking, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        self.connections += 1
        try:
            if self.unread:
                await reader.readexactly(1)
                reset(writer)
                return
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
                self.requests.append(head + await reader.readexactly(length))
                await self.talk(reader, writer, self.requests[-1])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._talking.discard(task)


def saying(*parts: bytes, close: bool = False, abort: bool = False) -> Talk:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if abort:
            writer.transport.abort()
        if close:
            writer.close()

    return talk


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a RST."""
    found: socket.socket = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
