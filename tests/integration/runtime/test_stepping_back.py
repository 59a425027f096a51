"""Consumers of a queue that serves one at a time: who steps back lets the next one go first, and keeps what it has in hand."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.runs import AdvanceRun
from rowmill_contracts.topology import gateway_calls

pytestmark = pytest.mark.servers

BOUND = 30.0


class Consumer:
    """``open``: what is handled ends; until then it is in hand."""

    def __init__(self, url: str, name: str) -> None:
        self.bus = Bus(ServiceSettings(broker_url=url, time_scale=0.05), service=name)
        self.seen: list[tuple[str, int]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def handle(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        self.seen.append((delivery.message.run_id, delivery.deliveries))
        await self.open.wait()

    async def start(self, queue: str) -> None:
        await self.bus.start()
        await self.bus.consume(queue, self.handle)

    async def saw(self, *runs: str) -> None:
        async with asyncio.timeout(BOUND):
            while [run for run, _ in self.seen] != list(runs):
                await asyncio.sleep(0.01)


async def test_who_steps_back_lets_the_next_go_first_and_keeps_what_it_has_in_hand(broker_url: str) -> None:
    queue = gateway_calls(3)
    first, second = Consumer(broker_url, "first"), Consumer(broker_url, "second")
    await first.start(queue)
    await second.start(queue)

    async def publish(run: str) -> None:
        await first.bus.publish(AdvanceRun(run_id=run), queue)

    first.open.clear()
    await publish("a")
    await first.saw("a")
    await first.bus.step_back(queue)
    await publish("b")
    await second.saw("b")
    first.open.set()
    await second.bus.step_back(queue)
    await publish("c")
    await first.saw("a", "c")
    await first.bus.step_back(queue)
    await second.bus.stop()
    await publish("d")
    await first.saw("a", "c", "d")
    await first.bus.stop()
    assert Counter(first.seen + second.seen) == Counter({(run, 1): 1 for run in "abcd"}), "each once"


async def test_stepping_back_under_way_loses_and_doubles_nothing_and_leaves_no_channels(broker_url: str) -> None:
    queue = gateway_calls(4)
    consumers = [Consumer(broker_url, "first"), Consumer(broker_url, "second")]
    for consumer in consumers:
        await consumer.start(queue)
    runs = [f"run-{number}" for number in range(200)]

    async def publish() -> None:
        for run in runs:
            await consumers[0].bus.publish(AdvanceRun(run_id=run), queue)

    publishing = asyncio.create_task(publish())
    async with asyncio.timeout(BOUND):
        turn = 0
        while not publishing.done() or len({run for consumer in consumers for run, _ in consumer.seen}) < len(runs):
            await consumers[turn % 2].bus.step_back(queue)
            turn += 1
        await publishing
    assert turn > 10
    assert all(consumer.seen for consumer in consumers), "they took turns"
    seen = Counter(run for consumer in consumers for run, _ in consumer.seen)
    for consumer in consumers:
        session = consumer.bus._sessions.current
        assert session is not None
        assert await session.look() is None
        assert not session._cancelled
        await consumer.bus.stop()
    assert seen == Counter(runs), "each once"


async def test_who_is_to_step_back_again_while_it_does_stands_in_line_once(broker_url: str) -> None:
    """A consumer that nobody knows of would keep its place there until its session ends."""
    queue = gateway_calls(5)
    first, second = Consumer(broker_url, "first"), Consumer(broker_url, "second")
    await first.start(queue)
    await asyncio.gather(*(first.bus.step_back(queue) for _ in range(3)))
    await second.start(queue)
    await first.bus.step_back(queue)
    await first.bus.publish(AdvanceRun(run_id="a"), queue)
    await second.saw("a")
    for consumer in (first, second):
        await consumer.bus.stop()
