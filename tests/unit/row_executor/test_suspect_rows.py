"""Rows and bodies that are suspects: while any of their author code runs it is not on record that they are at rest; while they wait it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.row_executor.conftest import CODE, RUN, Bench
from tests.unit.row_executor.leads import FindIn, Tools, dataset, found, settled

from rowmill import Context, column, play, steps
from rowmill.runtime.rest import Rest, waiting
from rowmill_contracts.rows import RowTask
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.settling import PageTicket

LONG = 0.02
"""Seconds for which author code waits: longer than it takes to be at rest here."""


class Record:
    """Counts how often a rest began, and is asked by author code whether it is on record as at rest: `seen` must have no True."""

    def __init__(self) -> None:
        self.rests = 0
        self.marked = False
        self.seen: list[bool] = []

    async def set(self) -> None:
        await asyncio.sleep(0)
        self.rests += 1
        self.marked = True

    async def clear(self) -> None:
        await asyncio.sleep(0)
        self.marked = False

    def look(self) -> bool:
        self.seen.append(self.marked)
        return True

    def look_for_long(self) -> bool:
        """In a thread."""
        for _ in range(10):
            time.sleep(LONG / 10)
            self.look()
        return True


async def until(said: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not said():
            await asyncio.sleep(0)


async def work(bench: Bench, record: Record, program: Any) -> None:
    """Work one row as a suspect that was at rest before it began."""
    rest = Rest(record, settling=0.0)
    runner = bench.runner()
    runner.start()
    try:
        async with asyncio.timeout(20), waiting(rest):
            await until(lambda: record.marked)
            ticket = PageTicket(1, rest)
            runner.submit(bench.lane(program), [RowTask(key="k", index=0, page=0, data=msgspec.Raw(b'{"n":1}'))], ticket)
            await ticket.wait()
    finally:
        await runner.stop()


def by_hand(record: Record, tools: Tools) -> Any:
    del tools
    return lambda row: record.look()


def that_waits(record: Record, tools: Tools) -> Any:
    del tools

    async def resolver(row: Any) -> bool:
        for _ in range(3):
            record.look()
            await asyncio.sleep(LONG)
        return record.look()

    return resolver


def that_calls(record: Record, tools: Tools) -> Any:
    async def one(ctx: Any, name: str) -> None:
        await ctx.call(tools.find, FindIn(domain=name), id=name)
        record.look()

    async def resolver(row: Any, ctx: Any) -> bool:
        record.look()
        await one(ctx, "alone")
        await asyncio.gather(one(ctx, "a"), one(ctx, "b"))
        return record.look()

    return resolver


def in_a_thread(record: Record, tools: Tools) -> Any:
    del tools

    @column(blocking=True)
    def resolver(row: Any) -> bool:
        return record.look_for_long()

    return resolver


def in_a_step(record: Record, tools: Tools) -> Any:
    del tools

    async def slow() -> bool:
        record.look()
        await asyncio.sleep(LONG)
        return record.look()

    async def resolver(row: Any, ctx: Any) -> bool:
        await ctx.step("slow", slow)
        await ctx.step("thread", record.look_for_long, blocking=True)
        return record.look()

    return steps().step("one", resolver).returns(lambda row: record.look())


RESTS = {by_hand: 1, that_waits: 4, that_calls: 4, in_a_thread: 1, in_a_step: 2}
"""How often each is at rest at least: before it begins, and whenever it waits."""


@pytest.mark.parametrize("kind", RESTS)
async def test_author_code_of_a_suspect_row_never_runs_while_it_is_on_record_as_at_rest(bench: Bench, kind: Any) -> None:
    record = Record()

    async def later(item: CallItem) -> CallOutcome:
        await asyncio.sleep(LONG)
        return found("a@b.c")(item)

    bench.answer = later
    program = dataset(a=kind(record, Tools())).program()
    await work(bench, record, program)
    assert [row.status for row in settled(bench)] == ["completed"]
    assert record.seen
    assert not any(record.seen)
    assert record.rests >= RESTS[kind]


async def test_a_body_of_a_suspect_is_watched_likewise(bench: Bench) -> None:
    record, tools = Record(), Tools()

    async def later(item: CallItem) -> CallOutcome:
        await asyncio.sleep(LONG)
        return found("a@b.c")(item)

    bench.answer = later
    rest = Rest(record, settling=0.0)

    @play("suspected")
    async def suspected(ctx: Context) -> bool:
        record.look()
        await ctx.call(tools.find, FindIn(domain="x"))
        return record.look()

    bench.start(suspected)
    taken = await bench.admission.take(RUN, lease_id="lease")
    assert taken.run is not None
    async with waiting(rest):
        await until(lambda: record.marked)
    await bench.driver.drive(suspected, taken.run, Lease(RUN, taken.term, "lease", 8), CODE, rest)
    ending = bench.admission.runs[RUN].ending
    assert ending is not None
    assert ending.outcome == "completed"
    assert record.seen == [False, False]
    assert record.rests >= 2
