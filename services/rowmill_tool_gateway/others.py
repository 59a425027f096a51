"""What a gateway does for the others beside its turns: the broker may take its time, and leases must be renewed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import structlog

from rowmill.errors import RowmillError

log = structlog.get_logger()


class Others:
    """``step_back``: waits at a shard's queue behind all others from then on. ``tell_freed``: a hint to all that who waits for these shards may ask
    for them. ``patience``: seconds after which that is left.
    """

    def __init__(self, step_back: Callable[[int], Awaitable[None]], tell_freed: Callable[[list[int]], Awaitable[None]], patience: float) -> None:
        self._step_back = step_back
        self._tell_freed = tell_freed
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    def let_ahead(self, shards: Collection[int], stepped: Callable[[int], None]) -> None:
        """Step back at the queues of these shards, one after the other; ``stepped`` is told of each when that is done, or has failed."""
        if shards:
            self._begin(self._let_ahead(shards, stepped))

    def tell(self, shards: list[int]) -> None:
        """Say that these shards were given up, or that requests ended that were open there."""
        if shards:
            self._begin(self._tell(shards))

    async def told(self) -> None:
        """Return when all of that is done, or not to be waited for any longer."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="for other gateways")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_ahead(self, shards: Collection[int], stepped: Callable[[int], None]) -> None:
        for shard in shards:
            try:
                await self._step_back(shard)
            except Exception:  # a new session is behind all others anyway
                log.exception("not_stepped_back", shard=shard)
            finally:
                stepped(shard)

    async def _tell(self, shards: list[int]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._tell_freed(shards)
        except (RowmillError, TimeoutError) as error:
            log.info("shards_freed_untold", shards=shards, error=str(error))  # who waits for them asks by and by
