"""A provider as a process of its own that does nothing but note when requests arrive, by its own clock, and how far that note may be late.

``python clocked_provider.py [LATENCY_MS]`` prints ``ready <url>``. Every POST is answered with a result, one to ``/after/<ms>/<lane>`` after that
time, one to ``/held/<lane>`` not before ``GET /answer``. ``GET /count`` gives how many there were, ``GET /arrivals`` the notes so far as
``[[seconds, late], ...]``: ``late`` is for how long this process did not look at its sockets before. ``GET /lanes`` gives for each path its
``arrivals``, the most requests that were ``open`` at once, and the ``bodies``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import cast

TICK = 0.002
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n" + b'{"email":"a@b"}\n'


@dataclass
class Lane:
    """What came by one path."""

    arrivals: list[tuple[float, float]] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    now_open: int = 0
    open: int = 0


class Arrivals:
    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.seen: list[tuple[float, float]] = []
        self.looked = time.monotonic()
        self.lanes: dict[str, Lane] = {}
        self.held: list[Connection] = []

    async def tick(self) -> None:
        while True:
            self.looked = time.monotonic()
            await asyncio.sleep(TICK)

    def note(self, path: str, body: bytes) -> Lane:
        now = time.monotonic()
        noted = (now, max(0.0, now - self.looked - TICK))
        self.seen.append(noted)
        lane = self.lanes.setdefault(path, Lane())
        lane.arrivals.append(noted)
        lane.bodies.append(body.decode())
        lane.now_open += 1
        lane.open = max(lane.open, lane.now_open)
        return lane

    def document(self, path: str) -> object:
        if path == "/answer":
            while self.held:
                self.held.pop().answer()
        if path == "/count":
            return len(self.seen)
        if path == "/lanes":
            return {path: {"arrivals": lane.arrivals, "open": lane.open, "bodies": lane.bodies} for path, lane in self.lanes.items()}
        return self.seen


class Connection(asyncio.Protocol):
    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._received = b""
        self._answering: Lane | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            path = self._received.split(b" ", 2)[1].decode()
            length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            if len(self._received) < end + 4 + length:
                return
            content = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            if head.startswith(b"get"):
                body = json.dumps(self._arrivals.document(path)).encode()
                self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            else:
                self._answering = self._arrivals.note(path, content)
                if path.startswith("/held/"):
                    self._arrivals.held.append(self)
                    continue
                latency = int(path.split("/")[2]) / 1000 if path.startswith("/after/") else self._arrivals.latency
                asyncio.get_running_loop().call_later(latency, self.answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()

    def _ended(self) -> None:
        """The request is open no more."""
        if self._answering is not None:
            self._answering.now_open -= 1
            self._answering = None

    def answer(self) -> None:
        self._ended()
        if not self._transport.is_closing():
            self._transport.write(ANSWER)


async def main(latency: float) -> None:
    arrivals = Arrivals(latency)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a clock should not wait for what it measures, where that may be asked for
    server = await asyncio.get_running_loop().create_server(lambda: Connection(arrivals), "127.0.0.1", 0)
    sys.stdout.write(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await arrivals.tick()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) / 1000 if len(sys.argv) > 1 else 0.0))
