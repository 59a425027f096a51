"""Rows, bodies and key functions that are suspects: while any of their author code runs that is on record, and while they wait it is not."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec
import pytest
from tests.unit.row_executor.conftest import CODE, RUN, Bench
from tests.unit.row_executor.leads import FindIn, Tools, dataset, found, settled

from rowmill import Context, column, play, steps
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.rest import Rest
from rowmill_contracts.row_keys import KeyPage
from rowmill_contracts.rows import RowTask
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.engine import Captures
from rowmill_row_executor.handlers import KeysHandler
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_row_executor.settling import PageTicket

LONG = 0.02
"""Seconds for which author code waits: longer than it takes to be at rest here."""


class Record:
    """Counts how often it came to rest. What author code has `seen`: whether it was on record then that it is at work."""

    def __init__(self) -> None:
        self.rested = 0
        self.marked = False
        self.seen: list[bool] = []

    async def works(self) -> None:
        await asyncio.sleep(0)
        self.marked = True

    async def rests(self) -> None:
        await asyncio.sleep(0)
        self.rested += 1
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


async def work(bench: Bench, record: Record, program: Any) -> None:
    """Work one row as a suspect."""
    runner = bench.runner()
    runner.start()
    ticket = PageTicket(1, Rest(record, settling=0.0))
    runner.submit(bench.lane(program), [RowTask(key="k", index=0, page=0, data=msgspec.Raw(b'{"n":1}'))], ticket)
    try:
        async with asyncio.timeout(20):
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


RESTS = {by_hand: 0, that_waits: 3, that_calls: 2, in_a_thread: 0, in_a_step: 1}
"""How often each comes to rest at least before its end: whenever it waits."""


@pytest.mark.parametrize("kind", RESTS)
async def test_author_code_of_a_suspect_row_never_runs_unless_it_is_on_record_that_it_does(bench: Bench, kind: Any) -> None:
    record = Record()

    async def later(item: CallItem) -> CallOutcome:
        await asyncio.sleep(LONG)
        return found("a@b.c")(item)

    bench.answer = later
    program = dataset(a=kind(record, Tools())).program()
    await work(bench, record, program)
    assert [row.status for row in settled(bench)] == ["completed"]
    assert record.seen
    assert all(record.seen)
    assert record.rested >= RESTS[kind]


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
    await bench.driver.drive(suspected, taken.run, Lease(RUN, taken.term, "lease", 8), CODE, rest)
    ending = bench.admission.runs[RUN].ending
    assert ending is not None
    assert ending.outcome == "completed"
    assert record.seen == [True, True]
    assert record.rested


async def test_a_page_of_keys_that_is_suspect_is_at_work_in_the_body_and_in_the_key_function(bench: Bench) -> None:
    record = Record()
    answers: list[Any] = []

    class Replies:
        async def reply(self, delivery: Delivery, message: Any) -> None:
            answers.append(message)

    @play("keyed")
    async def keyed(ctx: Context) -> Any:
        record.look()
        return await ctx.dataset("leads", [{"n": 1}]).with_column("a", lambda row: 1).run(key=lambda row: f"{row['n']} {record.look()}")

    bench.start(keyed)
    handler = KeysHandler(Captures(bench.engine, RowExecutorSettings()), cast("Any", None), cast("Any", Replies()))
    rest = Rest(record, settling=0.0)
    page = KeyPage(run_id=RUN, dataset="leads", page=0, first_index=0, rows=[msgspec.Raw(b'{"n":1}')])
    for rested in (1, 2):  # the second time without the body
        await handler(Delivery(page, b"", "executor.keys.v1", rest=rest))
        async with asyncio.timeout(20):
            while record.rested < rested:
                await asyncio.sleep(0)
    assert [len(answer.keys) for answer in answers] == [1, 1]
    assert record.seen == [True, True, True]
