"""Settling: pages out, and pages of tasks over only when each row is safe."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rowmill_contracts.envelope import PAGE_ROWS, Message
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.runs import ParkedRow, RowsParked
from rowmill_row_executor.ports import DatasetOfRun
from rowmill_row_executor.settling import BusSettler, PageTicket

LEADS = DatasetOfRun("run", 1, "org", "play", "leads")


class ConfirmingBus:
    """Confirms a message when the test says so."""

    def __init__(self) -> None:
        self.published: list[tuple[str, Message]] = []
        self.confirm = asyncio.Event()

    async def publish(self, message: Message, key: str) -> None:
        self.published.append((key, message))
        await self.confirm.wait()


def row(index: int, size: int = 10) -> SettledRow:
    return SettledRow(key=str(index), index=index, page=0, attempt=1, status="completed", input=msgspec.Raw(b'"' + b"x" * size + b'"'))


def parked(index: int) -> ParkedRow:
    return ParkedRow(key=str(index), index=index, page=0, attempt=1, waits=1, wait_ms=5)


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_page_is_over_when_its_last_row_is_confirmed() -> None:
    bus = ConfirmingBus()
    settler = BusSettler(bus, page_gather=0.005)
    ticket = PageTicket(3)
    over = asyncio.create_task(ticket.wait())
    settler.settle(LEADS, row(0), ticket)
    settler.settle(LEADS, row(1), ticket)
    settler.park(LEADS, parked(2), ticket, reason="rate_limited")
    await turn()
    assert not over.done()
    bus.confirm.set()
    await over
    settled = [message for _, message in bus.published if isinstance(message, RowsSettled)]
    waiting = [message for _, message in bus.published if isinstance(message, RowsParked)]
    assert [len(message.rows) for message in settled] == [2]
    assert [(message.reason, message.halted, len(message.rows)) for message in waiting] == [("rate_limited", False, 1)]


async def test_pages_are_cut_by_rows_and_by_bytes() -> None:
    bus = ConfirmingBus()
    bus.confirm.set()
    settler = BusSettler(bus, page_gather=0.005)
    many = PageTicket(2 * PAGE_ROWS + 50)
    for index in range(2 * PAGE_ROWS + 50):
        settler.settle(LEADS, row(index), many)
    await many.wait()
    large = PageTicket(4)
    for index in range(4):
        settler.settle(LEADS, row(index, 400_000), large)
    await large.wait()
    sizes = [len(message.rows) for _, message in bus.published if isinstance(message, RowsSettled)]
    assert (sum(sizes[:-2]), max(sizes), sizes[-2:]) == (2 * PAGE_ROWS + 50, PAGE_ROWS, [2, 2])


async def test_rows_of_different_reasons_are_parked_apart() -> None:
    bus = ConfirmingBus()
    bus.confirm.set()
    settler = BusSettler(bus, page_gather=0.005)
    ticket = PageTicket(3)
    settler.park(LEADS, parked(0), ticket, reason="rate_limited")
    settler.park(LEADS, parked(1), ticket, reason="budget", halted=True)
    settler.park(LEADS, parked(2), ticket, reason="rate_limited")
    await ticket.wait()
    told = sorted((message.reason, message.halted, len(message.rows)) for _, message in bus.published if isinstance(message, RowsParked))
    assert told == [("budget", True, 1), ("rate_limited", False, 2)]


async def test_rows_that_wait_for_one_provider_are_parked_apart_by_what_it_did() -> None:
    bus = ConfirmingBus()
    bus.confirm.set()
    settler = BusSettler(bus, page_gather=0.005)
    ticket = PageTicket(2)
    reasons = ["provider there: connection_failed", "provider there: http_429"]
    for number, reason in enumerate(reasons):
        settler.park(LEADS, parked(number), ticket, reason=reason)
    await ticket.wait()
    assert sorted(message.reason for _, message in bus.published if isinstance(message, RowsParked)) == reasons


async def test_rows_that_wait_for_one_person_are_parked_together_whatever_each_was_told() -> None:
    """A provider that wants to be paid may name each request."""
    bus = ConfirmingBus()
    bus.confirm.set()
    settler = BusSettler(bus, page_gather=0.005)
    ticket = PageTicket(3)
    for number in range(3):
        settler.park(LEADS, parked(number), ticket, reason=f"payment: request {number} is not paid", halted=True)
    await ticket.wait()
    told = [(message.reason, len(message.rows)) for _, message in bus.published if isinstance(message, RowsParked)]
    assert told == [("payment: request 0 is not paid", 3)]


async def test_a_page_without_rows_is_over_at_once() -> None:
    await PageTicket(0).wait()


async def test_a_row_that_the_engine_could_not_work_has_its_page_worked_again() -> None:
    ticket = PageTicket(2)
    ticket.done()
    ticket.fail(RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        await ticket.wait()
