"""What is noted of a message while its handler waits, goes on, or never begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aio_pika.abc import AbstractIncomingMessage
from tests.fakes.clocks import LeapingLoop, LoopClock

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.handling import Handler, Handling
from rowmill.runtime.in_hand import MessagesInHand
from rowmill.runtime.outages import Outages
from rowmill.runtime.session import Session
from rowmill_contracts.envelope import encode
from rowmill_contracts.in_hand import QueueInHand
from rowmill_contracts.runs import AdvanceRun
from rowmill_contracts.topology import EXECUTOR_ADVANCE, suspect

DEADLINE = 60.0
WAITED = 40.0
PAUSE = 5.0
"""Seconds between tries at most."""


class Process:
    """One that handles messages of one queue, on a loop whose time leaps."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.in_hand = MessagesInHand("row-executor", "p1", self.clock, Outages(self.clock))
        self.in_hand.serve(EXECUTOR_ADVANCE, DEADLINE)
        self.handling = Handling(cast("Bus", SimpleNamespace(service="row-executor")), self.clock, self.in_hand)
        self.session = cast("Session", SimpleNamespace(ended=asyncio.Event()))
        self.began = self.clock.monotonic()

    @asynccontextmanager
    async def handles(self, handler: Handler) -> AsyncIterator[None]:
        task = asyncio.create_task(self.handling.handle(self.session, EXECUTOR_ADVANCE, handler, incoming(), "bury"))
        try:
            yield
        finally:
            task.cancel()

    async def at(self, seconds: float) -> tuple[int, int]:
        """How many are overdue then, and how many kept."""
        await asyncio.sleep(self.began + seconds - self.clock.monotonic())
        return self.shown.overdue, self.shown.kept

    @property
    def shown(self) -> QueueInHand:
        [queue] = self.in_hand.shown().queues
        return queue


def incoming(**properties: Any) -> AbstractIncomingMessage:
    known = {"type": AdvanceRun.message_type, "body": encode(AdvanceRun(run_id="r")), "message_id": "m", "headers": {}}
    unset = dict.fromkeys(("correlation_id", "reply_to", "exchange", "routing_key"))
    return cast("AbstractIncomingMessage", SimpleNamespace(**{**unset, **known, **properties}))


def on_leaping_time(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(test)


def test_what_a_handler_waited_does_not_count_and_if_it_then_hangs_that_is_no_outage() -> None:
    tries: list[None] = []

    async def waits_and_hangs(_: Delivery) -> None:
        tries.append(None)
        if len(tries) == 1:
            await asyncio.sleep(WAITED)
            raise UnavailableError("away")
        await asyncio.Event().wait()

    async def test() -> None:
        process = Process()
        async with process.handles(waits_and_hangs):
            assert await process.at(DEADLINE + 1) == (0, 1)  # it may wait still, for as long as it did before
            assert await process.at(2 * WAITED + PAUSE) == (0, 0)
            assert await process.at(WAITED + DEADLINE) == (0, 0)
            assert await process.at(WAITED + PAUSE + DEADLINE) == (1, 0)

    on_leaping_time(test())


def test_a_handler_that_fails_of_an_outage_again_and_again_is_said_to_wait_all_the_time() -> None:
    async def waits(_: Delivery) -> None:
        await asyncio.sleep(WAITED)
        raise UnavailableError("away")

    async def test() -> None:
        process = Process()
        async with process.handles(waits):
            for seconds in range(int(DEADLINE) + 1, 1000):
                assert await process.at(seconds) == (0, 1), seconds

    on_leaping_time(test())


def test_an_error_before_a_suspect_is_handled_leaves_nothing_in_hand() -> None:
    class Unreadable(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise ValueError("unreadable")

    async def nothing(_: Delivery) -> None:
        raise AssertionError

    async def test() -> None:
        process = Process()
        process.in_hand.serve(suspect(EXECUTOR_ADVANCE), DEADLINE, consumed=False)
        with pytest.raises(ValueError, match="unreadable"):
            await process.handling.handle_suspect(process.session, EXECUTOR_ADVANCE, nothing, incoming(headers=Unreadable(a=1)), "bury")
        assert [queue.messages for queue in process.in_hand.shown().queues] == [0]

    on_leaping_time(test())
