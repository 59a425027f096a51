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
        self._running += 1
        self._idle.clear()

    def leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    @asynccontextmanager
    async def alone(self, patience: float) -> AsyncIterator[None]:
        """Let nobody in inside the block, which begins once all have left, or after ``patience`` seconds beside those who have not.

        One caller at a time, in their order. Who waits at the gate gets in between two of them.
        """
        async with self._one:
            self._open.clear()
            try:
                try:
                    async with asyncio.timeout(patience):
                        await self._idle.wait()
                except TimeoutError:
                    pass
                yield
            finally:
                self._open.set()
