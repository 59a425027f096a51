"""Calls and reads of a body: made once, on record, the same in every replay."""

from __future__ import annotations

import asyncio
import itertools
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from rowmill import Context, HttpTool, Provider, play
from rowmill.errors import AskTimeout, ToolFailed
from rowmill_contracts.rows import SettledRow
from rowmill_contracts.runs import RunOptions
from rowmill_contracts.tools import CallItem, CallOutcome, ToolFailure
from rowmill_row_executor.ports import DatasetOfRun
from rowmill_row_executor.settling import PageTicket

RUN = "run-1"


class AskIn(BaseModel):
    question: str


class AskOut(BaseModel):
    answer: int


@pytest.fixture
def ask(fresh_registry: Any) -> Any:
    oracle = Provider("oracle", base_url="http://127.0.0.1:1")

    @oracle.post("/ask", effect="read", cost=Decimal("0.5"))
    class Ask(HttpTool[AskIn, AskOut]):
        pass

    return Ask


def answered(item: CallItem) -> CallOutcome:
    raw = {"answer": 42}
    return CallOutcome(call_id=item.call_id, outcome="completed", result=msgspec.Raw(msgspec.json.encode({"raw": raw})), receipt="r")


def output(ending: Any) -> Any:
    assert ending.outcome == "completed", ending
    return msgspec.json.decode(ending.output)


