"""Steps of bodies and rows: run once, kept on receipts, the same at every replay."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill import Context, play, steps
from rowmill.datasets import DatasetBuilder
from rowmill.errors import StepFailed
from rowmill_contracts.runs import RunOptions

RUN = "run-1"


class Work:
    """A step's function that counts."""

    def __init__(self, *results: Any) -> None:
        self.done = 0
        self.results = results

    def __call__(self) -> Any:
        self.done += 1
        result = self.results[min(self.done, len(self.results)) - 1] if self.results else self.done
        if isinstance(result, BaseException):
            raise result
        return result


def program(**columns: Any) -> Any:
    builder = DatasetBuilder("people", [], None)  # type: ignore[arg-type]
    for name, resolver in columns.items():
        builder = builder.with_column(name, resolver)
    return builder.program()


def cells(bench: Any) -> Any:
    return bench.settler.values(RUN, "people")


def error_of(bench: Any, row: int = 0) -> Any:
    return bench.settler.settled[RUN, "people"][row].error


def lose_the_record(bench: Any) -> None:
    """The body died before its record was stored."""
    run = bench.admission.runs[RUN]
    run.calls.clear()
    run.ending = None


def output(ending: Any) -> Any:
    assert ending.outcome == "completed", ending
    return msgspec.json.decode(ending.output)


# ---- rows -------------------------------------------------------------------------------------------------------------------------------


async def test_a_step_of_a_row_that_is_worked_again_is_not_run_again(bench: Any) -> None:
    work = Work()
    people = program(score=lambda row, ctx: ctx.step("score", work))
    await bench.run_rows(people, [{"n": 1}, {"n": 2}])
    first = cells(bench)
    await bench.run_rows(people, [{"n": 1}, {"n": 2}])
    assert (work.done, first) == (2, [{"score": 1}, {"score": 2}])
    assert cells(bench) == first


async def test_columns_may_use_one_id_and_a_loop_the_same_id_again(bench: Any) -> None:
    async def thrice(row: Any, ctx: Any) -> list[int]:
        return [await ctx.step("tick", work) for _ in range(3)]

    work = Work()
    people = program(a=thrice, b=thrice)
    for _ in range(2):
        await bench.run_rows(people, [{"n": 1}])
        assert cells(bench) == [{"a": [1, 2, 3], "b": [4, 5, 6]}]
    await bench.run_rows(people, [{"n": 1}], known={0: {"a": {"value": 0, "reusable": True}}})
    assert cells(bench) == [{"a": 0, "b": [4, 5, 6]}], "the steps of a column are counted by themselves"
    assert work.done == 6


async def test_two_steps_of_one_id_at_once_are_refused(bench: Any) -> None:
    async def both(row: Any, ctx: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.step("same", asyncio.Event().wait))
            group.create_task(ctx.step("same", Work()))

    def told(error: Any) -> str:
        return str(error.exceptions[0])

    async def refused(row: Any, ctx: Any) -> Any:
        try:
            await both(row, ctx)
        except ExceptionGroup as group:
            return told(group)

    await bench.run_rows(program(a=refused), [{"n": 1}])
    assert cells(bench) == [{"a": "step id 'same' is used twice at once in one column of one row; give each step its own id"}]
    assert not bench.receipts.held, "the other branch was cut off and its lease kept"


async def test_what_the_author_gets_is_what_is_stored(bench: Any) -> None:
    seen: list[Any] = []

    async def price(row: Any, ctx: Any) -> Any:
        seen.append(await ctx.step("price", lambda: {"eur": Decimal("1.10"), "parts": (1, 2)}))

    for _ in range(2):
        await bench.run_rows(program(price=price), [{"n": 1}])
    assert seen == [{"eur": Decimal("1.10"), "parts": (1, 2)}] * 2


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        (object(), "value_not_storable", "the result of step 'score' cannot be stored: a value of type object cannot be stored"),
        ("x" * (8 * 1024 * 1024), "too_large", "the result of step 'score' is"),
        (ValueError("no luck"), "step_failed", "step 'score' failed: ValueError: no luck"),
        (SystemExit(3), "step_failed", "step 'score' failed: StepExited: its function ended the process: SystemExit(3)"),
        (asyncio.CancelledError(), "step_failed", "step 'score' failed: its function was cancelled"),
        (BaseException("panic"), "step_failed", "step 'score' failed: BaseException: panic"),
        (GeneratorExit(), "step_failed", "step 'score' failed: GeneratorExit"),
    ],
)
async def test_a_failure_names_the_step_and_is_kept_for_its_run(bench: Any, result: Any, code: str, says: str) -> None:
    work = Work(result, "fine")
    people = program(score=lambda row, ctx: ctx.step("score", work))
    for _ in range(2):
        await bench.run_rows(people, [{"n": 1}])
        assert (error_of(bench).code, error_of(bench).column) == (code, "score")
        assert error_of(bench).message.startswith(says)
    assert work.done == 1


async def test_author_code_meets_the_same_error_at_first_and_later(bench: Any) -> None:
    async def careful(row: Any, ctx: Any) -> str:
        try:
            return str(await ctx.step("score", work))
        except StepFailed as error:
            return str(error)

    work = Work(ValueError("no luck"))
    for _ in range(2):
        await bench.run_rows(program(score=careful), [{"n": 1}])
        assert cells(bench) == [{"score": "step 'score' failed: ValueError: no luck"}]


