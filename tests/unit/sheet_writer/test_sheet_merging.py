"""Requests that wait for a transaction share the next one; a bad one fails nobody else."""

from __future__ import annotations

import asyncio

import pytest

from rowmill.errors import UnavailableError
from rowmill_sheet_writer.merging import Merger


class Work:
    """Doubles numbers once it is let go, and refuses 13. ``batches``: what it was handed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await self.gate.wait()
        if 13 in items:
            raise self.error or ValueError("13")
        return [2 * item for item in items]


def merger(work: Work, *, at_once: int = 1) -> Merger[int, int]:
    return Merger(work, max_rows=10, max_bytes=100, at_once=at_once)


async def start(merger: Merger[int, int], *items: int, rows: int = 1, size: int = 1) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(merger.submit(item, rows=rows, size=size)) for item in items]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_what_waits_behind_a_batch_goes_together_within_the_bounds() -> None:
    work = Work()
    merged = merger(work)
    first = await start(merged, 1)
    by_rows = await start(merged, 2, 3, 4, rows=5)
    by_size = await start(merged, 5, 6, size=60)
    alone = await start(merged, 7, rows=99, size=999)
    work.gate.set()
    assert await asyncio.gather(*first, *by_rows, *by_size, *alone) == [2, 4, 6, 8, 10, 12, 14]
    assert work.batches == [[1], [2, 3], [4, 5], [6], [7]]


async def test_as_many_batches_run_at_once_as_allowed() -> None:
    work = Work()
    merged = merger(work, at_once=2)
    tasks = [*await start(merged, 1), *await start(merged, 2), *await start(merged, 3, 4)]
    assert work.batches == [[1], [2]]
    work.gate.set()
    await asyncio.gather(*tasks)
    assert work.batches == [[1], [2], [3, 4]]


async def test_a_bad_item_fails_alone() -> None:
    work = Work()
    merged = merger(work)
    tasks = [*await start(merged, 1), *await start(merged, 2, 13, 3)]
    work.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [repr(result) for result in results] == ["2", "4", "ValueError('13')", "6"]


async def test_while_a_server_is_away_nothing_is_taken_apart() -> None:
    work = Work()
    work.error = UnavailableError("away")
    merged = merger(work)
    tasks = [*await start(merged, 1), *await start(merged, 2, 13)]
    work.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [int, UnavailableError, UnavailableError]
    assert work.batches == [[1], [2, 13]]


async def test_who_no_longer_waits_is_left_out() -> None:
    work = Work()
    merged = merger(work)
    first = await start(merged, 1)
    [gone, kept] = await start(merged, 2, 3)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    work.gate.set()
    assert await asyncio.gather(*first, kept) == [2, 6]
    assert work.batches == [[1], [3]]
