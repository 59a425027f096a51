"""Play bodies: run to where they wait, dropped, run again over what is on record."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, field_validator
from tests.unit.row_executor import conftest

from rowmill import Context, Handle, Rows, play
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import PAGE_ROWS
from rowmill_contracts.runs import DatasetOpened

RUN = "run-1"


class Counted(BaseModel):
    count: int


class Staged(BaseModel):
    leads: Rows[Any]


def output(ending: Any) -> Any:
    assert ending.outcome == "completed", ending
    return msgspec.json.decode(ending.output)


async def test_a_body_without_calls_ends_with_its_output(bench: Any) -> None:
    @play("adder")
    async def adder(ctx: Context) -> dict[str, int]:
        return {"sum": 3}

    bench.start(adder)
    assert output(await bench.advance()) == {"sum": 3}


async def test_a_body_waits_for_its_dataset_and_ends_once_that_is_closed(bench: Any) -> None:
    begun = []

    @play("leads")
    async def leads(ctx: Context) -> dict[str, Any]:
        begun.append(1)
        done = await ctx.dataset("leads", [{"domain": "a"}, {"domain": "b"}]).with_column("n", lambda row: 1).run(key="domain")
        return {"leads": done, "found": await done.count()}

    bench.start(leads)
    waiting = await bench.advance()
    assert (waiting.outcome, waiting.waiting_for) == ("waiting", "dataset:leads")
    bench.close("leads", admitted=2, completed=2)
    assert output(await bench.advance()) == {"leads": {"$handle": {"run_id": RUN, "dataset": "leads"}}, "found": 2}
    assert len(begun) == 2


async def test_rows_in_memory_are_sealed_once_before_their_dataset_opens(bench: Any) -> None:
    @play("leads")
    async def leads(ctx: Context) -> None:
        await ctx.dataset("leads", [{"n": i} for i in range(2 * PAGE_ROWS + 50)]).with_column("m", lambda row: 1).run()

    bench.start(leads)
    await bench.advance()
    await bench.advance()
    request = bench.admission.opened[RUN, "leads"]
    assert list(bench.admission.sealed) == [request.input_id]
    assert len(bench.admission.pages[request.input_id]) == 3
    assert bench.admission.rows_of(request.input_id) == [{"n": i} for i in range(2 * PAGE_ROWS + 50)]


async def test_rows_of_a_run_with_the_longest_id_are_sealed_under_an_id_that_is_no_longer(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "RUN", "r" * 200)

    @play("leads")
    async def leads(ctx: Context) -> None:
        for key in ("one", "two"):
            await ctx.dataset(key, [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(leads)
    await bench.advance()
    bench.close("one", admitted=1, completed=1)
    await bench.advance()
    one, two = bench.admission.sealed
    assert one != two
    assert max(len(one), len(two)) <= 200


async def test_gathered_datasets_are_open_at_the_same_time_and_replay_in_whatever_order_they_close(bench: Any) -> None:
    @play("both")
    async def both(ctx: Context) -> tuple[int, ...]:
        async def one(name: str) -> int:
            done = await ctx.dataset(name, [{"n": 1}]).with_column("m", lambda row: 1).run()
            return await done.count() + len(await done.peek(2))

        return await asyncio.gather(one("a"), one("b"))

    bench.start(both)
    assert (await bench.advance()).waiting_for == "dataset:a, dataset:b"
    assert {dataset for _, dataset in bench.admission.opened} == {"a", "b"}
    bench.close("b", admitted=7)
    assert (await bench.advance()).waiting_for == "dataset:a"
    bench.close("a", admitted=5)
    assert output(await bench.advance()) == [5, 7]


async def test_a_replay_that_meets_another_dataset_fails_and_shows_both(bench: Any) -> None:
    names = iter(["first", "second"])

    @play("fickle")
    async def fickle(ctx: Context) -> None:
        await ctx.dataset(next(names), [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(fickle)
    await bench.advance()
    ending = await bench.advance()
    assert ending.outcome == "failed"
    assert ending.error.code == "non_deterministic_play"
    assert "'first'" in ending.error.message
    assert "'second'" in ending.error.message
    assert (RUN, "second") not in bench.admission.opened


async def test_a_replay_that_swaps_two_datasets_fails(bench: Any) -> None:
    orders = iter([("a", "b"), ("a", "b"), ("b", "a")])

    @play("fickle")
    async def fickle(ctx: Context) -> None:
        for name in next(orders):
            await ctx.dataset(name, [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(fickle)
    await bench.advance()
    bench.close("a", admitted=1)
    await bench.advance()
    ending = await bench.advance()
    assert ending.error.code == "non_deterministic_play"


async def test_author_code_cannot_swallow_the_end_of_a_body_that_waits(bench: Any) -> None:
    swallowed = []

    @play("stubborn")
    async def stubborn(ctx: Context) -> str:
        try:
            await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        except Exception as error:
            swallowed.append(error)
        except BaseException:
            await ctx.dataset("b", [{"n": 1}]).with_column("m", lambda row: 1).run()
        finally:
            await ctx.dataset("c", [{"n": 1}]).with_column("m", lambda row: 1).run()
        return "went on"

    bench.start(stubborn)
    assert (await bench.advance()).waiting_for == "dataset:a"
    assert not swallowed
    assert {dataset for _, dataset in bench.admission.opened} == {"a"}


async def test_a_dataset_key_twice_is_refused_with_advice(bench: Any) -> None:
    @play("twice")
    async def twice(ctx: Context) -> None:
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(twice)
    bench.close("a", admitted=1)
    ending = await bench.advance()
    assert ending.outcome == "failed"
    assert "own key" in ending.error.message


async def test_a_run_fails_loudly_when_all_its_rows_failed(bench: Any) -> None:
    @play("doomed")
    async def doomed(ctx: Context) -> None:
        await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(doomed)
    bench.close("a", admitted=3, failed=3)
    ending = await bench.advance()
    assert (ending.outcome, ending.error.code) == ("failed", "all_rows_failed")


async def test_a_dataset_without_rows_is_no_failure(bench: Any) -> None:
    @play("empty")
    async def empty(ctx: Context) -> int:
        return await (await ctx.dataset("a", []).with_column("m", lambda row: 1).run()).count()

    bench.start(empty)
    bench.close("a")
    assert output(await bench.advance()) == 0


async def test_a_failed_dataset_takes_the_same_way_in_every_replay(bench: Any) -> None:
    @play("careful")
    async def careful(ctx: Context) -> str:
        try:
            await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()
        except Exception:
            await ctx.dataset("rescue", [{"n": 1}]).with_column("m", lambda row: 1).run()
            return "rescued"
        return "fine"

    bench.start(careful)
    bench.admission.close(RUN, "a", DatasetOpened(outcome="failed", counts=Counts(), error=Problem(code="input", message="bad input")))
    assert (await bench.advance()).waiting_for == "dataset:rescue"
    assert (await bench.capture("rescue")).program.key == "rescue"
    bench.close("rescue", admitted=1, completed=1)
    assert output(await bench.advance()) == "rescued"


async def test_what_a_body_raises_fails_the_run_with_its_words(bench: Any) -> None:
    @play("broken")
    async def broken(ctx: Context) -> None:
        raise ValueError("no such luck")

    bench.start(broken)
    ending = await bench.advance()
    assert (ending.error.code, ending.error.message) == ("play_failed", "ValueError: no such luck")


@pytest.mark.parametrize("ending", [BaseException("panic"), GeneratorExit(), MemoryError()])
async def test_a_body_that_raises_no_exception_fails_its_run_all_the_same(bench: Any, ending: BaseException) -> None:
    @play("panics")
    async def panics(ctx: Context) -> None:
        raise ending

    bench.start(panics)
    assert (await bench.advance()).error.code == "play_failed"


async def test_a_body_that_ends_the_process_only_fails_its_run(bench: Any) -> None:
    @play("exits")
    async def exits(ctx: Context) -> None:
        raise SystemExit(3)

    bench.start(exits)
    assert (await bench.advance()).outcome == "failed"


async def test_an_input_that_does_not_fit_fails_the_run_naming_the_field(bench: Any) -> None:
    @play("typed")
    async def typed(ctx: Context, given: Counted) -> int:
        return given.count

    bench.start(typed, count="many")
    ending = await bench.advance()
    assert ending.error.code == "input_invalid"
    assert "count" in ending.error.message


async def test_a_body_whose_lease_is_lost_says_nothing(bench: Any) -> None:
    opened = asyncio.Event()
    go = asyncio.Event()

    @play("slow")
    async def slow(ctx: Context) -> str:
        opened.set()
        await go.wait()
        return "late"

    bench.start(slow)
    driving = asyncio.create_task(bench.advance())
    await opened.wait()
    bench.leases.lost[RUN]()
    assert await driving is None


async def test_an_older_term_opens_nothing(bench: Any) -> None:
    @play("slow")
    async def slow(ctx: Context) -> Handle:
        await bench.admission.take(RUN, lease_id="another")
        return await ctx.dataset("a", [{"n": 1}]).with_column("m", lambda row: 1).run()

    bench.start(slow)
    taken = bench.admission.take

    async def take(run_id: str, **named: Any) -> Any:
        if named.get("lease_id") == "another":
            bench.admission.expire(run_id)
        return await taken(run_id, **named)

    bench.admission.take = take
    assert await bench.advance() is None
    assert not bench.admission.opened


async def test_capture_finds_the_program_without_any_effect(bench: Any) -> None:
    @play("chained")
    async def chained(ctx: Context, given: Staged) -> None:
        done = await ctx.dataset("first", given.leads).with_column("a", lambda row: 1).run()
        await ctx.dataset("second", done).with_column("b", lambda row: 2).run(key="n", concurrency=3)

    bench.start(chained, inputs={"": "staged"})
    await bench.advance()
    assert (await bench.capture("first")).program.source == Rows("leads", "staged")
    bench.close("first", admitted=1, completed=1)
    await bench.advance()
    calls = dict(bench.admission.runs[RUN].calls)
    captured = await bench.capture("second")
    assert [column.name for column in captured.program.columns] == ["b"]
    assert captured.program.concurrency == 3
    assert bench.admission.runs[RUN].calls == calls


class Cancelling(BaseModel):
    count: int

    @field_validator("count")
    @classmethod
    def cancels(cls, count: int) -> int:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return count


async def test_an_input_whose_validator_cancels_its_task_does_not_end_who_drives_the_body(bench: Any) -> None:
    @play("cancelling")
    async def cancelling(ctx: Context, given: Cancelling) -> dict[str, int]:
        return {"count": given.count}

    bench.start(cancelling, count=3)
    assert output(await bench.advance()) == {"count": 3}


async def test_a_body_that_cancels_its_task_fails_its_run(bench: Any) -> None:
    @play("cancelling")
    async def cancelling(ctx: Context) -> dict[str, int]:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return {"sum": 3}

    bench.start(cancelling)
    ending = await bench.advance()
    assert (ending.outcome, ending.error.code) == ("failed", "play_failed")


async def test_a_body_whose_error_cannot_be_put_in_words_fails_its_run(bench: Any) -> None:
    class Unsayable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        __repr__ = __str__

    @play("unsayable")
    async def unsayable(ctx: Context) -> None:
        raise Unsayable

    bench.start(unsayable)
    ending = await bench.advance()
    assert ending.outcome == "failed"
    assert "Unsayable" in ending.error.message
