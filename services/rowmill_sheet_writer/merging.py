"""Merging: requests that wait while a transaction runs go into the next one together.

One commit costs about as much for one page as for ten, so pages that queue up behind a commit share the next. An idle writer makes nobody wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from rowmill.errors import UnavailableError

log = structlog.get_logger()

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    rows: int
    size: int
    result: asyncio.Future[ResultT]


class Merger(Generic[ItemT, ResultT]):
    """Hands waiting items to ``work`` in batches of at most ``max_rows`` rows and ``max_bytes`` bytes (a larger single item alone), at most
    ``at_once`` batches at a time, oldest first. ``work`` returns one result per item.

    If ``work`` fails for a batch, each of its items is tried alone, so that a bad one fails nobody else; except while a server is away, when each
    gets that error and its message is tried again by the bus.
    """

    def __init__(self, work: Callable[[list[ItemT]], Awaitable[list[ResultT]]], *, max_rows: int, max_bytes: int, at_once: int) -> None:
        self._work = work
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._at_once = at_once
        self._waiting: deque[_Waiting[ItemT, ResultT]] = deque()
        self._workers: set[asyncio.Task[None]] = set()

    async def submit(self, item: ItemT, *, rows: int, size: int) -> ResultT:
        """The item's result. Raises what ``work`` raises for it."""
        waiting: _Waiting[ItemT, ResultT] = _Waiting(item, rows, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._workers) < self._at_once:
            worker = asyncio.create_task(self._run())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return await waiting.result

    async def _run(self) -> None:
        while batch := self._cut():
            try:
                await self._finish(batch)
            except BaseException as error:
                for waiting in batch:
                    _fail(waiting, error)
                raise

    def _cut(self) -> list[_Waiting[ItemT, ResultT]]:
        batch: list[_Waiting[ItemT, ResultT]] = []
        rows = size = 0
        while self._waiting:
            waiting = self._waiting[0]
            rows += waiting.rows
            size += waiting.size
            if batch and (rows > self._max_rows or size > self._max_bytes):
                break
            self._waiting.popleft()
            if waiting.result.cancelled():
                rows -= waiting.rows
                size -= waiting.size
            else:
                batch.append(waiting)
        return batch

    async def _finish(self, batch: list[_Waiting[ItemT, ResultT]]) -> None:
        try:
            results = await self._work([waiting.item for waiting in batch])
        except Exception as error:
            if len(batch) == 1 or isinstance(error, UnavailableError):
                for waiting in batch:
                    _fail(waiting, error)
                return
            log.info("batch_taken_apart", items=len(batch), error=repr(error))
            for waiting in batch:
                await self._finish([waiting])
        else:
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(result)


def _fail(waiting: _Waiting[ItemT, ResultT], error: BaseException) -> None:
    if waiting.result.done():
        return
    if isinstance(error, asyncio.CancelledError):
        waiting.result.cancel()
    else:
        waiting.result.set_exception(error)
