"""Programs of steps: what each step sees, when one is skipped, and how a waterfall goes on."""

from __future__ import annotations

from typing import Any

import pytest

from rowmill import Provider, steps
from rowmill.columns import column, column_spec
from rowmill.errors import DefinitionError, Suspended, ToolFailed
from rowmill.resolvers import Program, Step, call_inline, resolver_of
from rowmill.row_views import OpenRow, ReadSet
from rowmill.steps import ProgramOutcome, WaterfallAttempt, run_program
from rowmill.tool_results import ToolResult
from rowmill_contracts.tools import ToolFailure


async def call_step(step: Step, row: Any, ctx: Any) -> Any:
    return await call_inline(step.resolver, row, ctx)


async def run(program: Program, row: Any = None, ctx: Any = None) -> ProgramOutcome:
    return await run_program(program, {} if row is None else row, ctx, call_step)


def failing(category: str, *, retryable: bool = False) -> Any:
    def resolver(row: Any) -> None:
        failure = ToolFailure(tool="hunter.find", provider="hunter", code="c", message="m", category=category, retryable=retryable, retry_after=7)
        raise ToolFailed("m", failure)

    return resolver


def result(status: Any, raw: Any) -> ToolResult[Any]:
    return ToolResult(tool="apollo.match", status=status, raw=raw, data=raw)


async def test_each_step_sees_the_outputs_before_it() -> None:
    async def second(row: Any, ctx: Any) -> Any:
        return row["first"] * ctx

    program = steps().step("first", lambda row: row["n"] + 1).step("second", second).returns(lambda row: (row["n"], row["first"], row["second"]))
    outcome = await run(program, {"n": 1}, 10)
    assert outcome.value == (1, 2, 20)
    assert outcome.statuses == {"first": "completed", "second": "completed"}
    assert outcome.attempts == []


async def test_a_step_whose_condition_is_false_gives_its_else_value() -> None:
    async def never(row: Any) -> bool:
        return False

    program = (
        steps()
        .step("a", lambda row: 1 / 0, run_if=lambda row: row["n"] > 5, else_value="small")
        .step("b", lambda row: 1 / 0, run_if=never)
        .returns(lambda row: [row["a"], row["b"]])
    )
    outcome = await run(program, {"n": 1})
    assert outcome.value == ["small", None]
    assert outcome.statuses == {"a": "skipped", "b": "skipped"}


async def test_programs_nest() -> None:
    inner = steps().step("x", lambda row: row["n"] + row["first"]).returns(lambda row: row["x"] * 2)
    program = steps().step("first", lambda row: 1).step("inner", inner).returns(lambda row: row["inner"])
    outcome = await run(program, {"n": 1})
    assert outcome.value == 4
    assert outcome.statuses == {"first": "completed", "inner.x": "completed", "inner": "completed"}


@pytest.mark.parametrize("category", ["unavailable", "payment", "rate_limited", "unreachable", "no_answer"])
async def test_a_waterfall_goes_on_where_a_provider_is_exhausted_or_unavailable(category: str) -> None:
    program = (
        steps(continue_on_provider_unavailable=True)
        .step("hunter", failing(category))
        .step("skipped", lambda row: 1, run_if=lambda row: False)
        .step("empty", lambda row: None)
        .step("apollo", lambda row: result("completed", 5), run_if=lambda row: row["hunter"] is None)
        .returns(lambda row: row["hunter"] or row["apollo"])
    )
    outcome = await run(program)
    assert outcome.attempts == [
        WaterfallAttempt(leg="hunter", status="unavailable", provider="hunter", code="c", category=category, retry_after=7),
        WaterfallAttempt(leg="skipped", status="skipped"),
        WaterfallAttempt(leg="empty", status="no_result"),
        WaterfallAttempt(leg="apollo", status="completed", provider="apollo"),
    ]
    assert outcome.statuses["hunter"] == "missed"
    assert [attempt["leg"] for attempt in outcome.value.meta["waterfall_attempts"]] == ["hunter", "skipped", "empty", "apollo"]
    assert outcome.value.data == 5


async def test_a_leg_that_gave_up_repeating_is_a_miss() -> None:
    outcome = await run(steps(continue_on_provider_unavailable=True).step("a", failing("bad_answer", retryable=True)).returns(lambda row: row["a"]))
    assert (outcome.value, outcome.attempts[0].status) == (None, "unavailable")


async def test_a_row_that_is_wrong_fails_in_a_waterfall_too() -> None:
    for category in ("rejected", "auth"):
        with pytest.raises(ToolFailed):
            await run(steps(continue_on_provider_unavailable=True).step("a", failing(category)).returns(lambda row: row["a"]))


async def test_without_a_waterfall_an_unavailable_provider_fails_the_row() -> None:
    with pytest.raises(ToolFailed):
        await run(steps().step("a", failing("unavailable")).returns(lambda row: row["a"]))


async def test_suspension_passes_through_a_waterfall() -> None:
    def suspends(row: Any) -> None:
        raise Suspended

    with pytest.raises(Suspended):
        await run(steps(continue_on_provider_unavailable=True).step("a", suspends).returns(lambda row: row["a"]))


