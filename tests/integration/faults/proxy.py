"""A TCP proxy between services and a server, which does to connections what networks do."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

READ_BYTES = 16_384


class _Pair:
    """One connection of a client and ours to the server."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.writers = writers
        self.lost = False

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class FaultProxy:
    """Listens on 127.0.0.1 and passes everything on to one port there, until told otherwise. Use ``async with``."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.accepted = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._rate: float | None = None
        self.heal()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- orders -----------------------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset every open connection, on both sides; new ones pass."""
        for pair in self._pairs:
            pair.abort()

    def half_open(self) -> None:
        """Swallow whatever the open connections say from now on, as when a router forgot them: neither side is told. New ones pass."""
        for pair in self._pairs:
            pair.lost = True

    def stall(self) -> None:
        """Pass nothing on, of open connections and of new ones, until `heal`; nothing is lost."""
        self._flowing.clear()

    def slow(self, bytes_per_second: float) -> None:
        """Let each connection have no more than that in each direction, until `heal`."""
        self._rate = bytes_per_second

    def heal(self) -> None:
        """Pass on what was held, and go on at full speed. What was cut or lost stays so."""
        self._rate = None
        self._flowing.set()

    # ---- bytes ------------------------------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, server_writer)
        self._pairs.add(pair)
        passing = [asyncio.ensure_future(self._pass(pair, reader, server_writer)), asyncio.ensure_future(self._pass(pair, server_reader, writer))]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        while pair.lost and not all(one.done() for one in passing):  # the side that is left learns nothing of the other's end
            await asyncio.wait(passing)
        pair.abort()
        await asyncio.gather(*passing)
        self._pairs.discard(pair)

    async def _pass(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await self._flowing.wait()
                if self._rate is not None:
                    await asyncio.sleep(len(data) / self._rate)
                if not pair.lost:
                    writer.write(data)
                    await writer.drain()
