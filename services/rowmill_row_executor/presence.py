"""That this process is there, and its leases of steps: kept on the thread of leases, so that author code that holds the executor's loop ends neither.

Two requests do for all steps: one that the process is there (every third of what that lasts), and one that renews what runs for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from rowmill.errors import AskDied, RowmillError
from rowmill.runtime import asking
from rowmill.runtime.clock import Clock, backoff, new_id
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import MAX_ITEMS, LeaseRef, Renew
from rowmill_row_executor.leases import LeaseThread, unforeseen

log = structlog.get_logger()

_AGAIN = 5.0
"""Seconds between two tries to say so for the first time, at most."""

_LEAVING = 1.0
"""Seconds that a process takes to say that it goes. Its presence ends by itself, if later."""


class Presence:
    """The presence of one process, from its first step on. ``renewal``: seconds after which leases of steps that run are renewed."""

    def __init__(self, thread: LeaseThread, clock: Clock, *, renewal: float) -> None:
        self._thread = thread
        self._clock = clock
        self._renewal = renewal
        self._name = ""
        self._naming = asyncio.Lock()
        self._given_up: Exception | None = None
        self._held: dict[str, tuple[LeaseRef, Callable[[], object]]] = {}
        thread.on_stop(self._leave)

    async def present(self, instead_of: str = "") -> str:
        """The name under which this process is there, stored, however long that takes; another than ``instead_of``.

        Raises:
            UnavailableError: this process stops.
            Exception: the last of ten errors that say more than that nobody answered; so do those who waited for the same.

        """
        return await self._thread.carry_out(lambda: self._present(instead_of))

    @contextmanager
    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> Iterator[None]:
        """Renew a running lease inside the block. ``on_lost`` is called on the caller's loop once somebody else has it."""
        caller = asyncio.get_running_loop()
        self._thread.call(self._held.__setitem__, lease.lease_id, (lease, lambda: caller.call_soon_threadsafe(on_lost)))
        try:
            yield
        finally:
            self._thread.call(self._held.pop, lease.lease_id, None)

    # ---- on the thread ----------------------------------------------------------------------------------------------------------------

    async def _present(self, instead_of: str) -> str:
        before = self._given_up
        async with self._naming:
            if self._name in ("", instead_of):
                if self._given_up is not None and self._given_up is not before:
                    raise self._given_up
                first = not self._name
                name = new_id("executor-")
                lasting = await self._begin(name)
                self._name = name
                if first:
                    self._thread.spawn(self._stay(lasting))
                    self._thread.spawn(self._renew_in_turn())
                else:
                    log.warning("presence_ended", detail="this process was away for too long; what it runs may be run by others, too")
                    self._thread.spawn(self._renew())
            return self._name

    async def _begin(self, name: str) -> float:
        failures = refusals = 0
        owners = await self._thread.owners()
        while True:
            try:
                return (await owners.keep_presence(KeepPresence(presence=name))).seconds
            except Exception as error:
                failures += 1
                refusals += isinstance(error, AskDied) or not isinstance(error, RowmillError)
                if refusals >= asking.GIVEN_UP_AFTER:
                    self._given_up = error
                    raise
                log.warning("presence_not_begun", failures=failures, error=str(error), exc_info=unforeseen(error))
                await self._clock.sleep(backoff(failures, first=0.1, limit=_AGAIN))

    async def _keep(self, name: str, *, leave: bool = False) -> float | None:
        """How long the presence lasts; None: it has ended."""
        owners = await self._thread.owners()
        answer = await owners.keep_presence(KeepPresence(presence=name, leave=leave))
        return answer.seconds if answer.held else None

    async def _stay(self, lasting: float) -> None:
        """Nothing may end this, nor the next: what the process runs would be run by others, too, and nobody would know why."""
        while True:
            await self._clock.sleep(lasting / 3)
            name = self._name
            try:
                if await self._keep(name) is None:
                    await self._present(instead_of=name)
            except Exception as error:
                log.warning("presence_not_kept", error=str(error), exc_info=unforeseen(error))

    async def _renew_in_turn(self) -> None:
        while True:
            await self._clock.sleep(self._renewal)
            try:
                await self._renew()
            except Exception as error:
                log.warning("steps_not_renewed", leases=len(self._held), error=str(error), exc_info=unforeseen(error))

    async def _renew(self) -> None:
        """Renew what is held, bound to the presence as it is named now. What moved is told to who runs it."""
        owners = await self._thread.owners()
        held = list(self._held.values())
        for start in range(0, len(held), MAX_ITEMS):
            page = held[start : start + MAX_ITEMS]
            try:
                kept = (await owners.renew_receipts(Renew(leases=[lease for lease, _ in page], presence=self._name))).held
            except Exception as error:
                log.warning("steps_not_renewed", leases=len(page), error=str(error), exc_info=unforeseen(error))
                continue
            for (lease, on_lost), is_kept in zip(page, kept, strict=False):
                if not is_kept and lease.lease_id in self._held:
                    _tell(on_lost)  # which means nothing where its outcome is being stored, or was stored just now

    async def _leave(self) -> None:
        if self._name:
            with suppress(RowmillError, TimeoutError):
                async with asyncio.timeout(_LEAVING):
                    await self._keep(self._name, leave=True)


def _tell(on_lost: Callable[[], object]) -> None:
    try:
        on_lost()
    except RuntimeError as error:  # the loop that it runs on is closed
        log.warning("lost_step_not_told", error=str(error))
