"""When a suspect is at rest, and what is on record while its author code runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rowmill.runtime.rest import Rest, at_work, goes_on, waiting, watched


class Record:
    """Writes down what becomes of the mark. ``stores``: set while steps are stored. ``broken``: none is ever."""

    def __init__(self, *, broken: bool = False) -> None:
        self.said: list[str] = []
        self.marked = False
        self.stores = asyncio.Event()
        self.stores.set()
        self.broken = broken

    async def set(self) -> None:
        await self._step("rests", marked=True)

    async def clear(self) -> None:
        await self._step("wakes", marked=False)

    async def _step(self, word: str, *, marked: bool) -> None:
        await self.stores.wait()
        if self.broken:
            raise ConnectionError("the broker is away")
        self.marked = marked
        self.said.append(word)


async def until(said: object, wanted: object) -> None:
    for _ in range(1000):
        if said == wanted:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{said} never became {wanted}")


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Bench:
    """A suspect whose handler waits for what ``author`` does."""

    def __init__(self, *, settling: float = 0.0, broken: bool = False) -> None:
        self.record = Record(broken=broken)
        self.rest = Rest(self.record, settling=settling)

    async def handle(self, author: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.create_task(self.rest.watch(author))
        async with waiting(self.rest):
            return await task


async def test_a_suspect_whose_handler_says_nothing_is_never_at_rest() -> None:
    bench = Bench()
    await turns()
    assert bench.record.said == []


async def test_rest_is_on_record_while_author_code_waits_and_off_it_before_it_goes_on() -> None:
    bench, answer = Bench(), asyncio.get_running_loop().create_future()

    async def author() -> str:
        bench.record.said.append("begins")
        given: str = await answer
        bench.record.said.append(f"goes on, marked: {bench.record.marked}")
        return given

    handled = asyncio.create_task(bench.handle(author()))
    await until(bench.record.said, ["begins", "rests"])
    bench.record.stores.clear()
    answer.set_result("well")
    await turns()
    assert bench.record.said == ["begins", "rests"], "it goes on before the mark is gone"
    bench.record.stores.set()
    assert await handled == "well"
    assert bench.record.said == ["begins", "rests", "wakes", "goes on, marked: False"]


async def test_what_was_on_record_before_it_began_is_off_it_when_it_begins() -> None:
    bench, lease = Bench(), asyncio.Event()

    async def author() -> None:
        bench.record.said.append("begins")

    async def handle() -> None:
        async with waiting(bench.rest):
            await lease.wait()
        await bench.handle(author())

    handled = asyncio.create_task(handle())
    await until(bench.record.said, ["rests"])
    lease.set()
    await handled
    assert bench.record.said[:3] == ["rests", "wakes", "begins"]


async def test_an_answer_that_comes_soon_costs_no_record() -> None:
    bench = Bench(settling=60.0)

    async def author() -> None:
        for _ in range(5):
            await asyncio.sleep(0.001)

    await bench.handle(author())
    assert bench.record.said == []


async def test_author_code_in_a_thread_or_in_a_step_is_no_rest() -> None:
    bench, thread, step = Bench(), asyncio.Event(), asyncio.Event()

    async def runs() -> None:
        bench.record.said.append("step")
        with at_work():
            await step.wait()

    async def author() -> None:
        with at_work():
            await thread.wait()
        await asyncio.create_task(watched(runs()))

    handled = asyncio.create_task(bench.handle(author()))
    await turns()
    assert bench.record.said == []
    thread.set()
    await until(bench.record.said, ["step"])
    await turns()
    assert bench.record.said == ["step"]
    step.set()
    await handled


async def test_an_answer_to_a_task_of_the_authors_own_ends_the_rest_too() -> None:
    bench, answers = Bench(), [asyncio.Event(), asyncio.Event()]

    async def call(number: int) -> None:
        await answers[number].wait()
        await goes_on()
        bench.record.said.append(f"answered {number}, marked: {bench.record.marked}")

    async def author() -> None:
        await asyncio.gather(call(0), call(1))

    handled = asyncio.create_task(bench.handle(author()))
    await until(bench.record.said, ["rests"])
    answers[0].set()
    await until(bench.record.said, ["rests", "wakes", "answered 0, marked: False", "rests"])
    answers[1].set()
    await handled
    assert bench.record.said[4:6] == ["wakes", "answered 1, marked: False"]


async def test_who_is_cancelled_at_rest_or_while_it_wakes_hears_of_it_awake() -> None:
    for twice in (False, True):
        bench, answer = Bench(), asyncio.get_running_loop().create_future()

        async def author(bench: Bench = bench, answer: asyncio.Future[None] = answer) -> None:
            try:
                await answer
            except asyncio.CancelledError:
                bench.record.said.append(f"cancelled, marked: {bench.record.marked}")
                raise

        task = asyncio.create_task(bench.rest.watch(author()))
        async with waiting(bench.rest):
            await until(bench.record.said, ["rests"])
            bench.record.stores.clear()
            if twice:
                answer.set_result(None)
                await turns()
            task.cancel()
            await turns()
            assert bench.record.said == ["rests"]
            bench.record.stores.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert bench.record.said[:3] == ["rests", "wakes", "cancelled, marked: False"]


async def test_what_author_code_raises_comes_out_and_its_timeouts_are_its_own() -> None:
    bench = Bench()

    async def author() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        raise LookupError("the author's")

    with pytest.raises(LookupError, match="the author's"):
        await bench.handle(author())


async def test_a_record_that_cannot_be_kept_keeps_nobody_waiting() -> None:
    for kept in (False, True):
        bench, answer = Bench(broken=not kept), asyncio.Event()
        handled = asyncio.create_task(bench.handle(answer.wait()))
        await turns()
        assert bench.record.said == (["rests"] if kept else [])
        bench.record.broken = True
        answer.set()
        assert await handled
        assert not bench.rest.recorded


async def test_the_end_leaves_a_mark_and_sets_no_other() -> None:
    bench = Bench()
    handled = asyncio.create_task(bench.handle(asyncio.Event().wait()))
    await until(bench.record.said, ["rests"])
    await bench.rest.end()
    handled.cancel()
    await turns()
    assert bench.record.marked
    ended = Bench()
    await ended.rest.end()
    handled = asyncio.create_task(ended.handle(asyncio.Event().wait()))
    await turns()
    assert ended.record.said == []
    handled.cancel()


async def test_where_nothing_is_suspect_nothing_is_watched() -> None:
    async def author() -> str:
        with at_work():
            await goes_on()
        return "well"

    work = author()
    assert watched(work) is work
    async with waiting(None):
        assert await work == "well"
