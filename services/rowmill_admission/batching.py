"""Handling many messages in one commit, each with its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rowmill.errors import UnavailableError
from rowmill.runtime.gathering import Gatherer

ItemT = TypeVar("ItemT")


class Batches(Generic[ItemT]):
    """`handle` returns when the item's batch was handled, or raises why the item could not be.

    A batch that fails is handled once more item by item, so that one bad item fails alone. ``flush`` must be idempotent.
    """

    def __init__(
        self,
        flush: Callable[[list[ItemT]], Awaitable[None]],
        *,
        max_items: int,
        max_age: float,
        max_bytes: int | None = None,
        size: Callable[[ItemT], int] | None = None,
    ) -> None:
        self._flush_items = flush
        self._gatherer: Gatherer[tuple[ItemT, asyncio.Future[None]]] = Gatherer(
            self._flush,
            max_items=max_items,
            max_age=max_age,
            max_bytes=max_bytes,
            size=None if size is None else lambda entry: size(entry[0]),
            max_flushes=1,
        )

    async def handle(self, item: ItemT) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gatherer.add((item, future))
        await future

    async def _flush(self, entries: list[tuple[ItemT, asyncio.Future[None]]]) -> None:
        try:
            await self._flush_items([item for item, _ in entries])
        except Exception as error:
            if len(entries) == 1 or isinstance(error, UnavailableError):
                for _, future in entries:
                    if not future.done():
                        future.set_exception(error)
            else:
                for entry in entries:
                    await self._flush([entry])
            return
        for _, future in entries:
            if not future.done():
                future.set_result(None)
