"""When a suspect is at rest and when at work, and what is on record meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from rowmill.runtime.rest import Rest, at_work, goes_on, watched, working


class Record:
    """Writes down what becomes of the mark. ``stores``: set while steps are stored. ``broken``: none is ever."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.marked = False
        self.stores = asyncio.Event()
        self.stores.set()
        self.broken = False

    async def works(self) -> None:
        await self._step("works", marked=True)

    async def rests(self) -> None:
        await self._step("rests", marked=False)

    async def _step(self, word: str, *, marked: bool) -> None:
        await self.stores.wait()
        if self.broken:
            raise ConnectionError("the broker is away")
        self.marked = marked
        self.said.append(word)

    def look(self, what: str) -> None:
        self.said.append(what if self.marked else f"{what} unmarked")


async def until(said: object, wanted: object) -> None:
    for _ in range(1000):
        if said == wanted:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{said} never became {wanted}")


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def rest(record: Record) -> Rest:
    return Rest(record, settling=0.0)


async def test_a_suspect_that_runs_no_author_code_is_at_rest(record: Record, rest: Rest) -> None:
    await turns()
    await rest.end()
    assert record.said == []


async def test_it_is_on_record_that_author_code_works_before_it_begins_and_before_it_goes_on(record: Record, rest: Rest) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def author() -> str:
        record.look("begins")
        given: str = await answer
        record.look("goes on")
        return given

    handled = asyncio.create_task(rest.watch(author()))
    await until(record.said, ["works", "begins", "rests"])
    record.stores.clear()
    answer.set_result("well")
    await turns()
    assert record.said == ["works", "begins", "rests"], "it goes on before that is on record"
    record.stores.set()
    assert await handled == "well"
    await until(record.said, ["works", "begins", "rests", "works", "goes on", "rests"])


async def test_an_answer_that_comes_soon_costs_no_record(record: Record) -> None:
    async def author() -> None:
        for _ in range(5):
            await asyncio.sleep(0.001)

    await Rest(record, settling=60.0).watch(author())
    assert record.said == ["works"]


async def test_a_handler_says_when_it_runs_author_code_itself(record: Record, rest: Rest) -> None:
    for _ in range(2):
        async with working(rest):
            record.look("handles")
            await turns()
        await turns()
    assert record.said == 2 * ["works", "handles", "rests"]


async def test_author_code_in_a_thread_or_in_a_step_is_no_rest(record: Record, rest: Rest) -> None:
    thread, step = asyncio.Event(), asyncio.Event()

    async def runs() -> None:
        record.look("step")
        with at_work():
            await step.wait()

    async def author() -> None:
        with at_work():
            await thread.wait()
        await asyncio.create_task(watched(runs()))

    handled = asyncio.create_task(rest.watch(author()))
    await turns()
    assert record.said == ["works"]
    thread.set()
    await until(record.said, ["works", "step"])
    await turns()
    assert record.said == ["works", "step"]
    step.set()
    await handled


async def test_an_answer_to_a_task_of_the_authors_own_ends_the_rest_too(record: Record, rest: Rest) -> None:
    answers = [asyncio.Event(), asyncio.Event()]

    async def call(number: int) -> None:
        await answers[number].wait()
        await goes_on()
        record.look(f"answered {number}")

    async def author() -> None:
        await asyncio.gather(call(0), call(1))

    handled = asyncio.create_task(rest.watch(author()))
    await until(record.said, ["works", "rests"])
    answers[0].set()
    await until(record.said, ["works", "rests", "works", "answered 0", "rests"])
    answers[1].set()
    await handled
    assert record.said[5:7] == ["works", "answered 1"]


@pytest.mark.parametrize("waking", [False, True])
async def test_who_is_cancelled_at_rest_or_while_it_wakes_hears_of_it_at_work(record: Record, rest: Rest, waking: bool) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def author() -> None:
        try:
            await answer
        except asyncio.CancelledError:
            record.look("cancelled")
            raise

    task = asyncio.create_task(rest.watch(author()))
    await until(record.said, ["works", "rests"])
    record.stores.clear()
    if waking:
        answer.set_result(None)
        await turns()
    task.cancel()
    await turns()
    assert record.said == ["works", "rests"]
    record.stores.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert record.said[2:4] == ["works", "cancelled"]


async def test_who_is_cancelled_while_it_wakes_breaks_off_neither_the_record_nor_who_wakes_with_it(record: Record, rest: Rest) -> None:
    answer = asyncio.Event()

    async def author(name: str) -> None:
        await answer.wait()
        record.look(name)

    one, other = (asyncio.create_task(rest.watch(author(name))) for name in ("one", "other"))
    await until(record.said, ["works", "rests"])
    record.stores.clear()
    answer.set()
    await turns()
    one.cancel()
    await turns()
    record.stores.set()
    await other
    assert one.cancelled()
    assert record.said[2:4] == ["works", "other"]


async def test_what_author_code_raises_comes_out_and_its_timeouts_are_its_own(rest: Rest) -> None:
    async def author() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        raise LookupError("the author's")

    with pytest.raises(LookupError, match="the author's"):
        await rest.watch(author())


@pytest.mark.parametrize("kept", [False, True])
async def test_a_record_that_cannot_be_kept_keeps_nobody_waiting(record: Record, rest: Rest, kept: bool) -> None:
    answer = asyncio.Event()
    record.broken = not kept
    handled = asyncio.create_task(rest.watch(answer.wait()))
    await turns()
    assert record.said == (["works", "rests"] if kept else [])
    record.broken = True
    answer.set()
    async with asyncio.timeout(20):
        assert await handled
    record.broken = False
    before = list(record.said)
    async with working(rest):
        await turns()
    await turns()
    assert record.said == before, "it is judged by what was stored last"


async def test_after_its_end_nothing_is_recorded(record: Record, rest: Rest) -> None:
    handled = asyncio.create_task(rest.watch(asyncio.Event().wait()))
    await until(record.said, ["works"])
    await rest.end()
    handled.cancel()
    await turns()
    assert record.said == ["works"]
    assert handled.cancelled()


async def test_where_nothing_is_suspect_nothing_is_watched() -> None:
    async def author() -> str:
        with at_work():
            await goes_on()
        return "well"

    work = author()
    assert watched(work) is work
    async with working(None):
        assert await work == "well"
