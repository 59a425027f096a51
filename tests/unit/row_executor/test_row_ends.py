"""Rows that take too long, and rows that need more memory than there is."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.unit.row_executor.conftest import RUN, Bench
from tests.unit.row_executor.leads import dataset, settled

from rowmill.runtime.clock import SystemClock
from rowmill_contracts.rows import RowTask
from rowmill_row_executor.row_runner import RowRunner
from rowmill_row_executor.settling import PageTicket


async def run(bench: Bench, program: Any, rows: int, *, row_timeout: float, concurrency: int | None = None, **runner_options: Any) -> PageTicket:
    """Run rows under a clock that goes, for as long as it takes; the ticket is done unless the process would have ended."""
    runner = RowRunner(bench.settler, SystemClock(), rows_at_once=1000, row_timeout=row_timeout, loop_slice=0.005, **runner_options)
    runner.start()
    ticket = PageTicket(rows)
    tasks = [RowTask(key=f"key-{n}", index=n, page=0, data=msgspec.Raw(msgspec.json.encode({"n": n}))) for n in range(rows)]
    runner.submit(bench.lane(program, concurrency), tasks, ticket)
    try:
        async with asyncio.timeout(20):
            await ticket.wait()
    finally:
        await runner.stop()
    return ticket


async def for_ever(row: Any) -> Any:
    if row["n"] == 1:
        await asyncio.Event().wait()
    return row["n"]


async def test_a_row_that_never_returns_fails_at_its_column_and_keeps_the_cells_before_it(bench: Any) -> None:
    await run(bench, dataset(a=lambda row: row["n"] * 2, b=for_ever).program(), 3, row_timeout=0.05)
    rows = {row.index: row for row in settled(bench)}
    assert [rows[n].status for n in range(3)] == ["completed", "failed", "completed"]
    assert (rows[1].error.code, rows[1].error.column, rows[1].error.row) == ("row_timeout", "b", 1)
    assert msgspec.json.decode(rows[1].values) == {"a": 2, "b": None}


async def test_a_row_that_swallows_its_cancellation_is_settled_without_it_once_and_frees_its_place(bench: Any) -> None:
    let_go = asyncio.Event()

    async def stubborn(row: Any) -> Any:
        while row["n"] == 0 and not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return row["n"]

    async def let_it_go() -> None:
        async with asyncio.timeout(20):
            while len(bench.settler.settled.get((RUN, "leads"), {})) < 3:
                await asyncio.sleep(0.01)
        let_go.set()

    letting = asyncio.create_task(let_it_go())
    await run(bench, dataset(a=stubborn).program(), 3, row_timeout=0.05, concurrency=1)
    await letting
    await asyncio.sleep(0.05)
    assert sorted((row.index, row.status) for row in settled(bench)) == [(0, "failed"), (1, "completed"), (2, "completed")]


async def test_a_row_that_catches_its_cancellation_and_answers_has_completed(bench: Any) -> None:
    async def catching(row: Any) -> Any:
        try:
            return await for_ever(row)
        except asyncio.CancelledError:
            return "fallback"

    await run(bench, dataset(a=catching).program(), 2, row_timeout=0.05)
    assert bench.settler.values(RUN, "leads")[1] == {"a": "fallback"}


@pytest.mark.parametrize("waits", [False, True])
async def test_memory_at_its_limit_is_no_failure_of_the_row_that_meets_it(bench: Any, waits: bool) -> None:
    ended: list[bool] = []

    def greedy(row: Any) -> Any:
        raise MemoryError

    async def greedy_later(row: Any) -> Any:
        await asyncio.sleep(0)
        raise MemoryError

    program = dataset(a=greedy_later if waits else greedy).program()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await run(bench, program, 1, row_timeout=60, out_of_memory=lambda: ended.append(True))
    assert ended == [True]
    assert not bench.settler.settled
