"""Threads for resolvers and tool functions that are declared ``blocking``.

A thread cannot be ended from outside. One that somebody gave up waiting for (the time of its row or call is over) is abandoned: another takes its
place, so that code which never returns does not use up the threads, and none of it keeps the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import structlog

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")


class _Work(Future[T]):
    """A call that waits for a thread, or has one. ``abandon``: called when it is given up while it runs."""

    def __init__(self, call: Callable[[], T], abandon: Callable[[_Work[Any]], None]) -> None:
        super().__init__()
        self._call = call
        self._abandon = abandon

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not cancelled and self.running():
            self._abandon(self)
        return cancelled

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except (StopIteration, GeneratorExit) as error:  # which a future does not hand on: a loop refuses the one, and closes who waits by the other
            ended = RuntimeError(f"a function raised {type(error).__name__}")
            ended.__cause__ = error
            self.set_exception(ended)
        except BaseException as error:  # the one who waits decides what it means
            self.set_exception(error)
        else:
            self.set_result(result)


class AuthorThreads(Executor):
    """At most ``limit`` threads that anybody waits for, started when they are needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[_Work[Any] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._abandoned: set[_Work[Any]] = set()
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        work = _Work(lambda: fn(*args, **kwargs), self._abandon)
        with self._lock:
            if self._shut:
                raise RuntimeError("no author code may start any more")
            self._waiting.put(work)
            if self._idle:
                self._idle -= 1
            elif self._threads < self._limit:
                self._start()
        return work

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - nobody waits for author code
        with self._lock:
            self._shut = True
            while cancel_futures and not self._waiting.empty():
                work = self._waiting.get()
                if work is not None:
                    work.cancel()
            for _ in range(self._threads):
                self._waiting.put(None)

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._serve, name="author code", daemon=True).start()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            work.run()
            with self._lock:
                if work in self._abandoned:
                    self._abandoned.discard(work)
                    return
                if self._waiting.empty():
                    self._idle += 1

    def _abandon(self, work: _Work[Any]) -> None:
        with self._lock:
            if work in self._abandoned or work.done():
                return
            self._abandoned.add(work)
            self._threads -= 1
            log.warning("author_code_abandoned", abandoned=len(self._abandoned))
            if not self._waiting.empty() and not self._shut:
                self._start()
