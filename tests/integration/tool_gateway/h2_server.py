"""A provider that speaks HTTP/2, and a proxy that opens tunnels: as little of both as the tests need."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, WindowUpdated


class H2Server:
    """Answers every request with ``body``; one whose path is ``/reset`` by ending its stream. Counts connections and requests."""

    def __init__(self, body: bytes = b'{"email":"a@example"}') -> None:
        self.body = body
        self.connections = 0
        self.requests: list[dict[str, str]] = []
        self.port = 0
        self.open: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    async def start(self, context: ssl.SSLContext) -> None:
        context.set_alpn_protocols(["h2"])
        self._server = await asyncio.get_running_loop().create_server(lambda: _H2(self), "127.0.0.1", 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for transport in list(self.open):
            transport.abort()
        while self.open:
            await asyncio.sleep(0)


class _H2(asyncio.Protocol):
    def __init__(self, server: H2Server) -> None:
        self._server = server
        self._paths: dict[int, str] = {}
        self._left: dict[int, bytes] = {}
        self._h2 = H2Connection(H2Configuration(client_side=False))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.connections += 1
        self._transport = cast("asyncio.Transport", transport)
        self._server.open.add(self._transport)
        self._h2.initiate_connection()
        self._transport.write(self._h2.data_to_send())

    def connection_lost(self, error: Exception | None) -> None:
        self._server.open.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            match event:
                case RequestReceived(stream_id=int(stream), headers=headers) if headers is not None:
                    found = {bytes(name).decode(): bytes(value).decode() for name, value in headers}
                    self._server.requests.append(found)
                    self._paths[stream] = found[":path"]
                case DataReceived(stream_id=int(stream), flow_controlled_length=int(length)):
                    self._h2.acknowledge_received_data(length, stream)
                case StreamEnded(stream_id=int(stream)):
                    self._answer(stream)
                case WindowUpdated():
                    for waiting in list(self._left):
                        self._go_on(waiting)
        self._transport.write(self._h2.data_to_send())

    def _answer(self, stream: int) -> None:
        if self._paths[stream] == "/reset":
            self._h2.reset_stream(stream)
            return
        self._h2.send_headers(stream, [(":status", "200"), ("content-length", str(len(self._server.body)))])
        self._left[stream] = self._server.body
        self._go_on(stream)

    def _go_on(self, stream: int) -> None:
        while left := self._left.get(stream):
            size = min(len(left), self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if not size:
                return
            self._left[stream] = left[size:]
            self._h2.send_data(stream, left[:size], end_stream=size == len(left))
        self._left.pop(stream, None)


class Proxy:
    """Opens tunnels by CONNECT and passes plain requests on, or ``refuses`` both. Keeps the first line of each request, and all that went through."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.seen = b""
        self.refuses = False
        self.url = ""
        self._server: asyncio.Server | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # for the transports to close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._work.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._pass_on(reader, writer)
        finally:
            writer.close()
            self._work.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode()
        self.asked.append(line)
        if self.refuses:
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        target = line.split()[1]
        place = target if line.startswith("CONNECT") else target.split("/")[2]
        host, _, port = place.partition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        if line.startswith("CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            there_writer.write(head)
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            there_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
                await writer.drain()
        writer.close()
