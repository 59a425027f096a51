"""A provider as a process of its own that does nothing but note when requests arrive, by its own clock, and how far that note may be late.

``python clocked_provider.py [LATENCY_MS]`` prints ``ready <url>``. Every POST is answered with a result; ``GET /count`` gives how many there were,
``GET /arrivals`` the notes so far as ``[[seconds, late], ...]``: ``late`` is for how long this process did not look at its sockets before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from typing import cast

TICK = 0.002
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n" + b'{"email":"a@b"}\n'


class Arrivals:
    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.seen: list[tuple[float, float]] = []
        self.looked = time.monotonic()

    async def tick(self) -> None:
        while True:
            self.looked = time.monotonic()
            await asyncio.sleep(TICK)

    def note(self) -> None:
        now = time.monotonic()
        self.seen.append((now, max(0.0, now - self.looked - TICK)))


class Connection(asyncio.Protocol):
    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            if head.startswith(b"get"):
                body = json.dumps(len(self._arrivals.seen) if head.startswith(b"get /count") else self._arrivals.seen).encode()
                self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            else:
                self._arrivals.note()
                asyncio.get_running_loop().call_later(self._arrivals.latency, self._answer)

    def _answer(self) -> None:
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
