"""Gathering single items into pages: full pages under load, no wait when idle (DESIGN.md, "Speed")."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

PARTIAL_FLUSHES: Final = 2
"""Flushes under way besides which no page goes that is not full: what they cost is better spent on fuller pages. One that hangs must not hold the
other up, so it is more than one."""

PATIENCE: Final = 10
"""A page waits for such flushes until its first item is this many times ``max_age`` old."""

ItemT = TypeVar("ItemT")


class Gatherer(Generic[ItemT]):
    """Hands items to ``flush`` in pages of at most ``max_items`` and about ``max_bytes``.

    A page goes when it is full, when its first item is ``max_age`` seconds old (while several flushes are under way: when one of them ends, or a few
    ``max_age`` later), or at once when no flush is under way and the loop has run what was ready before. Items keep their order within and over
    pages as long as ``max_flushes`` is 1. ``flush`` must not raise; it owns what it was given.
    """

    def __init__(
        self,
        flush: Callable[[list[ItemT]], Awaitable[None]],
        *,
        max_items: int,
        max_age: float,
        max_bytes: int | None = None,
        size: Callable[[ItemT], int] | None = None,
        max_flushes: int = 8,
    ) -> None:
        self._flush = flush
        self._max_items = max_items
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._size = size
        self._max_flushes = max_flushes
        self._items: deque[ItemT] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._asap = False
        self._due = False
        self._flushes: set[asyncio.Task[None]] = set()

    def add(self, item: ItemT) -> None:
        """Take an item; never waits."""
        self._items.append(item)
        self._schedule()

    async def drain(self) -> None:
        """Flush all that was added and wait for it."""
        while self._items or self._flushes:
            self._start(partial=True)
            if self._flushes:
                await asyncio.wait(set(self._flushes), return_when=asyncio.FIRST_COMPLETED)

    def _schedule(self) -> None:
        if len(self._items) >= self._max_items:
            self._start(partial=False)
        if not self._items:
            return
        if not self._flushes:
            if not self._asap:
                self._asap = True
                asyncio.get_running_loop().call_soon(self._idle)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_age, self._expired)

    def _idle(self) -> None:
        self._asap = False
        if self._items and not self._flushes:
            self._start(partial=True)

    def _expired(self) -> None:
        self._timer = None
        if not self._due and len(self._flushes) >= PARTIAL_FLUSHES:
            self._due = True
            self._timer = asyncio.get_running_loop().call_later(self._max_age * (PATIENCE - 1), self._expired)
        else:
            self._start(partial=True)

    def _start(self, *, partial: bool) -> None:
        while self._items and len(self._flushes) < self._max_flushes and (partial or len(self._items) >= self._max_items):
            page = self._cut()
            task = asyncio.ensure_future(self._flush(page))
            self._flushes.add(task)
            task.add_done_callback(self._finished)
        if not self._items and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> list[ItemT]:
        page: list[ItemT] = []
        size = 0
        self._due = False
        while self._items and len(page) < self._max_items:
            if self._size is not None and self._max_bytes is not None:
                size += self._size(self._items[0])
                if page and size > self._max_bytes:
                    break
            page.append(self._items.popleft())
        return page

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        if not task.cancelled():
            task.result()
        if self._items:
            if len(self._items) >= self._max_items:
                self._start(partial=False)
            elif not self._flushes or (self._due and len(self._flushes) < PARTIAL_FLUSHES):
                self._start(partial=True)
            else:
                self._schedule()