async def test_a_step_that_another_executor_runs_parks_its_row(bench: Any) -> None:
    work = Work()
    people = program(score=lambda row, ctx: ctx.step("score", work))
    await bench.run_rows(people, [{"n": 1}])
    [key] = bench.receipts.outputs
    bench.receipts.outputs.clear()
    bench.receipts.held[key] = bench.receipts.claims[0]
    await bench.run_rows(people, [{"n": 1}])
    [(_, row, reason, halted)] = bench.settler.parked
    assert (row.wait_ms, row.asked, reason, halted) == (5000, bench.clock.now(), "step score is run elsewhere", False)
    assert work.done == 1


async def test_rows_of_a_halted_run_wait_for_it(bench: Any) -> None:
    bench.receipts.halted[RUN] = "pause"
    await bench.run_rows(program(score=lambda row, ctx: ctx.step("score", Work())), [{"n": 1}])
    assert [(reason, halted) for _, _, reason, halted in bench.settler.parked] == [("pause", True)]


async def test_a_row_whose_time_is_over_gives_its_step_back(bench: Any) -> None:
    async def slow(row: Any, ctx: Any) -> Any:
        await ctx.step("slow", started.set_and_wait)

    class Started(asyncio.Event):
        async def set_and_wait(self) -> None:
            self.set()
            await asyncio.Event().wait()

    started = Started()
    working = asyncio.ensure_future(bench.run_rows(program(score=slow), [{"n": 1}]))
    await started.wait()
    assert bench.receipts.held
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert not bench.receipts.held


async def test_a_step_that_must_not_be_repeated_is_unknown_once_it_was_cut_off(bench: Any) -> None:
    async def pay(row: Any, ctx: Any) -> Any:
        await ctx.step("pay", started.set_and_wait, effect="non_idempotent")

    class Started(asyncio.Event):
        async def set_and_wait(self) -> None:
            self.set()
            await asyncio.Event().wait()

    started = Started()
    working = asyncio.ensure_future(bench.run_rows(program(score=pay), [{"n": 1}]))
    await started.wait()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await bench.run_rows(program(score=pay), [{"n": 1}])
    assert error_of(bench).code == "outcome_unknown"
    assert "step 'pay' was cut off and must not be repeated" in error_of(bench).message


async def test_a_blocking_step_runs_in_a_thread(bench: Any) -> None:
    await bench.run_rows(program(where=lambda row, ctx: ctx.step("where", lambda: threading.current_thread().name, blocking=True)), [{"n": 1}])
    assert cells(bench)[0]["where"] != threading.current_thread().name


async def test_a_function_that_uses_ctx_is_refused(bench: Any) -> None:
    await bench.run_rows(program(a=lambda row, ctx: ctx.step("outer", lambda: ctx.step("inner", Work()))), [{"n": 1}])
    assert "the function of step 'outer' uses ctx; make that call outside of the step and hand its result in" in error_of(bench).message


async def test_steps_of_programs_have_steps(bench: Any) -> None:
    work = Work()
    nested = (
        steps().step("one", lambda row, ctx: ctx.step("s", work)).step("two", lambda row, ctx: ctx.step("s", work)).returns(lambda row: row["two"])
    )
    for _ in range(2):
        await bench.run_rows(program(a=nested), [{"n": 1}])
        assert cells(bench) == [{"a": 2}]


async def test_a_leg_is_not_served_what_another_leg_of_its_column_came_to(bench: Any) -> None:
    async def parse(row: Any, ctx: Any) -> Any:
        return await ctx.step("parse", work)

    def legs(first: bool) -> Any:
        inner = steps().step("leg", parse, run_if=lambda row: first).returns(lambda row: row["leg"])
        other = steps().step("leg", parse).returns(lambda row: row["leg"])
        return steps().step("a", inner).step("b", other).step("c", parse).returns(lambda row: [row["a"], row["b"], row["c"]])

    work = Work()
    await bench.run_rows(program(a=legs(True)), [{"n": 1}])
    assert cells(bench) == [{"a": [1, 2, 3]}]
    await bench.run_rows(program(a=legs(False)), [{"n": 1}])
    assert cells(bench) == [{"a": [None, 2, 3]}]


@pytest.mark.parametrize(("forced", "serves"), [(None, True), ("tools", True), ("failed", True), ("steps", False), ("all", False)])
async def test_force_is_for_what_is_older_than_the_run(bench: Any, forced: Any, serves: bool) -> None:
    work = Work()

    @play("cached")
    async def cached(ctx: Context) -> Any:
        return await ctx.step("one", work, stale_after="1h")

    bench.start(cached)
    await bench.advance()
    bench.clock.time += 60
    bench.start(cached, options=RunOptions(force=forced))
    assert output(await bench.advance()) == (1 if serves else 2)
    lose_the_record(bench)
    assert output(await bench.advance()) == work.done, "a replay forced it again"
    bench.clock.time += 4000
    bench.start(cached)
    await bench.advance()
    assert work.done == (2 if serves else 3), "older than its lifetime"