async def test_legs_of_a_waterfall_are_marked_also_inside_a_nested_program() -> None:
    seen: dict[str, bool] = {}

    async def noting(step: Step, row: Any, ctx: Any) -> Any:
        seen[step.name] = step.waterfall

    inner = steps().step("deep", lambda row: 1).returns(lambda row: 1)
    waterfall = steps(continue_on_provider_unavailable=True).step("leg", lambda row: 1).step("inner", inner).returns(lambda row: 1)
    await run_program(waterfall, {}, None, noting)
    await run_program(inner, {}, None, noting)
    assert seen == {"leg": True, "inner.deep": True, "deep": False}


async def test_what_steps_read_of_the_row_is_recorded_and_their_outputs_are_not() -> None:
    opened, reads = OpenRow({"a": 1, "b": 2, "c": 3}), ReadSet()
    program = steps().step("s", lambda row: row["a"]).step("t", lambda row: row["s"], run_if=lambda row: row["b"]).returns(lambda row: row["t"])
    assert (await run(program, opened.view(reads))).value == 1
    assert reads.columns == ["a", "b"]


def test_a_common_beginning_can_be_shared() -> None:
    begun = steps().step("a", lambda row: 1)
    one, other = begun.step("b", lambda row: 1).returns(lambda row: 1), begun.returns(lambda row: 1)
    assert [len(one.steps), len(other.steps)] == [2, 1]


def test_programs_that_cannot_work_are_refused_when_defined() -> None:
    with pytest.raises(DefinitionError, match="step 'a' is there twice"):
        steps().step("a", lambda row: 1).step("a", lambda row: 1)
    with pytest.raises(DefinitionError, match="at least one step"):
        steps().returns(lambda row: 1)
    with pytest.raises(DefinitionError, match=r"add \.returns"):
        column_spec("c", steps().step("a", lambda row: 1))


# Resolvers


class Callable2:
    def __call__(self, row: Any, ctx: Any) -> Any:
        return row, ctx

    def method(self, row: Any) -> Any:
        return row


def with_wrapper(*arguments: Any, **named: Any) -> Any:
    return arguments


@pytest.mark.parametrize(
    ("resolver", "with_context"),
    [
        (lambda row: 1, False),
        (lambda row, ctx: 1, True),
        (lambda row, limit=5: 1, False),
        (lambda row, ctx=None: 1, True),
        (lambda row, *, limit=5: 1, False),
        (lambda *both: 1, True),
        (Callable2(), True),
        (Callable2().method, False),
        (with_wrapper, True),
        (len, False),
    ],
)
def test_a_resolver_is_given_the_context_if_it_takes_one(resolver: Any, with_context: bool) -> None:
    assert resolver_of(resolver, "c").takes_context is with_context


@pytest.mark.parametrize(
    ("resolver", "told"),
    [
        (5, "not 5"),
        (None, "not None"),
        (dict, "not <class 'dict'>"),
        (lambda: 1, "takes"),
        (lambda row, ctx, more: 1, "needs"),
        (lambda row, *, more: 1, "needs"),
    ],
)
def test_what_is_no_resolver_is_refused_naming_the_column(resolver: Any, told: str) -> None:
    with pytest.raises(DefinitionError, match=f"column 'c'.*{told}"):
        column_spec("c", resolver)


def test_a_tool_is_no_resolver_and_the_advice_says_how_to_call_it() -> None:
    @Provider("crm", base_url="https://crm.example").tool("score", effect="read")
    def score(item: int, call: Any) -> int:
        return 1

    with pytest.raises(DefinitionError, match=r"lambda row, ctx: ctx.call\(score, ...\)"):
        column_spec("c", score)


def test_a_column_keeps_being_its_function() -> None:
    @column(version="1")
    def doubled(row: dict[str, int]) -> int:
        """Double it."""
        return row["a"] * 2

    assert (doubled({"a": 2}), doubled.__doc__) == (4, "Double it.")


def test_an_async_resolver_cannot_be_blocking() -> None:
    with pytest.raises(DefinitionError, match="cannot be blocking"):

        @column(blocking=True)
        async def waits(row: Any) -> None: ...


def test_options_given_with_the_column_win_over_the_resolvers_own() -> None:
    @column(stale_after="7d", version="1", recompute=True, recompute_on_error=True)
    def resolver(row: Any) -> int:
        return 1

    own = column_spec("c", resolver)
    assert (own.stale_after, own.version, own.recompute, own.recompute_on_error) == (604800.0, "=1", True, True)
    given = column_spec("c", resolver, stale_after=5, version="2", recompute=False, recompute_on_error=False)
    assert (given.stale_after, given.version, given.recompute, given.recompute_on_error) == (5.0, "=2", False, False)


def test_expiry_is_a_duration_or_a_function_of_the_value() -> None:
    assert column_spec("c", lambda row: 1).expiry_after("x") is None
    assert column_spec("c", lambda row: 1, stale_after="1h").expiry_after("x") == 3600.0
    by_value = column_spec("c", lambda row: 1, stale_after=lambda value: None if value else 60)
    assert (by_value.expiry_after(True), by_value.expiry_after(None)) == (None, 60.0)


def test_a_program_is_as_fresh_as_its_shortest_lived_step() -> None:
    short, long = column(stale_after=5)(lambda row: 1), column(stale_after=50)(lambda row: 1)
    inner = steps().step("x", short).returns(lambda row: 1)
    assert column_spec("c", steps().step("a", long).step("b", inner).returns(lambda row: 1)).stale_after == 5.0
    assert column_spec("c", inner, stale_after=9).stale_after == 9.0
