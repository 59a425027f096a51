"""Renewing leases of runs while their bodies run: on a thread, a loop and a connection of its own, so that author code that holds the executor's loop
starves nobody but itself. `Presence` keeps the leases of steps there, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

import structlog

from rowmill.errors import RowmillError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill_contracts.presences import KeepPresence, PresenceKept
from rowmill_contracts.receipts import Renew, Renewed
from rowmill_contracts.runs import TermAnswer
from rowmill_contracts.topology import RECEIPTS_SETTLE
from rowmill_row_executor.admission_port import BusAdmission
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.endings import NeighbourAway
from rowmill_row_executor.settings import RowExecutorSettings

log = structlog.get_logger()

Result = TypeVar("Result")


class LeaseOwners(Protocol):
    """Who owns the leases that this process holds."""

    async def renew(self, run_id: str, term: int, lease_id: str) -> TermAnswer: ...

    async def keep_presence(self, request: KeepPresence) -> PresenceKept: ...

    async def renew_receipts(self, request: Renew) -> Renewed: ...


OpenOwners = Callable[[], AbstractAsyncContextManager[LeaseOwners]]
"""Opens a connection to them, on the loop that it is called on."""


class BusOwners(BusAdmission):
    """`LeaseOwners` by messages: admission and the receipt-store."""

    async def keep_presence(self, request: KeepPresence) -> PresenceKept:
        return await self._bus.ask(request, RECEIPTS_SETTLE, PresenceKept)

    async def renew_receipts(self, request: Renew) -> Renewed:
        return await self._bus.ask(request, RECEIPTS_SETTLE, Renewed)


@asynccontextmanager
async def owners_of(settings: RowExecutorSettings) -> AsyncIterator[LeaseOwners]:
    """The owners of leases over a bus of its own."""
    async with Bus(settings, service="row-executor-leases") as bus:
        yield BusOwners(bus)


class LeaseThread:
    """Renews each lease at a third of its life. An answer that does not come changes nothing: what the body asks for carries its term."""

    def __init__(self, open_owners: OpenOwners, clock: Clock) -> None:
        self._open_owners = open_owners
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._left = asyncio.Event()
        self._connected = asyncio.Event()
        self._owners: LeaseOwners | None = None
        self._renewals: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._spawned: set[asyncio.Task[None]] = set()
        self._leaving: list[Callable[[], Awaitable[None]]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="leases", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop renewing and close the connection."""
        if self._thread is not None:
            self.call(self._stopping.set)
            await asyncio.to_thread(self._thread.join)

    @contextmanager
    def keeping(self, lease: Lease, on_lost: Callable[[], None]) -> Iterator[None]:
        """Renew the lease inside the block. ``on_lost`` is called on the caller's loop once somebody else has the run, or it was stopped."""
        caller = asyncio.get_running_loop()
        key = (lease.run_id, lease.lease_id)
        self.call(self._begin, key, lease, lambda: caller.call_soon_threadsafe(on_lost))
        try:
            yield
        finally:
            self.call(self._end, key)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the thread's loop, if that is not over."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def carry_out(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do something on the thread's loop, and wait for it on the caller's. Raises what it raises, `NeighbourAway` where the thread is over."""
        if self._loop is None or self._loop.is_closed():
            raise NeighbourAway("leases are not renewed: this process stops")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    def on_stop(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Do this, on the thread's loop, before the connection is closed."""
        self._leaving.append(leave)

    # ---- on the thread ----------------------------------------------------------------------------------------------------------------

    async def owners(self) -> LeaseOwners:
        """Those who own leases, once there is a connection."""
        await self._connected.wait()
        if self._owners is None:
            raise NeighbourAway("leases are not renewed: this process stops")
        return self._owners

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something until the thread stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("lease_work_failed", error=repr(error), exc_info=error)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        opening = asyncio.create_task(self._open_until_stopped())
        await self._stopping.wait()
        if self._connected.is_set():
            await asyncio.gather(*(leave() for leave in self._leaving), return_exceptions=True)
        self._left.set()
        renewals = [*self._renewals.values(), *self._spawned, *([] if opening.done() or self._connected.is_set() else [opening])]
        for task in renewals:
            task.cancel()
        await asyncio.gather(opening, *renewals, return_exceptions=True)

    async def _open_until_stopped(self) -> None:
        async with self._open_owners() as owners:
            self._owners = owners
            self._connected.set()
            await self._left.wait()

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
            if self._owners is None:
                return
            try:
                answer = await self._owners.renew(lease.run_id, lease.term, lease.lease_id)
            except Exception as error:  # whatever it is, the body goes on, and so does this
                log.warning("lease_not_renewed", run_id=lease.run_id, error=str(error), exc_info=unforeseen(error))
                continue
            if not answer.held or answer.stopped:
                on_lost()
                return


def unforeseen(error: Exception) -> Exception | None:
    """The error, to be logged whole, if it is none that a neighbour's silence or refusal makes."""
    return None if isinstance(error, RowmillError) else error
