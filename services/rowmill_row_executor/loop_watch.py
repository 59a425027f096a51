"""Noticing author code that holds the loop, while it does, and naming it: a thread looks at where the loop's thread is.

Nothing is measured in the rows themselves, so it costs them nothing.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import structlog

from rowmill.datasets import DatasetProgram
from rowmill.resolvers import Resolver
from rowmill.runtime.clock import Clock

log = structlog.get_logger()

_LABELS = 10_000
"""Resolvers that can be named; beyond that all are forgotten, and named again as their datasets come."""


class LoopWatch:
    """Logs ``resolver_holds_loop`` when the loop did not turn for ``limit`` seconds, once per hold. `start` it on that loop."""

    def __init__(self, clock: Clock, *, limit: float) -> None:
        self._clock = clock
        self._limit = limit
        self._turned = clock.monotonic()
        self._labels: dict[CodeType, str] = {}
        self._loop_thread = 0
        self._turning: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="loop watch", daemon=True)

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._turning = asyncio.create_task(self._turn(), name="loop watch")
        self._thread.start()

    async def stop(self) -> None:
        if self._turning is None:
            return
        self._turning.cancel()
        await asyncio.gather(self._turning, return_exceptions=True)
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)

    def know(self, program: DatasetProgram) -> None:
        """Be able to name the resolvers of this program."""
        if len(self._labels) > _LABELS:
            self._labels = {}
        for column in program.columns:
            for code in codes_of(column.resolver):
                self._labels[code] = f"column {column.name!r} of dataset {program.key!r}"

    def held_by(self, frame: FrameType | None) -> str:
        """Who holds the loop, seen from the innermost frame of its thread: a known resolver, else the function."""
        at = frame
        while at is not None:
            label = self._labels.get(at.f_code)
            if label is not None:
                return label
            at = at.f_back
        return "unknown" if frame is None else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"

    async def _turn(self) -> None:
        while True:
            self._turned = self._clock.monotonic()
            await asyncio.sleep(self._limit / 4)

    def _look_on(self) -> None:
        told: float | None = None
        while not self._stopping.wait(self._limit / 4):
            turned = self._turned
            held = self._clock.monotonic() - turned
            if held > self._limit and turned != told:
                told = turned
                log.warning("resolver_holds_loop", resolver=self.held_by(sys._current_frames().get(self._loop_thread)), seconds=round(held, 1))  # noqa: SLF001 - there is no public way to see where another thread is


def codes_of(resolver: Resolver) -> Iterator[CodeType]:
    """The code of a resolver's function, and of those of its steps."""
    if resolver.program is not None:
        for step in resolver.program.steps:
            yield from codes_of(step.resolver)
    code = getattr(resolver.function, "__code__", None)
    if isinstance(code, CodeType):
        yield code
