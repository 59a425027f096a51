"""Waiting for room, where the tables say what others have out and who is called back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from rowmill.errors import UnavailableError
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_admission.datasets import Dataset
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.rooms import RoomLimits, Rooms
from rowmill_contracts.runs import OpenDataset

DEFINITION = OpenDataset(run_id="r", term=1, dataset="d", input_id="i", columns=[], code_digest="c")


class Tables:
    """What they say of the one dataset. ``failing``: how the next looks end."""

    def __init__(self) -> None:
        self.called_back = False
        self.failing: list[Exception] = []
        self.looks = 0
        self.looked = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()

    async def fetch(self, *_: Any) -> list[dict[str, Any]]:
        self.looks += 1
        self.looked.set()
        await self.answering.wait()
        if self.failing:
            raise self.failing.pop()
        return [
            {
                "dataset_seq": 1,
                "run_id": "r",
                "org": "o",
                "run_window": 100,
                "sent": 10,
                "sent_bytes": 10,
                "ended": 0,
                "waiting": 0,
                "called_back": self.called_back,
            }
        ]


@pytest.fixture
def tables() -> Tables:
    return Tables()


@pytest.fixture
async def desk(tables: Tables) -> AsyncIterator[RoomDesk]:
    desk = RoomDesk(Rooms(RoomLimits(1_000, 1_000_000)), cast("Database", tables), SystemClock(), poll=0.001, back_for=15.0)
    yield desk
    await desk.stop()


def dataset(*, sent: int) -> Dataset:
    return Dataset(dataset_seq=1, run_id="r", dataset="d", input_id="i", definition=DEFINITION, sent=sent, sent_bytes=sent, run_window=100)


async def test_a_feeder_that_begins_learns_first_whose_rows_are_called_back(tables: Tables, desk: RoomDesk) -> None:
    tables.called_back = True
    desk.enter(dataset(sent=10), "o")
    waiting = asyncio.create_task(desk.wait(1, page=1, rows=10, size=10))
    async with asyncio.timeout(10):
        while tables.looks < 3:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        tables.called_back = False
        assert await waiting


async def test_a_run_of_which_nothing_is_out_is_not_looked_for(tables: Tables, desk: RoomDesk) -> None:
    desk.enter(dataset(sent=0), "o")
    assert await desk.wait(1, page=0, rows=10, size=10)
    assert tables.looks == 0


@pytest.mark.parametrize("error", [UnavailableError("the database is away"), KeyError("nobody foresaw this")])
async def test_room_is_looked_for_again_after_an_error(tables: Tables, desk: RoomDesk, error: Exception) -> None:
    tables.called_back = True
    desk.enter(dataset(sent=10), "o")
    waiting = asyncio.create_task(desk.wait(1, page=1, rows=10, size=10))
    async with asyncio.timeout(10):
        while not tables.looks:
            await asyncio.sleep(0.001)
        tables.failing = [error] * 3
        while tables.failing:
            await asyncio.sleep(0.001)
        tables.called_back = False
        assert await waiting


async def test_what_was_looked_up_a_moment_ago_is_not_looked_up_for_each_page(tables: Tables) -> None:
    desk = RoomDesk(Rooms(RoomLimits(1_000, 1_000_000)), cast("Database", tables), SystemClock(), poll=3600.0, back_for=15.0)
    desk.enter(dataset(sent=10), "o")
    for page in range(3):
        assert await desk.wait(1, page=page, rows=10, size=10)
    await desk.stop()
    assert tables.looks == 1


async def test_looks_follow_one_another(tables: Tables, desk: RoomDesk) -> None:
    """An older answer that came last would take back who was called back meanwhile."""
    tables.answering.clear()
    looks = [asyncio.create_task(desk.look()) for _ in range(2)]
    async with asyncio.timeout(10):
        await tables.looked.wait()
        await asyncio.sleep(0)
        assert tables.looks == 1
        tables.answering.set()
        await asyncio.gather(*looks)
    assert tables.looks == 2


async def test_who_stops_waiting_while_the_tables_are_read_takes_no_room(tables: Tables, desk: RoomDesk) -> None:
    tables.answering.clear()
    desk.enter(dataset(sent=10), "o")
    waiting = asyncio.create_task(desk.wait(1, page=1, rows=10, size=10))
    async with asyncio.timeout(10):
        await tables.looked.wait()
        desk.stop_waiting(1)
        tables.answering.set()
        assert not await waiting
    assert desk.free() == 1_000 - 10
