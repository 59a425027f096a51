"""Steps of bodies: run once over all replays, and on record in their order."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.unit.row_executor.test_steps import RUN, Work, lose_the_record, output

from rowmill import Context, play


async def test_a_step_of_a_body_is_run_once_over_all_replays(bench: Any) -> None:
    work = Work()

    @play("steady")
    async def steady(ctx: Context) -> Any:
        first = await ctx.step("one", work)
        await ctx.dataset("a", [{"n": first}]).with_column("m", lambda row: 1).run()
        return [first, await ctx.step("one", work)]

    bench.start(steady)
    assert (await bench.advance()).outcome == "waiting"
    assert next(call.kind for call in bench.admission.runs[RUN].calls.values()) == "step"
    bench.receipts.outputs.clear()  # the record answers
    bench.close("a", admitted=1, completed=1)
    assert output(await bench.advance()) == [1, 2]
    assert [claim.run_term for claim in bench.receipts.claims] == [1, 2]


async def test_a_body_that_dies_before_its_record_is_stored_finds_the_step_on_its_receipt(bench: Any) -> None:
    work = Work()

    @play("steady")
    async def steady(ctx: Context) -> Any:
        return await ctx.step("one", work)

    bench.start(steady)
    await bench.advance()
    lose_the_record(bench)
    assert output(await bench.advance()) == 1
    assert work.done == 1


async def test_a_retry_by_other_code_meets_the_record_and_computes_what_is_not_on_it(bench: Any) -> None:
    codes = [lambda: "old", lambda: "new"]

    @play("mended")
    async def mended(ctx: Context) -> Any:
        one = await ctx.step("one", codes[0])
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return one

    bench.start(mended)
    assert (await bench.advance()).outcome == "waiting"
    codes.pop(0)
    bench.close("a", admitted=1, completed=1)
    assert output(await bench.advance()) == "old", "it is on record"
    lose_the_record(bench)
    assert output(await bench.advance()) == "new"


async def test_a_body_whose_step_another_executor_runs_waits_outside(bench: Any) -> None:
    @play("steady")
    async def steady(ctx: Context) -> Any:
        return await ctx.step("one", Work())

    bench.start(steady)
    await bench.advance()
    [key] = bench.receipts.outputs
    bench.receipts.outputs.clear()
    lose_the_record(bench)
    bench.receipts.held[key] = bench.receipts.claims[0]
    assert (await bench.advance()).waiting_for == "step:one"
    assert bench.admission.later == [(RUN, "step:one", 5000)]
    del bench.receipts.held[key]
    assert output(await bench.advance()) == 1


async def test_a_body_step_goes_on_while_a_dataset_waits(bench: Any) -> None:
    go = asyncio.Event()

    @play("both")
    async def both(ctx: Context) -> Any:
        await asyncio.gather(ctx.step("slow", go.wait), ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run())

    bench.start(both)
    advancing = asyncio.ensure_future(bench.advance())
    while (RUN, "a") not in bench.admission.opened:
        await asyncio.sleep(0.001)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not advancing.done(), "the body was dropped while its step ran"
    go.set()
    assert (await advancing).outcome == "waiting"
    assert [call.kind for call in bench.admission.runs[RUN].calls.values()].count("step") == 1


async def test_a_body_step_that_never_returns_fails(bench: Any) -> None:
    @play("stuck")
    async def stuck(ctx: Context) -> Any:
        await ctx.step("slow", asyncio.Event().wait)

    bench.start(stuck)
    ending = await bench.advance()
    assert (ending.outcome, ending.error.code, ending.error.message) == ("failed", "step_timeout", "step 'slow' took longer than 0.2 s")


async def test_a_step_that_must_not_be_repeated_and_never_returns_is_unknown(bench: Any) -> None:
    go = threading.Event()

    @play("stuck")
    async def stuck(ctx: Context) -> Any:
        await ctx.step("pay", go.wait, blocking=True, effect="non_idempotent")

    bench.start(stuck)
    first = await bench.advance()
    go.set()  # it has its effect after its time
    lose_the_record(bench)
    for ending in (first, await bench.advance()):
        assert (ending.outcome, ending.error.code) == ("failed", "outcome_unknown")
    assert len(bench.receipts.unknown) == 1


async def test_a_replay_that_meets_another_step_fails(bench: Any) -> None:
    names = iter(["one", "other"])

    @play("fickle")
    async def fickle(ctx: Context) -> Any:
        await ctx.step(next(names), Work())
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(fickle)
    await bench.advance()
    ending = await bench.advance()
    assert ending.error.code == "non_deterministic_play"
    assert "recorded step 'one'" in ending.error.message


async def test_two_steps_of_one_id_at_once_in_a_body_are_refused(bench: Any) -> None:
    @play("twice")
    async def twice(ctx: Context) -> Any:
        await asyncio.gather(ctx.step("same", asyncio.Event().wait), ctx.step("same", Work()))

    bench.start(twice)
    assert "step id 'same' is used twice at once in this body" in (await bench.advance()).error.message