async def test_a_call_of_a_body_is_made_once_over_all_replays(bench: Any, ask: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> Any:
        result = await ctx.call(ask, {"question": "?"})
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return result.data.answer

    bench.answer = answered
    bench.start(asks)
    assert (await bench.advance()).outcome == "waiting"
    bench.close("a", admitted=1, completed=1)
    assert output(await bench.advance()) == 42
    assert [item.row for item in bench.desk.asked] == [""]


async def test_a_deferred_call_has_the_body_run_again_later(bench: Any, ask: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> Any:
        return (await ctx.call(ask, {"question": "?"})).data.answer

    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="deferred", wait_ms=700)
    bench.start(asks)
    ending = await bench.advance()
    assert (ending.outcome, ending.waiting_for) == ("waiting", "tool:oracle.ask")
    assert bench.admission.later == [(RUN, "tool:oracle.ask", 700)]
    bench.answer = answered
    assert output(await bench.advance()) == 42


async def test_of_calls_that_are_halted_at_once_the_first_says_why(bench: Any, ask: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> Any:
        return await asyncio.gather(*(ctx.call(ask, {"question": f"{number}?"}, id=f"ask-{number}") for number in range(3)))

    numbers = itertools.count()
    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="halted", reason=f"payment: request {next(numbers)}")
    bench.start(asks)
    assert (await bench.advance()).waiting_for == "halted:payment: request 0"


async def test_a_halted_call_has_the_body_wait_for_the_operator(bench: Any, ask: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> Any:
        return (await ctx.call(ask, {"question": "?"})).data.answer

    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="halted", reason="budget")
    bench.start(asks)
    assert (await bench.advance()).waiting_for == "halted:budget"
    assert not bench.admission.later


async def test_a_failed_call_fails_the_same_way_in_every_replay(bench: Any, ask: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> str:
        try:
            await ctx.call(ask, {"question": "?"})
        except ToolFailed as error:
            await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
            return str(error.failure.code) if error.failure else ""
        return "answered"

    bench.answer = lambda item: CallOutcome(
        call_id=item.call_id, outcome="failed", failure=ToolFailure(tool=item.tool, code="http_404", message="no")
    )
    bench.start(asks)
    await bench.advance()
    bench.close("a", admitted=1, completed=1)
    assert output(await bench.advance()) == "http_404"
    assert len(bench.desk.asked) == 1


async def test_another_input_in_a_replay_is_refused(bench: Any, ask: Any) -> None:
    questions = iter(["one", "two"])

    @play("asks")
    async def asks(ctx: Context) -> None:
        await ctx.call(ask, {"question": next(questions)})
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.answer = answered
    bench.start(asks)
    await bench.advance()
    ending = await bench.advance()
    assert ending.error.code == "non_deterministic_play"
    assert "oracle.ask" in ending.error.message
    assert len(bench.desk.asked) == 1


async def test_swallowing_the_contradiction_does_not_help(bench: Any, ask: Any) -> None:
    questions = iter(["one", "two"])

    @play("asks")
    async def asks(ctx: Context) -> str:
        try:
            await ctx.call(ask, {"question": next(questions)})
        except Exception:
            return "fine"
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return "finer"

    bench.answer = answered
    bench.start(asks)
    await bench.advance()
    assert (await bench.advance()).error.code == "non_deterministic_play"


async def test_a_body_that_ends_before_its_record_does_is_refused(bench: Any, ask: Any) -> None:
    rounds = iter([True, False])

    @play("asks")
    async def asks(ctx: Context) -> None:
        if next(rounds):
            await ctx.call(ask, {"question": "?"})
            await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.answer = answered
    bench.start(asks)
    await bench.advance()
    ending = await bench.advance()
    assert ending.error.code == "non_deterministic_play"
    assert "its end" in ending.error.message


async def test_gathered_calls_are_under_way_at_once_and_replay(bench: Any, ask: Any) -> None:
    together = asyncio.Barrier(3)

    async def when_all_asked(item: CallItem) -> CallOutcome:
        await together.wait()
        return answered(item)

    @play("asks")
    async def asks(ctx: Context) -> Any:
        found = await asyncio.gather(*(ctx.call(ask, {"question": str(i)}, id=f"q{i}") for i in range(3)))
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return len(found)

    bench.answer = when_all_asked
    bench.start(asks)
    assert (await bench.advance()).waiting_for == "dataset:a"
    bench.close("a", admitted=1, completed=1)
    assert output(await bench.advance()) == 3
    assert len(bench.desk.asked) == 3


async def test_what_a_body_reads_of_a_handle_is_the_same_in_every_replay(bench: Any) -> None:
    @play("reads")
    async def reads(ctx: Context) -> list[Any]:
        first = await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        rows = await first.peek(2)
        await ctx.dataset("b", [{"n": len(rows)}]).with_column("m", lambda row: 1).run()
        return rows

    settle(bench, "a", [{"n": 1}, {"n": 2}, {"n": 3}])
    bench.close("a", admitted=3, completed=3)
    bench.start(reads)
    assert (await bench.advance()).waiting_for == "dataset:b"
    settle(bench, "a", [{"n": "changed"}])
    bench.close("b", admitted=1, completed=1)
    assert output(await bench.advance()) == [{"n": 1}, {"n": 2}]


async def test_many_rows_that_a_body_reads_are_read_again_and_must_be_the_same(bench: Any) -> None:
    @play("reads")
    async def reads(ctx: Context) -> int:
        first = await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        length = 0
        async for row in first:
            length += len(row["text"])
        await ctx.dataset("b", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return length

    settle(bench, "a", [{"text": "x" * 1000}] * 500)
    bench.close("a", admitted=500, completed=500)
    bench.start(reads)
    assert (await bench.advance()).waiting_for == "dataset:b"
    assert sum(len(memoryview(call.result)) for call in bench.admission.runs[RUN].calls.values()) < 10_000
    assert (await bench.advance()).waiting_for == "dataset:b"
    settle(bench, "a", [{"text": "changed"}])
    assert (await bench.advance()).error.code == "non_deterministic_play"


async def test_a_handle_is_handed_to_the_next_dataset_page_by_page(bench: Any) -> None:
    @play("chains")
    async def chains(ctx: Context) -> None:
        first = await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        await ctx.dataset("b", first).with_column("m", lambda row: 1).run()

    rows = [{"n": i} for i in range(1234)]
    settle(bench, "a", rows)
    bench.close("a", admitted=1234, completed=1234)
    bench.start(chains)
    await bench.advance()
    input_id = bench.admission.opened[RUN, "b"].input_id
    assert bench.admission.rows_of(input_id) == rows
    assert bench.admission.sealed[input_id] == 1234


async def test_the_budget_and_the_runs_id_are_told(bench: Any) -> None:
    @play("asks")
    async def asks(ctx: Context) -> list[str]:
        ctx.log("begun", at=1)
        return [ctx.run.id, str(ctx.budget.limit)]

    bench.start(asks, options=RunOptions(budget=Decimal("1.50")))
    assert output(await bench.advance()) == [RUN, "1.50"]


def settle(bench: Any, dataset: str, rows: list[Any]) -> None:
    bench.settler.settled.pop((RUN, dataset), None)
    ticket = PageTicket(len(rows))
    for index, row in enumerate(rows):
        data = msgspec.Raw(msgspec.json.encode(row))
        bench.settler.settle(
            DatasetOfRun(RUN, 1, "default", "p", dataset),
            SettledRow(key=str(index), index=index, page=0, attempt=1, status="completed", input=data),
            ticket,
        )


async def test_a_neighbour_that_does_not_answer_fails_nobody_s_run(bench: Any) -> None:
    swallowed = []

    @play("opens")
    async def opens(ctx: Context) -> str:
        try:
            await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        except Exception as error:
            swallowed.append(error)
        return "went on"

    async def silent(request: Any) -> Any:
        raise AskTimeout("no answer")

    answering, bench.admission.open_dataset = bench.admission.open_dataset, silent
    bench.start(opens)
    with pytest.raises(AskTimeout):
        await bench.advance()
    assert not swallowed
    assert bench.admission.runs[RUN].ending is None
    bench.admission.open_dataset = answering
    bench.admission.expire(RUN)
    assert (await bench.advance()).waiting_for == "dataset:a"


async def test_code_that_goes_on_after_being_dropped_reaches_nobody(bench: Any) -> None:
    release = asyncio.Event()
    reached: list[int] = []

    @play("goes-on")
    async def goes_on(ctx: Context) -> str:
        while not release.is_set():
            try:
                await ctx.dataset(f"d{len(reached)}", [{"n": 1}]).with_column("m", lambda row: 1).run()
            except BaseException:
                reached.append(1)
                if len(reached) > 3:
                    release.set()
        return "late"

    bench.start(goes_on)
    assert (await bench.advance()).waiting_for == "dataset:d0"
    assert {dataset for _, dataset in bench.admission.opened} == {"d0"}
