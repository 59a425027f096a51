"""The call desk: pages out, answers in, and asking again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rowmill_contracts.envelope import PAGE_ROWS, Message
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_row_executor.calls import BusCallDesk
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.settings import RowExecutorSettings


class PublishingBus:
    """Keeps what is published, and hands in answers."""

    reply_to = "replies.here"

    def __init__(self) -> None:
        self.published: list[tuple[str, ToolCalls]] = []
        self._callback: Callable[[Any], None] | None = None
        self.reconnected: Callable[[], None] = lambda: None

    async def publish(self, message: Message, key: str, *, reply_to: str | None = None) -> None:
        assert isinstance(message, ToolCalls)
        assert reply_to == self.reply_to
        self.published.append((key, message))

    def on_reply(self, message: type[Any], callback: Callable[[Any], None]) -> None:
        assert message is ToolResults
        self._callback = callback

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.reconnected = callback

    def answer(self, *call_ids: str, **outcome: Any) -> None:
        assert self._callback is not None
        told = {"outcome": "completed", **outcome}
        self._callback(ToolResults(results=[CallOutcome(call_id=call_id, **told) for call_id in call_ids]))

    @property
    def asked(self) -> list[str]:
        return [call.call_id for _, message in self.published for call in message.calls]


@pytest.fixture
def bus() -> PublishingBus:
    return PublishingBus()


@pytest.fixture
def desk(bus: PublishingBus, frozen_clock: Any) -> BusCallDesk:
    return BusCallDesk(bus, RowExecutorSettings(), frozen_clock)


def asked(desk: BusCallDesk, run: str = "run", shard: int = 0) -> tuple[str, asyncio.Future[CallOutcome]]:
    call_id = desk.new_call_id()
    item = CallItem(call_id=call_id, tool="t.t", receipt_key="k", input=msgspec.Raw(b"{}"))
    return call_id, desk.ask(Asker(run, "org", "play", 5.0), shard, item)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_travel_in_pages_per_run_and_shard(desk: BusCallDesk, bus: PublishingBus) -> None:
    for _ in range(PAGE_ROWS + 50):
        asked(desk)
    asked(desk, shard=3)
    asked(desk, run="other")
    await turn()
    pages = sorted((key, message.run_id, len(message.calls)) for key, message in bus.published)
    assert pages == [
        ("gateway.calls.0.v1", "other", 1),
        ("gateway.calls.0.v1", "run", 50),
        ("gateway.calls.0.v1", "run", PAGE_ROWS),
        ("gateway.calls.3.v1", "run", 1),
    ]


async def test_each_answer_reaches_who_asked(desk: BusCallDesk, bus: PublishingBus) -> None:
    first, first_answer = asked(desk)
    second, second_answer = asked(desk)
    bus.answer(second, reason="second")
    bus.answer(first, "unknown to us")
    assert (await second_answer).reason == "second"
    assert (await first_answer).call_id == first
    assert desk.out == 0


async def test_an_answer_that_comes_twice_or_too_late_means_nothing(desk: BusCallDesk, bus: PublishingBus) -> None:
    call_id, answer = asked(desk)
    answer.cancel()
    bus.answer(call_id)
    bus.answer(call_id)
    assert desk.out == 0


async def test_everything_unanswered_is_asked_again_after_a_new_connection(desk: BusCallDesk, bus: PublishingBus) -> None:
    answered, _ = asked(desk)
    silent, _ = asked(desk)
    await turn()
    bus.answer(answered)
    bus.reconnected()
    await turn()
    assert bus.asked == [answered, silent, silent]


async def test_silent_calls_are_asked_again_ever_more_rarely(desk: BusCallDesk, bus: PublishingBus, frozen_clock: Any) -> None:
    asked(desk)
    times = []
    for second in range(130):
        before = len(bus.asked)
        desk.look(frozen_clock.monotonic() + second)
        await turn()
        if len(bus.asked) > max(before, 1):
            times.append(second)
    assert times == [10, 30, 70]


async def test_dropped_calls_are_not_asked_again(desk: BusCallDesk, bus: PublishingBus, frozen_clock: Any) -> None:
    _, answer = asked(desk)
    await turn()
    answer.cancel()
    desk.look(frozen_clock.monotonic() + 60)
    await turn()
    assert len(bus.asked) == 1
    assert desk.out == 0


async def test_a_process_that_stops_parks_the_rows_whose_calls_are_not_answered_soon(
    desk: BusCallDesk, bus: PublishingBus, frozen_clock: Any
) -> None:
    answered, soon = asked(desk)
    _, silent = asked(desk)
    desk.leave()
    desk.look(frozen_clock.monotonic() + 4)
    bus.answer(answered)
    desk.look(frozen_clock.monotonic() + 5)
    assert soon.result().outcome == "completed"
    assert (silent.result().outcome, silent.result().wait_ms) == ("deferred", 5_000)
    _, later = asked(desk)  # by a row that goes on meanwhile
    desk.look(frozen_clock.monotonic() + 5)
    assert later.result().outcome == "deferred"
    assert desk.out == 0


async def test_a_call_in_flight_for_too_long_lets_its_row_be_parked(desk: BusCallDesk, frozen_clock: Any) -> None:
    _, answer = asked(desk)
    desk.look(frozen_clock.monotonic() + 301)
    outcome = await answer
    assert (outcome.outcome, outcome.wait_ms) == ("deferred", 60_000)
