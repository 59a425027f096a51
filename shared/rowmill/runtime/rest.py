"""When author code of a suspect is at work, and that this is on record: only a death then may be its doing (docs/adr/0024).

A suspect in hand is at rest until author code of its runs: in coroutines that are watched (`Rest.watch`), in threads that are told of (`at_work`), or
in its handler, where that says so (`working`). Before any of it begins or goes on, it is put on record that it is at work; once all of it waits, that
is taken back. Messages that are no suspects have no `Rest`, and are watched by nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog

from rowmill.errors import RowmillError
from rowmill.runtime.transport import TRANSPORT_ERRORS

log = structlog.get_logger()

T = TypeVar("T")

SETTLING: Final = 0.005
"""Seconds without author code after which a suspect is at rest: what is answered sooner needs no record. Not scaled: it is not about waiting."""


class WorkRecord(Protocol):
    """What the next process finds after a death. It stands as it was last stored."""

    async def works(self) -> None:
        """Put it on record that author code is at work: a death from now on is one more of those that may be its doing."""

    async def rests(self) -> None:
        """Take that back: after a death from now on, no death until then was its doing."""


class Rest:
    """One suspect in hand. ``recorded``: whether it is on record that it is at work."""

    def __init__(self, record: WorkRecord, *, settling: float = SETTLING) -> None:
        self.recorded = False
        self._record = record
        self._settling = settling
        self._at_work = 0
        self._timer: asyncio.TimerHandle | None = None
        self._noting: asyncio.Task[None] | None = None
        self._over = False

    def began(self) -> None:
        """Author code runs. Where it may have been at rest, `wake` is awaited right before."""
        self._at_work += 1
        self._stop_timer()

    def paused(self) -> None:
        """It runs no more, or waits for something."""
        self._at_work -= 1
        self._start_timer()

    async def wake(self) -> None:
        """Return once it is on record that author code is at work. Never fails: a record that cannot be kept is given up."""
        self._stop_timer()
        while not self._over and (self._noting is not None or not self.recorded):
            if self._noting is None:
                self._noting = self._note(self._record.works, recorded=True)
            await asyncio.shield(self._noting)
        self._start_timer()

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives. It is at work whenever it runs, and not while it waits, whatever for; before it goes on, `wake` has returned."""
        _current.set(self)
        given: T = await _Watched(work, self)
        return given

    async def end(self) -> None:
        """Record nothing more, whatever its author code does."""
        self._over = True
        self._stop_timer()
        if self._noting is not None:
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self._noting)

    def _start_timer(self) -> None:
        if not self._at_work and not self._over and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settling, self._settled)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settled(self) -> None:
        self._timer = None
        if self.recorded and self._noting is None:
            self._noting = self._note(self._record.rests, recorded=False)

    def _note(self, step: Callable[[], Awaitable[None]], *, recorded: bool) -> asyncio.Task[None]:
        async def note() -> None:
            try:
                await step()
                self.recorded = recorded
            except (*TRANSPORT_ERRORS, RowmillError) as error:  # deaths from here on are judged by what was stored last
                log.info("work_not_recorded", error=repr(error))
                self._over = True
            finally:
                self._noting = None

        return asyncio.create_task(note(), name="record of a suspect")


class _Watched:
    """Awaits ``work``, telling ``rest`` each time that it goes on and that it waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], rest: Rest) -> None:
        self._work = work
        self._rest = rest

    def __await__(self) -> Generator[Any, Any, Any]:
        go_on: Callable[[], Any] = partial(self._work.send, None)
        while True:
            while True:
                try:
                    yield from self._rest.wake().__await__()
                    break
                except GeneratorExit:
                    self._work.close()
                    raise
                except BaseException as error:  # its task is cancelled meanwhile: it hears of that instead, and not before it is on record either
                    go_on = partial(self._work.throw, error)
            self._rest.began()
            try:
                awaited = go_on()
            except StopIteration as end:
                return end.value
            finally:
                self._rest.paused()
            try:
                go_on = partial(self._work.send, (yield awaited))
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as error:
                go_on = partial(self._work.throw, error)


_current: ContextVar[Rest | None] = ContextVar("rest", default=None)
"""Of the suspect whose author code runs here."""


@asynccontextmanager
async def working(rest: Rest | None) -> AsyncIterator[None]:
    """Inside the block the handler of a suspect runs author code."""
    if rest is None:
        yield
        return
    await rest.wake()
    rest.began()
    try:
        yield
    finally:
        rest.paused()


@contextmanager
def at_work() -> Iterator[None]:
    """Inside the block author code runs elsewhere for the coroutine that waits here: in a thread."""
    rest = _current.get()
    if rest is not None:
        rest.began()
    try:
        yield
    finally:
        if rest is not None:
            rest.paused()


async def goes_on() -> None:
    """Awaited where the engine gives author code an answer: that may be a task of its own, which nobody watches."""
    rest = _current.get()
    if rest is not None:
        await rest.wake()


def watched(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """A coroutine that is given to a task: watched if author code of a suspect gives it."""
    rest = _current.get()
    return work if rest is None else rest.watch(work)


__all__ = ["Rest", "WorkRecord", "at_work", "goes_on", "watched", "working"]
