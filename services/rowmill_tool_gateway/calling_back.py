"""Telling admission that a provider serves again, or that its lane is idle, so that it lets the rows come back that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from rowmill.errors import RowmillError
from rowmill.runtime.clock import Clock
from rowmill_contracts.runs import ProviderServes

log = structlog.get_logger()

AT_A_TIME: Final = 4
"""Idle lanes that are being told of at the same time at most."""


class CallBack:
    """``publish``: confirmed. ``every``: seconds between two times that it is told. ``for_long``: seconds after which every row has come back in its
    own time.
    """

    def __init__(self, publish: Callable[[ProviderServes], Coroutine[Any, Any, None]], *, every: float, for_long: float, clock: Clock) -> None:
        self._publish = publish
        self._every = every
        self._for_long = for_long
        self._clock = clock
        self._telling: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._few = asyncio.Semaphore(AT_A_TIME)

    def serves(self, org: str, provider: str, message: Callable[[], ProviderServes | None]) -> None:
        """Tell it now and again. Never waits. ``message``: what is to be told at that moment, if anything.

        Again, since rows that were told to wait just before were not there yet to be called back, and since only so many are called back as the
        lane takes until the next time: when it is slower than it should be, they would come and go, and lose their turns to younger ones.
        """
        before = self._telling.get((org, provider))
        if before is not None:
            before.cancel()
        telling = self._telling[org, provider] = asyncio.create_task(self._tell(message), name=f"calling back {provider}")
        telling.add_done_callback(lambda _: self._forget((org, provider), telling))

    def sooner(self, message: ProviderServes) -> bool:
        """Tell it once. Never waits. False, and not told, where rows are called back anyway, or the last time is still being told."""
        if (message.org, message.provider) in self._telling:
            return False
        telling = self._telling[message.org, message.provider] = asyncio.create_task(self._tell_idle(message), name=f"idle {message.provider}")
        telling.add_done_callback(lambda _: self._forget((message.org, message.provider), telling))
        return True

    async def _tell_idle(self, message: ProviderServes) -> None:
        async with self._few:
            await self._say(message)

    async def _say(self, message: ProviderServes) -> None:
        """A hint: where it is not heard, rows come in their own time, or it is said again."""
        try:
            await self._publish(message)
        except RowmillError as error:
            log.warning("provider_serves_not_told", org=message.org, provider=message.provider, error=str(error))
        except Exception:
            log.exception("provider_serves_not_told", org=message.org, provider=message.provider)

    def _forget(self, lane: tuple[str, str], telling: asyncio.Task[None]) -> None:
        if self._telling.get(lane) is telling:
            del self._telling[lane]

    async def _tell(self, message: Callable[[], ProviderServes | None]) -> None:
        until = self._clock.monotonic() + self._for_long
        while self._clock.monotonic() < until:
            told = message()
            if told is not None:
                await self._say(told)
            await self._clock.sleep(self._every)

    async def stop(self) -> None:
        """Tell no more; who was not called back comes back in its own time."""
        telling = list(self._telling.values())
        for each in telling:
            each.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
