"""When a suspect is taken: while nothing else of its queue is in hand in that process, and only by one that may have it."""

from __future__ import annotations

import asyncio

from tests.integration.poison.test_suspects import BOUND, QUEUE

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.suspicion import CRASHES
from rowmill_contracts import topology
from rowmill_contracts.envelope import encode
from rowmill_contracts.runs import AdvanceRun


def settings(url: str) -> ServiceSettings:
    return ServiceSettings(broker_url=url, time_scale=0.05, suspect_alone=BOUND / 0.05)


async def suspected(bus: Bus, run_id: str) -> None:
    message = AdvanceRun(run_id=run_id)
    await bus.publish_body(encode(message), message.message_type, topology.suspect(QUEUE), message_id=run_id, headers={CRASHES: 2})


async def test_a_suspect_has_nothing_of_its_queue_beside_it_however_much_there_is(broker_url: str) -> None:
    """Its crash is then its own."""
    in_hand: set[str] = set()
    beside: list[set[str]] = []
    handled: list[str] = []

    async def handle(delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        name = delivery.message.run_id
        in_hand.add(name)
        if CRASHES in delivery.headers:
            for _ in range(20):
                beside.append(in_hand - {name})
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(0.02)
        in_hand.discard(name)
        handled.append(name)

    async with Bus(settings(broker_url), service="busy") as bus, asyncio.timeout(BOUND):
        others = [f"other-{number}" for number in range(100)]
        await asyncio.gather(*(bus.publish(AdvanceRun(run_id=name), QUEUE) for name in others))
        for number in range(3):
            await suspected(bus, f"suspect-{number}")
        await bus.consume(QUEUE, handle, prefetch=8)
        while len(handled) < len(others) + 3:
            await asyncio.sleep(0.01)
    assert len(beside) == 60
    assert not any(beside), beside


async def test_a_suspect_is_left_to_others_by_a_process_that_may_not_have_it(broker_url: str) -> None:
    looks = 0
    allowed = False
    handled = asyncio.Event()

    def may_take() -> bool:
        nonlocal looks
        looks += 1
        return allowed

    async def handle(delivery: Delivery) -> None:
        del delivery
        handled.set()

    async with Bus(settings(broker_url), service="waiting") as bus, asyncio.timeout(BOUND):
        await suspected(bus, "suspect")
        await bus.consume(QUEUE, handle, may_take_suspects=may_take)
        while looks < 5:
            bus.look_for_suspects()
            await asyncio.sleep(0.02)
        assert not handled.is_set()
        assert (await bus.depths([topology.suspect(QUEUE)]))[topology.suspect(QUEUE)][0] == 1
        allowed = True
        await handled.wait()
