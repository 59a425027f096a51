"""Calls of rows: typed results and errors, waterfalls, rows parked while a call waits."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import msgspec
from tests.unit.row_executor.leads import RUN, FindIn, Tools, dataset, found, meta, settled

from rowmill import RowContext, steps
from rowmill_contracts.tools import CallItem, CallOutcome, ToolFailure
from rowmill_receipt_store.charges import taken_reason


async def test_a_call_gives_a_typed_result_and_its_cost_goes_with_cell_and_row(bench: Any, tools: Tools) -> None:
    async def email(row: Any, ctx: RowContext) -> str | None:
        result = await ctx.call(tools.find, FindIn(domain=row["domain"]))
        assert result.data.email == result.get("email")
        assert result.execution.cost == Decimal("0.01")
        return result.data.email

    bench.answer = found("x@a")
    await bench.run_rows(dataset(email=email).program(), [{"domain": "a"}])
    row = settled(bench)[0]
    assert msgspec.json.decode(row.values) == {"email": "x@a"}
    assert (row.calls, row.cost) == (1, Decimal("0.01"))
    assert {"provider": "hunter", "calls": 1, "cost": "0.01"}.items() <= meta(row)["email"].items()
    item = bench.desk.asked[0]
    assert (item.tool, item.row, bytes(item.input)) == ("hunter.find", "leads/key-0", b'{"domain":"a"}')


async def test_answers_of_others_cost_this_row_nothing(bench: Any, tools: Tools) -> None:
    bench.answer = found("x@a", execution="cache")
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": "a"})).program(), [{"n": 1}])
    assert (settled(bench)[0].calls, settled(bench)[0].cost) == (0, 0)


async def test_an_input_that_does_not_fit_the_tool_fails_the_row_and_asks_nobody(bench: Any, tools: Tools) -> None:
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"dom": "a"})).program(), [{"n": 1}])
    assert settled(bench)[0].error.code == "input_invalid"
    assert "domain" in settled(bench)[0].error.message
    assert not bench.desk.asked


async def test_a_failed_call_raises_its_record_in_the_resolver(bench: Any, tools: Tools) -> None:
    bench.answer = lambda item: CallOutcome(
        call_id=item.call_id, outcome="failed", failure=ToolFailure(tool=item.tool, code="http_404", message="not there", status=404)
    )
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": "a"})).program(), [{"n": 1}])
    error = settled(bench)[0].error
    assert (error.code, error.tool, error.column) == ("http_404", "hunter.find", "e")


async def test_an_unknown_outcome_fails_the_row_and_says_what_to_do(bench: Any, tools: Tools) -> None:
    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="unknown", receipt="abc")
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": "a"})).program(), [{"n": 1}])
    error = settled(bench)[0].error
    assert error.code == "outcome_unknown"
    assert "abc" in error.message


async def test_a_waterfall_goes_on_past_an_unavailable_provider_and_says_so(bench: Any, tools: Tools) -> None:
    async def first(row: Any, ctx: RowContext) -> Any:
        return (await ctx.call(tools.find, {"domain": row["domain"]})).get("email")

    async def second(row: Any, ctx: RowContext) -> Any:
        return (await ctx.call(tools.match, {"domain": row["domain"]})).get("email")

    contact = (
        steps(continue_on_provider_unavailable=True)
        .step("hunter", first)
        .step("apollo", second, run_if=lambda row: row["hunter"] is None)
        .returns(lambda row: row["hunter"] or row["apollo"])
    )

    def answer(item: CallItem) -> CallOutcome:
        if item.tool == "hunter.find":
            failure = ToolFailure(tool=item.tool, code="provider_unavailable", message="down", provider="hunter", category="unavailable")
            return CallOutcome(call_id=item.call_id, outcome="failed", failure=failure)
        return found("y@a")(item)

    bench.answer = answer
    await bench.run_rows(dataset(contact=contact).program(), [{"domain": "a"}])
    row = settled(bench)[0]
    assert msgspec.json.decode(row.values) == {"contact": "y@a"}
    told = meta(row)["contact"]
    assert told["steps"] == {"hunter": "missed"}
    assert [attempt["status"] for attempt in told["attempts"]] == ["unavailable", "completed"]
    assert [item.max_wait for item in bench.desk.asked] == [60.0, 60.0]


async def test_a_deferred_call_parks_its_row_through_whatever_author_code_catches(bench: Any, tools: Tools) -> None:
    swallowed = []

    async def email(row: Any, ctx: RowContext) -> str:
        try:
            await ctx.call(tools.find, {"domain": "a"})
        except Exception as error:
            swallowed.append(error)
        except BaseException:
            return "made up"
        finally:
            await ctx.call(tools.match, {"domain": "a"})
        return "went on"

    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="deferred", wait_ms=1500, reason="rate_limited")
    await bench.run_rows(dataset(email=email).program(), [{"n": 1}], waits=2)
    assert (RUN, "leads") not in bench.settler.settled
    [(_, row, reason, halted)] = bench.settler.parked
    assert (row.waits, row.wait_ms, row.asked, reason, halted) == (3, 1500, 1000.0, "rate_limited", False)
    assert not swallowed
    assert len(bench.desk.asked) == 1


async def test_a_row_that_swallows_having_been_parked_is_parked_all_the_same(bench: Any, tools: Tools) -> None:
    async def email(row: Any, ctx: RowContext) -> str:
        try:
            await ctx.call(tools.find, {"domain": "a"})
        except BaseException:
            return "made up"
        return "went on"

    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="halted", reason="budget")
    await bench.run_rows(dataset(email=email).program(), [{"n": 1}])
    [(_, row, reason, halted)] = bench.settler.parked
    assert (row.wait_ms, reason, halted) == (None, "budget", True)


async def test_a_parked_row_keeps_when_its_call_was_first_asked_for(bench: Any, tools: Tools) -> None:
    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="deferred", wait_ms=10)
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": "a"})).program(), [{"n": 1}], asked=400.0, waits=1)
    assert bench.desk.asked[0].asked == 400.0
    assert bench.settler.parked[0][1].asked == 400.0


async def test_what_a_row_waits_for_its_runs_budget_is_no_wait_for_its_provider(bench: Any, tools: Tools) -> None:
    """Which is given up after an hour."""
    bench.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="deferred", wait_ms=10, reason=taken_reason("money"))
    await bench.run_rows(dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": "a"})).program(), [{"n": 1}], asked=400.0, waits=1)
    assert bench.settler.parked[0][1].asked is None


async def test_calls_after_the_one_that_waited_have_not_waited_themselves(bench: Any, tools: Tools) -> None:
    async def both(row: Any, ctx: RowContext) -> None:
        await ctx.call(tools.find, {"domain": "a"})
        await ctx.call(tools.match, {"domain": "a"})

    bench.answer = found("x@a", completed_at=990.0)
    await bench.run_rows(dataset(both=both).program(), [{"n": 1}], asked=400.0, waits=1)
    assert [item.asked for item in bench.desk.asked] == [400.0, 1000.0]


async def test_a_call_id_that_cannot_be_stored_is_refused_at_the_call(bench: Any, tools: Tools) -> None:
    await bench.run_rows(dataset(a=lambda row, ctx: ctx.call(tools.find, {"domain": "a"}, id="a\x00b")).program(), [{"n": 1}])
    assert settled(bench)[0].error.message == "call id 'a\\x00b' is not allowed: it must be printable text"
    assert not bench.desk.asked


async def test_one_call_id_twice_at_once_in_a_row_is_refused(bench: Any, tools: Tools) -> None:
    async def both(row: Any, ctx: RowContext) -> None:
        await asyncio.gather(ctx.call(tools.find, {"domain": "a"}), ctx.call(tools.find, {"domain": "b"}))

    async def named(row: Any, ctx: RowContext) -> int:
        one, two = await asyncio.gather(ctx.call(tools.find, {"domain": "a"}), ctx.call(tools.find, {"domain": "b"}, id="second"))
        return len([one, two])

    bench.answer = found("x@a")
    await bench.run_rows(dataset(both=both).program(), [{"n": 1}])
    assert (settled(bench)[0].status, "id=" in settled(bench)[0].error.message) == ("failed", True)
    await bench.run_rows(dataset(named=named).program(), [{"n": 1}])
    assert settled(bench)[0].status == "completed"
