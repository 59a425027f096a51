"""Renewing leases of runs while their bodies run: on a thread, a loop and a connection of its own, so that author code that holds the executor's loop
starves nobody but itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill_row_executor.admission_port import BusAdmission
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.ports import Admission
from rowmill_row_executor.settings import RowExecutorSettings

log = structlog.get_logger()

OpenAdmission = Callable[[], AbstractAsyncContextManager[Admission]]
"""Opens a connection to admission, on the loop that it is called on."""


@asynccontextmanager
async def admission_of(settings: RowExecutorSettings) -> AsyncIterator[Admission]:
    """Admission over a bus of its own."""
    async with Bus(settings, service="row-executor-leases") as bus:
        yield BusAdmission(bus)


class LeaseThread:
    """Renews each lease at a third of its life. An answer that does not come changes nothing: what the body asks for carries its term."""

    def __init__(self, open_admission: OpenAdmission, clock: Clock) -> None:
        self._open_admission = open_admission
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._connected = asyncio.Event()
        self._admission: Admission | None = None
        self._renewals: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="leases", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop renewing and close the connection."""
        if self._thread is not None:
            self._there(self._stopping.set)
            await asyncio.to_thread(self._thread.join)

    @contextmanager
    def keeping(self, lease: Lease, on_lost: Callable[[], None]) -> Iterator[None]:
        """Renew the lease inside the block. ``on_lost`` is called on the caller's loop once somebody else has the run, or it was stopped."""
        caller = asyncio.get_running_loop()
        key = (lease.run_id, lease.lease_id)
        self._there(self._begin, key, lease, lambda: caller.call_soon_threadsafe(on_lost))
        try:
            yield
        finally:
            self._there(self._end, key)

    def _there(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the thread's loop, if that is not over."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        opening = asyncio.create_task(self._open_until_stopped())
        await self._stopping.wait()
        renewals = [*self._renewals.values(), *([] if opening.done() or self._connected.is_set() else [opening])]
        for task in renewals:
            task.cancel()
        await asyncio.gather(opening, *renewals, return_exceptions=True)

    async def _open_until_stopped(self) -> None:
        async with self._open_admission() as admission:
            self._admission = admission
            self._connected.set()
            await self._stopping.wait()

    def _begin(self, key: tuple[str, str], lease: Lease, on_lost: Callable[[], object]) -> None:
        self._renewals[key] = asyncio.create_task(self._renew(lease, on_lost))

    def _end(self, key: tuple[str, str]) -> None:
        renewal = self._renewals.pop(key, None)
        if renewal is not None:
            renewal.cancel()

    async def _renew(self, lease: Lease, on_lost: Callable[[], object]) -> None:
        while True:
            await self._clock.sleep(lease.seconds / 3)
            await self._connected.wait()
            if self._admission is None:
                return
            try:
                answer = await self._admission.renew(lease.run_id, lease.term, lease.lease_id)
            except UnavailableError as error:
                log.warning("lease_not_renewed", run_id=lease.run_id, error=str(error))
                continue
            if not answer.held or answer.stopped:
                on_lost()
                return
