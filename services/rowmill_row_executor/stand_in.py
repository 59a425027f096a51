"""The task that author code finds around it where it has none of its own: what it does to that one harms nobody else."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StandIn:
    """Is `asyncio.current_task` between `enter` and `leave`, during which nothing may be awaited.

    Author code may cancel the task that it runs in, and a task group or a timeout that is left behind does so later. Were that the task of the
    engine's own loop, the loop would end.
    """

    __slots__ = ("_loop", "_real", "_task")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._new()
        self._real: asyncio.Task[object] | None = None

    def enter(self) -> None:
        if self._task.cancelling() or self._task.done():
            self._task = self._new()
        real = self._real = asyncio.current_task(self._loop)
        if real is not None:
            _leave_task(self._loop, real)
        _enter_task(self._loop, self._task)

    def leave(self) -> None:
        _leave_task(self._loop, self._task)
        if self._real is not None:
            _enter_task(self._loop, self._real)
            self._real = None

    def end(self) -> None:
        """Nothing is run in it any more."""
        self._task.cancel()

    def _new(self) -> asyncio.Task[object]:
        return self._loop.create_task(_for_ever(), name="stand-in for author code's task")


def apart(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What author code that does not wait gives, called in a task that stands in for the one that runs."""
    stand_in = StandIn()
    stand_in.enter()
    try:
        return function(*args, **kwargs)
    finally:
        stand_in.leave()
        stand_in.end()


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


__all__ = ["StandIn", "apart"]
