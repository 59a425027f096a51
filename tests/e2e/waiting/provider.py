"""A provider of one path, in the test's own loop: it notes when what was asked for came, and can be away (nothing listens then)."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import TracebackType
from typing import Any, Self

import msgspec
from tests.e2e.stage import EXAMPLE

sys.path.insert(0, str(EXAMPLE))

from provider_http import HttpServer, Reply, Request, respond

TICK = 0.005


class NotingProvider:
    """``arrivals``: (seconds by the loop's clock, name), in order. ``lasts``: seconds until an answer. ``slept``: the longest time in seconds for
    which its loop did not run, so that what came meanwhile is noted later. Its port is its own also while it is away.
    """

    def __init__(self, *, lasts: float = 0.0) -> None:
        self.arrivals: list[tuple[float, str]] = []
        self.lasts = lasts
        self.slept = 0.0
        self._watch: asyncio.Task[None] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._server = HttpServer(self._handle)

    async def __aenter__(self) -> Self:
        await self._server.start(self._port)
        self._watch = asyncio.create_task(self._watch_loop())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._server.stop()
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(TICK)
            self.slept = max(self.slept, loop.time() - before - TICK)

    async def _handle(self, request: Request) -> Reply:
        asked: dict[str, Any] = msgspec.json.decode(request.body)
        self.arrivals.append((asyncio.get_running_loop().time(), asked["name"]))
        if self.lasts:
            await asyncio.sleep(self.lasts)
        return respond(msgspec.json.encode({"name": asked["name"]}))
