"""Clocks on which a test waits for nothing."""

from __future__ import annotations

import asyncio
import selectors

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


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when everybody waits for it, and then at once to where the first of them is called. So no test is long, and
    none depends on how busy its machine is. Not for what other threads or servers do: time leaps while they work.
    """

    def __init__(self) -> None:
        self._leapt = 1_000.0
        super().__init__(_LeapingSelector(self))

    def time(self) -> float:
        return self._leapt

    def leap(self, seconds: float) -> None:
        self._leapt += seconds


class _LeapingSelector(selectors.DefaultSelector):
    def __init__(self, loop: LeapingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._loop.leap(timeout)
        return ready


class LoopClock(SystemClock):
    """The time of the loop that runs."""

    def now(self) -> float:
        return 1_700_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()
