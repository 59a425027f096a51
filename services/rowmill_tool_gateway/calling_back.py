"""Telling admission that a provider serves again, so that it lets the rows come back that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rowmill.runtime.clock import Clock
from rowmill_contracts.runs import ProviderServes


class CallBack:
    """``publish``: confirmed. ``again_after``: seconds; as long as a row may be on its way from here to where it waits."""

    def __init__(self, publish: Callable[[ProviderServes], Awaitable[None]], *, again_after: float, clock: Clock) -> None:
        self._publish = publish
        self._again_after = again_after
        self._clock = clock
        self._telling: set[asyncio.Task[None]] = set()

    def serves(self, message: ProviderServes) -> None:
        """Tell it now, and once more later: rows that were told to wait just before were not there yet to be called back. Never waits."""
        telling = asyncio.create_task(self._tell(message))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self, message: ProviderServes) -> None:
        await self._publish(message)
        await self._clock.sleep(self._again_after)
        await self._publish(message)

    async def stop(self) -> None:
        """Tell no more; who was not called back comes back in its own time."""
        for telling in self._telling:
            telling.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
