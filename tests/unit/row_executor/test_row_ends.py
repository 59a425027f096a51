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


async def run_pages(bench: Bench, program: Any, *ends: int) -> None:
    """Run rows page after page; ``ends``: where each page ends and the next begins."""
    runner = RowRunner(bench.settler, SystemClock(), rows_at_once=1000, row_timeout=60, loop_slice=0.005)
    runner.start()
    lane = bench.lane(program)
    try:
        for first, end in zip((0, *ends), ends, strict=False):
            ticket = PageTicket(end - first)
            runner.submit(lane, [RowTask(key=f"key-{n}", index=n, page=0, data=msgspec.Raw(b'{"n":%d}' % n)) for n in range(first, end)], ticket)
            async with asyncio.timeout(20):
                await ticket.wait()
    finally:
        await runner.stop()


def cancels(row: Any) -> Any:
    if row["n"] == 1:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
    return row["n"]


async def cancels_and_waits(row: Any) -> Any:
    cancels(row)
    await asyncio.sleep(0)
    return row["n"]


async def test_a_row_whose_code_cancels_its_task_ends_no_other(bench: Any) -> None:
    await run_pages(bench, dataset(a=cancels).program(), 3, 5)
    assert [row.status for row in settled(bench)] == ["completed"] * 5


async def test_a_row_whose_code_cancels_its_task_and_waits_fails_at_its_column(bench: Any) -> None:
    await run(bench, dataset(a=lambda row: 7, b=cancels_and_waits).program(), 3, row_timeout=60)
    rows = {row.index: row for row in settled(bench)}
    assert [rows[n].status for n in range(3)] == ["completed", "failed", "completed"]
    assert (rows[1].error.code, rows[1].error.column) == ("row_cancelled", "b")
    assert msgspec.json.decode(rows[1].values) == {"a": 7, "b": None}


async def test_a_group_that_a_row_run_by_hand_leaves_behind_ends_no_other_row(bench: Any) -> None:
    failed = asyncio.Event()

    async def fails() -> None:
        failed.set()
        raise ValueError("child")

    async def groups(row: Any) -> Any:
        if row["n"] == 40:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        if row["n"] == 41:
            await failed.wait()
        return row["n"]

    await run_pages(bench, dataset(a=groups).program(), 30, 45, 50)
    rows = {row.index: row for row in settled(bench)}
    assert [n for n in range(50) if rows[n].status != "completed"] == [40]
    assert "ExceptionGroup" in rows[40].error.message


@pytest.mark.parametrize("loop", ["row runner", "row deadlines"])
async def test_a_loop_of_the_runner_that_ends_is_begun_anew(bench: Any, loop: str) -> None:
    async def ends_the_loop(row: Any) -> Any:
        if row["n"] == 0:
            next(task for task in asyncio.all_tasks() if task.get_name() == loop).cancel()
        return await for_ever(row)

    await run(bench, dataset(a=ends_the_loop).program(), 3, row_timeout=0.05, concurrency=1)
    assert [row.status for row in sorted(settled(bench), key=lambda row: row.index)] == ["completed", "failed", "completed"]


async def test_rows_in_hand_are_dropped_where_the_process_stops(bench: Any) -> None:
    runner = RowRunner(bench.settler, SystemClock(), rows_at_once=1000, row_timeout=60, loop_slice=0.005)
    runner.start()
    begun = asyncio.Event()

    async def begins(row: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    runner.submit(bench.lane(dataset(a=begins).program()), [RowTask(key="key", index=0, page=0, data=msgspec.Raw(b"{}"))], PageTicket(1))
    async with asyncio.timeout(20):
        await begun.wait()
        await runner.stop()
    assert not bench.settler.settled


async def test_an_error_that_cannot_be_put_in_words_fails_its_row_and_no_other(bench: Any) -> None:
    class Unsayable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        __repr__ = __str__

    def raises(row: Any) -> Any:
        if row["n"] == 1:
            raise Unsayable
        return row["n"]

    await run(bench, dataset(a=raises).program(), 3, row_timeout=60)
    rows = {row.index: row for row in settled(bench)}
    assert [rows[n].status for n in range(3)] == ["completed", "failed", "completed"]
    assert "Unsayable" in rows[1].error.message


async def test_a_row_that_cannot_be_handed_in_has_its_page_worked_again_and_ends_no_other(bench: Any) -> None:
    settle = bench.settler.settle

    def fails(of: Any, row: Any, ticket: Any) -> None:
        if row.index == 1:
            raise RuntimeError("not handed in")
        settle(of, row, ticket)

    bench.settler.settle = fails
    runner = RowRunner(bench.settler, SystemClock(), rows_at_once=1000, row_timeout=60, loop_slice=0.005)
    runner.start()
    lane = bench.lane(dataset(a=lambda row: 1).program())
    first, second = PageTicket(2), PageTicket(1)
    try:
        runner.submit(lane, [RowTask(key=f"key-{n}", index=n, page=0, data=msgspec.Raw(b"{}")) for n in (0, 1)], first)
        runner.submit(lane, [RowTask(key="key-2", index=2, page=1, data=msgspec.Raw(b"{}"))], second)
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeError, match="not handed in"):
                await first.wait()
            await second.wait()
    finally:
        await runner.stop()
