"""Waiting for room: the asynchronous side of `rooms`, kept true by what counts and feeders store, and by reading the tables."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Database
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.datasets import Dataset
from rowmill_admission.rooms import Ask, Rooms
from rowmill_admission.store import feeding

log = structlog.get_logger()


class RoomDesk:
    """One per process. Feeders wait here; other instances' rows, and who is called back, are seen by reading the tables while somebody waits.
    ``poll``: seconds between two looks. ``back_for``: see `AdmissionSettings`.
    """

    def __init__(self, rooms: Rooms, database: Database, clock: Clock, *, poll: float, back_for: float) -> None:
        self._rooms = rooms
        self._database = database
        self._clock = clock
        self._poll_seconds = poll
        self._back_for = back_for
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._fed_here: set[int] = set()
        self._poller: asyncio.Task[None] | None = None
        self._one_look = asyncio.Lock()
        self._looked_at = -math.inf

    def enter(self, dataset: Dataset, org: str) -> None:
        """A feeder of this process begins."""
        self._fed_here.add(dataset.dataset_seq)
        self._rooms.enter(dataset.dataset_seq, org, dataset.run_id, dataset.run_window)
        self.changed(dataset)

    def leave(self, dataset_seq: int) -> None:
        """A feeder of this process ends. What is in flight stays counted until it has ended."""
        self._fed_here.discard(dataset_seq)
        self.stop_waiting(dataset_seq)
        self._rooms.recorded(dataset_seq, list(flight.granted) if (flight := self._rooms.flight(dataset_seq)) else [])
        self._forget_landed(dataset_seq)
        self._give()

    def changed(self, dataset: Dataset) -> None:
        """The dataset's row in the table changed."""
        flight = self._rooms.flight(dataset.dataset_seq)
        if flight is None:
            return
        flight.sent, flight.sent_bytes = max(flight.sent, dataset.sent), max(flight.sent_bytes, dataset.sent_bytes)
        flight.ended = max(flight.ended, dataset.ended)
        if dataset.state != "open":
            flight.ended = flight.sent
        self._forget_landed(dataset.dataset_seq)
        self._give()

    def resize(self, dataset_seq: int, page: int, rows: int, size: int) -> None:
        self._rooms.resize(dataset_seq, page, rows, size)
        self._give()

    def recorded(self, dataset: Dataset, pages: list[int]) -> None:
        """A commit shows these pages as sent."""
        self._rooms.recorded(dataset.dataset_seq, pages)
        self.changed(dataset)

    async def wait(self, dataset_seq: int, page: int, rows: int, size: int) -> bool:
        """Wait for room for a page; False where waiting was given up (`stop_waiting`)."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[dataset_seq] = future
        try:
            flight = self._rooms.flight(dataset_seq)
            if flight is not None and flight.sent > flight.ended and self._clock.monotonic() > self._looked_at + 2 * self._poll_seconds:
                await self.look()  # nobody did for a while, and rows of its run may have been called back since
            if not future.done():
                self._rooms.ask(Ask(dataset_seq, page, rows, size))
                self._give()
            if not future.done() and self._poller is None:
                self._poller = asyncio.create_task(self._poll(), name="room")
            return await future
        finally:
            self._waiting.pop(dataset_seq, None)
            self._rooms.withdraw(dataset_seq)

    def stop_waiting(self, dataset_seq: int) -> None:
        future = self._waiting.get(dataset_seq)
        if future is not None and not future.done():
            future.set_result(False)

    async def stop(self) -> None:
        if self._poller is not None:
            await cancel_all([self._poller])

    def free(self) -> int:
        """Rows that fit in the common room now."""
        return max(0, self._rooms.limits.rows - self._rooms.rows)

    def keep_free(self, rows: int) -> None:
        """Give out no room of which so many rows could be left free: rows that have waited are due, and go first."""
        self._rooms.kept = min(rows, self._rooms.limits.rows)
        self._give()

    async def look(self) -> None:
        """Take over what the tables say now. One look after the other: the one that is over last is the newest."""
        async with self._one_look:
            self.refresh(await feeding.flights(self._database, self._back_for))
            self._looked_at = self._clock.monotonic()

    def _give(self) -> None:
        if not self._rooms.asking:
            return
        for ask in self._rooms.grant():
            future = self._waiting.get(ask.dataset_seq)
            if future is not None and not future.done():
                future.set_result(True)

    def _forget_landed(self, dataset_seq: int) -> None:
        flight = self._rooms.flight(dataset_seq)
        if flight is not None and dataset_seq not in self._fed_here and flight.sent <= flight.ended:
            self._rooms.leave(dataset_seq)

    async def _poll(self) -> None:
        try:
            while self._rooms.asking:
                await asyncio.sleep(self._poll_seconds)
                try:
                    await self.look()
                except UnavailableError as error:
                    log.warning("room_not_looked_for", error=str(error))
                except Exception:  # whoever waits for room would wait for ever
                    log.exception("room_not_looked_for")
        finally:
            self._poller = None

    def refresh(self, flights: Iterable[feeding.StoredFlight]) -> None:
        """Take over what the tables say of every dataset with rows in flight."""
        stored = {each.dataset_seq: each for each in flights}
        for seq, each in stored.items():
            flight = self._rooms.enter(seq, each.org, each.run_id, each.window)
            flight.sent, flight.sent_bytes = max(flight.sent, each.sent), max(flight.sent_bytes, each.sent_bytes)
            flight.ended = max(flight.ended, each.ended)
            flight.waiting = each.waiting
            flight.called_back = each.called_back
        for seq in self._rooms.known() - set(stored) - self._fed_here:
            self._rooms.leave(seq)
        for seq in self._fed_here - set(stored):
            landed = self._rooms.flight(seq)
            if landed is not None:
                landed.waiting = 0
                landed.called_back = False
        self._give()
