"""Settling: rows that ended go to the sheet writer in pages, rows that must wait to admission.

A page of tasks is over when each of its rows is safe: its message confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from rowmill.runtime.gathering import Gatherer
from rowmill.runtime.rest import Rest
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS, Message
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.runs import ParkedRow, RowsParked
from rowmill_contracts.topology import ADMISSION_PARKED, SHEETS_SETTLE
from rowmill_row_executor.ports import DatasetOfRun, Ticket

RowT = TypeVar("RowT", SettledRow, ParkedRow)
KeyT = TypeVar("KeyT")


class SettleBus(Protocol):
    """The part of the bus that settling speaks to: it returns once the message is confirmed, however long that takes."""

    async def publish(self, message: Message, key: str) -> None: ...


class PageTicket:
    """Counts down the rows of a page that are not safe yet. ``rest``: of the one row of a suspect."""

    __slots__ = ("_open", "_over", "rest")

    def __init__(self, rows: int, rest: Rest | None = None) -> None:
        self.rest = rest
        self._open = rows
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not rows:
            self._over.set_result(None)

    @property
    def open(self) -> int:
        return self._open

    def done(self) -> None:
        self._open -= 1
        if not self._open and not self._over.done():
            self._over.set_result(None)

    def fail(self, error: BaseException) -> None:
        """The engine could not work a row (author code's errors are outcomes, not this): the page must be worked again."""
        if not self._over.done():
            self._over.set_exception(error)

    def keep(self, row: ParkedRow, *, reason: str, halted: bool) -> bool:  # noqa: ARG002 - as the port says
        return False

    async def wait(self) -> None:
        """Until every row is settled or parked, confirmed. Raises what `fail` was given."""
        await asyncio.shield(self._over)


class _Outbox(Generic[RowT]):
    """Rows of one dataset (and, for parked ones, of one reason) on their way out. ``on_empty`` is called whenever none is left."""

    __slots__ = ("_gatherer", "_on_empty", "_send", "_under_way")

    def __init__(self, send: Callable[[list[RowT]], Awaitable[None]], on_empty: Callable[[], None], max_age: float) -> None:
        self._send: Callable[[list[RowT]], Awaitable[None]] = send
        self._on_empty = on_empty
        self._under_way = 0
        self._gatherer: Gatherer[tuple[RowT, Ticket]] = Gatherer(
            self._flush, max_items=PAGE_ROWS, max_bytes=PAGE_BYTES, size=_size_of, max_age=max_age
        )

    def add(self, row: RowT, ticket: Ticket) -> None:
        self._under_way += 1
        self._gatherer.add((row, ticket))

    async def _flush(self, items: list[tuple[RowT, Ticket]]) -> None:
        await self._send([row for row, _ in items])
        for _, ticket in items:
            ticket.done()
        self._under_way -= len(items)
        if not self._under_way:
            self._on_empty()


class BusSettler:
    """Publishes what rows came to. Nothing here waits in the caller: the ticket tells."""

    def __init__(self, bus: SettleBus, *, page_gather: float) -> None:
        self._bus = bus
        self._page_gather = page_gather
        self._settling: dict[DatasetOfRun, _Outbox[SettledRow]] = {}
        self._parking: dict[tuple[DatasetOfRun, str, bool], _Outbox[ParkedRow]] = {}

    def settle(self, of: DatasetOfRun, row: SettledRow, ticket: Ticket) -> None:
        outbox = self._settling.get(of)
        if outbox is None:
            outbox = self._settling[of] = self._settle_outbox(of)
        outbox.add(row, ticket)

    def park(self, of: DatasetOfRun, row: ParkedRow, ticket: Ticket, *, reason: str, halted: bool = False) -> None:
        kind = reason.partition(":")[0] if halted else reason  # what follows may be another for each row: the first stands for all
        outbox = self._parking.get((of, kind, halted))
        if outbox is None:
            outbox = self._parking[of, kind, halted] = self._park_outbox(of, kind, reason, halted=halted)
        outbox.add(row, ticket)

    def _settle_outbox(self, of: DatasetOfRun) -> _Outbox[SettledRow]:
        async def send(rows: list[SettledRow]) -> None:
            message = RowsSettled(run_id=of.run_id, number=of.number, org=of.org, play=of.play, dataset=of.dataset, rows=rows)
            await self._bus.publish(message, SHEETS_SETTLE)

        return _Outbox(send, lambda: _forget(self._settling, of), self._page_gather)

    def _park_outbox(self, of: DatasetOfRun, kind: str, reason: str, *, halted: bool) -> _Outbox[ParkedRow]:
        async def send(rows: list[ParkedRow]) -> None:
            message = RowsParked(run_id=of.run_id, dataset=of.dataset, reason=reason, rows=rows, halted=halted)
            await self._bus.publish(message, ADMISSION_PARKED)

        return _Outbox(send, lambda: _forget(self._parking, (of, kind, halted)), self._page_gather)


def _size_of(item: tuple[SettledRow | ParkedRow, Ticket]) -> int:
    row = item[0]
    if isinstance(row, ParkedRow):
        return len(row.key)
    return len(memoryview(row.input)) + len(memoryview(row.values)) + len(memoryview(row.meta))


def _forget(outboxes: dict[KeyT, _Outbox[RowT]], key: KeyT) -> None:
    outboxes.pop(key, None)
