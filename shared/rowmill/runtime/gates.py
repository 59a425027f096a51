"""Who of the handlers behind one gate runs in this process, and the right to run alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Each handler enters and leaves; who wants to be alone keeps the others waiting at the gate."""

    def __init__(self) -> None:
        self._running = 0
        self._one = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self.let_in()

    def leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Keep all at the gate who want to enter inside the block. One caller at a time, in their order; who waits gets in between two of them."""
        async with self._one:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()

    async def idle(self, within: float) -> bool:
        """Whether all have left, within so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def let_in(self) -> None:
        """Count one in, whose `leave` is to follow: who has closed the gate, itself."""
        self._running += 1
        self._idle.clear()
