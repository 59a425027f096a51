"""Clocks on which a test waits for nothing."""

from __future__ import annotations

import asyncio

from rowmill.runtime.clock import SystemClock


class FrozenClock:
    """Time that stands until a test moves it."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        del seconds
        await asyncio.Event().wait()


class HurriedClock(SystemClock):
    """The real time, but nothing is waited for."""

    async def sleep(self, seconds: float) -> None:
        del seconds
        await asyncio.sleep(0)
