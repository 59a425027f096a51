"""Merging waiting requests into few statements, the urgent kinds first. Knows nothing of what they ask.

A request's items stay together and their answers come back in its order. While statements are under way, requests wait and grow into the next
one; when none is, a request goes at once, with whatever else the event loop delivers beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import structlog

from rowmill.errors import UnavailableError

log = structlog.get_logger()

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


class _Request(Generic[ItemT, AnswerT]):
    __slots__ = ("answers", "items", "weight")

    def __init__(self, items: Sequence[ItemT], weight: int, answers: asyncio.Future[list[AnswerT]]) -> None:
        self.items = items
        self.weight = weight
        self.answers = answers


class Kind(Generic[ItemT, AnswerT]):
    """Requests of one kind, which may be carried out together. Made by `Merger.kind`."""

    def __init__(self, merger: Merger, carry_out: Callable[[Sequence[ItemT]], Awaitable[list[AnswerT]]]) -> None:
        self._merger = merger
        self._carry_out = carry_out
        self._waiting: deque[_Request[ItemT, AnswerT]] = deque()

    async def ask(self, items: Sequence[ItemT], *, weight: int = 0) -> list[AnswerT]:
        """Carry out ``items`` (``weight``: their bytes, about) together with others; answers in their order, after the commit.

        Raises what carrying them out raises; a fault of one request is not another's.
        """
        request: _Request[ItemT, AnswerT] = _Request(items, weight, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._merger.wake()
        return await request.answers

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def cut(self, max_items: int, max_bytes: int) -> list[_Request[ItemT, AnswerT]]:
        """The oldest requests that fit one statement, at least one."""
        page: list[_Request[ItemT, AnswerT]] = []
        items = weight = 0
        while self._waiting:
            request = self._waiting[0]
            items += len(request.items)
            weight += request.weight
            if page and (items > max_items or weight > max_bytes):
                break
            page.append(self._waiting.popleft())
        return page

    async def carry_out(self, page: list[_Request[ItemT, AnswerT]]) -> None:
        """Answer every request of the page; one by one when together they fail, so that a faulty one fails alone."""
        try:
            answers = await self._carry_out([item for request in page for item in request.items])
        except Exception as error:
            if len(page) == 1 or isinstance(error, UnavailableError):
                for request in page:
                    if not request.answers.done():
                        request.answers.set_exception(error)
                return
            log.warning("merged_requests_separated", requests=len(page), error=repr(error))
            for request in page:
                await self.carry_out([request])
            return
        start = 0
        for request in page:
            end = start + len(request.items)
            if not request.answers.done():
                request.answers.set_result(answers[start:end])
            start = end


class Merger:
    """Carries out requests of several kinds, ``statements`` at once, each of at most ``max_items`` items and about ``max_bytes``.

    A larger single request goes alone. Kinds registered earlier go before later ones.
    """

    def __init__(self, *, statements: int, max_items: int, max_bytes: int) -> None:
        self._free = statements
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._kinds: list[Kind[Any, Any]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._awake = False

    def kind(self, carry_out: Callable[[Sequence[ItemT]], Awaitable[list[AnswerT]]]) -> Kind[ItemT, AnswerT]:
        """Register the next less urgent kind. ``carry_out`` answers its items in their order."""
        kind = Kind(self, carry_out)
        self._kinds.append(kind)
        return kind

    def wake(self) -> None:
        """Something waits: start it once the loop has run what is ready."""
        if not self._awake and self._free:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._awake = False
        while self._free and (kind := next((kind for kind in self._kinds if kind.waits), None)) is not None:
            self._free -= 1
            task = asyncio.ensure_future(kind.carry_out(kind.cut(self._max_items, self._max_bytes)))
            self._under_way.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._free += 1
        self._start()
        if not task.cancelled():
            task.result()


def rounds(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indexes of ``keys`` in rounds that hold a key once each; a key's second occurrence comes a round after its first."""
    seen: dict[Hashable, int] = {}
    parted: list[list[int]] = []
    for index, key in enumerate(keys):
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(parted):
            parted.append([])
        parted[turn].append(index)
    return parted
