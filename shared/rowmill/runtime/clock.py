"""Time and ids as arguments: domain code never reads the wall clock or makes ids itself."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """``now``: seconds since the epoch, for people and messages. ``monotonic``: for leases and deadlines of this process."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def new_id(prefix: str = "") -> str:
    """A sortable unique id: 48 bits of milliseconds, 80 random bits, hexadecimal (the layout of a ULID)."""
    text = f"{int(time.time() * 1000):012x}{secrets.token_hex(10)}"
    return f"{prefix}{text}" if prefix else text


def backoff(attempt: int, *, first: float, limit: float) -> float:
    """Seconds before try ``attempt`` (from 1): doubling from ``first`` to ``limit``, with full jitter over the upper half."""
    ceiling: float = min(limit, first * 2.0 ** min(attempt - 1, 30))
    return ceiling * (0.5 + random.random() / 2)  # noqa: S311 - jitter, not cryptography
