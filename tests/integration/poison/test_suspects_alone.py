"""When a suspect is taken: while nothing else of its queue, or of one that shares its gate, is in hand in that process, and only by one that may."""

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

OTHER = topology.EXECUTOR_ADVANCE


def settings(url: str, *, alone: float = BOUND) -> ServiceSettings:
    return ServiceSettings(broker_url=url, time_scale=0.05, suspect_alone=alone / 0.05, suspect_poll=2.0)


async def suspected(bus: Bus, run_id: str, queue: str = QUEUE) -> None:
    message = AdvanceRun(run_id=run_id)
    await bus.publish_body(encode(message), message.message_type, topology.suspect(queue), message_id=run_id, headers={CRASHES: 2})


class Company:
    """A handler that notes whom it has in hand while it has a suspect."""

    def __init__(self) -> None:
        self.in_hand: set[str] = set()
        self.beside: list[set[str]] = []
        self.handled: list[str] = []

    async def __call__(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        name = delivery.message.run_id
        self.in_hand.add(name)
        if CRASHES in delivery.headers:
            for _ in range(20):
                self.beside.append(self.in_hand - {name})
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(0.02)
        self.in_hand.discard(name)
        self.handled.append(name)

    async def had(self, count: int) -> None:
        while len(self.handled) < count:
            await asyncio.sleep(0.01)

    def suspects(self) -> list[int]:
        """Their places among those that were handled."""
        return [place for place, name in enumerate(self.handled) if name.startswith("suspect")]


async def busy(bus: Bus, queue: str, over: asyncio.Event) -> int:
    """Publish until ``over``, so that there is always something to handle; how many that were."""
    number = 0
    while not over.is_set():
        await asyncio.gather(*(bus.publish(AdvanceRun(run_id=f"other-{number + one} of {queue}"), queue) for one in range(8)))
        number += 8
    return number


async def test_a_suspect_has_nothing_beside_it_of_its_queue_or_of_one_that_shares_its_gate(broker_url: str) -> None:
    """Its crash is then its own. A row that ended its process was held against the body of its run, which came with it each time."""
    company, over, queues = Company(), asyncio.Event(), (QUEUE, OTHER)
    async with Bus(settings(broker_url), service="busy") as bus, asyncio.timeout(BOUND):
        for queue in queues:
            await bus.consume(queue, company, prefetch=8, gate="shared")
        traffic = [asyncio.create_task(busy(bus, queue, over)) for queue in queues]
        while not all(any(name.endswith(queue) for name in company.handled) for queue in queues):
            await asyncio.sleep(0.01)
        for queue in queues:
            for number in range(3):
                await suspected(bus, f"suspect-{number} of {queue}", queue)
        bus.look_for_suspects()
        while len(company.suspects()) < 3 * len(queues):
            await asyncio.sleep(0.01)
        over.set()
        published = sum(await asyncio.gather(*traffic))
        while len(company.handled) < published + 3 * len(queues):
            await asyncio.sleep(0.01)
    assert len(company.beside) == 60 * len(queues)
    assert not any(company.beside), company.beside


async def test_suspects_are_handled_one_after_the_other_before_others_are_let_in(broker_url: str) -> None:
    """Else each suspect would wait for those who came in before it, however long they take."""
    company, let_go = Company(), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        if delivery.message_id == "begun":
            company.handled.append("begun")
            await let_go.wait()
        else:
            await company(delivery)

    async with Bus(settings(broker_url), service="busy") as bus, asyncio.timeout(BOUND):
        await bus.consume(QUEUE, handle, prefetch=50)
        await bus.publish(AdvanceRun(run_id="begun"), QUEUE, message_id="begun")
        while not company.handled:
            await asyncio.sleep(0.01)
        for number in range(5):
            await suspected(bus, f"suspect-{number}")
        bus.look_for_suspects()
        others = 0
        while len(company.handled) + len(company.in_hand) == others + 1:  # until one is kept waiting: a suspect wants to be alone
            others += 1
            await bus.publish(AdvanceRun(run_id=f"other-{others}"), QUEUE)
            await asyncio.sleep(0.2)
        let_go.set()
        while len(company.handled) < 1 + others + 5:
            await asyncio.sleep(0.01)
    first = company.suspects()[0]
    assert company.suspects() == list(range(first, first + 5)), company.handled
    assert first < others + 1


class Held(Company):
    """Messages are in hand until they are let go. ``met``: with whom each was in hand together."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[str, set[str]] = {}
        self._let_go: set[str] = set()

    async def __call__(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        name = delivery.message.run_id
        self.met[name] = set(self.in_hand)
        for other in self.in_hand:
            self.met[other].add(name)
        self.in_hand.add(name)
        while name not in self._let_go:
            await asyncio.sleep(0.005)
        self.in_hand.discard(name)
        self.handled.append(name)

    async def has(self, name: str) -> None:
        while name not in self.in_hand:
            await asyncio.sleep(0.005)

    def let_go(self, *names: str) -> None:
        self._let_go |= set(names)


async def test_a_suspect_that_takes_long_counts_as_in_hand_to_the_next_one_of_another_queue(broker_url: str) -> None:
    """It is waited for, as anything in hand is."""
    company = Held()
    async with Bus(settings(broker_url, alone=3.0), service="busy") as bus, asyncio.timeout(BOUND):
        for queue in (QUEUE, OTHER):
            await bus.consume(queue, company, gate="shared")
        await suspected(bus, "row", QUEUE)
        await company.has("row")
        await suspected(bus, "body", OTHER)
        bus.look_for_suspects()
        await bus.publish(AdvanceRun(run_id="let in when its time alone is over"), QUEUE)
        await company.has("let in when its time alone is over")
        company.let_go("let in when its time alone is over")
        await company.had(1)
        await asyncio.sleep(0.3)
        company.let_go("row", "body")
        await company.had(3)
    assert company.met["row"] == {"let in when its time alone is over"}
    assert company.met["body"] == set()


async def test_each_suspect_has_its_whole_time_alone(broker_url: str) -> None:
    """However long the one before it took of what others wait in all."""
    company = Held()
    async with Bus(settings(broker_url, alone=4.0), service="busy") as bus, asyncio.timeout(BOUND):
        for name in ("first", "second"):
            await suspected(bus, name)
        await bus.consume(QUEUE, company)
        await company.has("first")
        await bus.publish(AdvanceRun(run_id="other"), QUEUE)
        await asyncio.sleep(2.5)
        company.let_go("first")
        await company.has("second")
        await asyncio.sleep(2.5)
        company.let_go("second", "other")
        await company.had(3)
    assert company.met["second"] == set()


async def test_suspects_keep_others_waiting_for_so_long_and_no_longer(broker_url: str) -> None:
    """However many there are."""
    company = Company()
    async with Bus(settings(broker_url, alone=0.3), service="busy") as bus, asyncio.timeout(BOUND):
        for number in range(30):  # each takes a tenth of a second
            await suspected(bus, f"suspect-{number}")
        await bus.consume(QUEUE, company)
        while not company.in_hand:
            await asyncio.sleep(0.005)
        await bus.publish(AdvanceRun(run_id="other"), QUEUE)
        await company.had(31)
    assert company.handled.index("other") < 20


async def test_nobody_waits_for_a_suspect_that_somebody_else_has_taken(broker_url: str) -> None:
    here, there = Held(), Held()
    async with (
        Bus(settings(broker_url), service="here") as bus,
        Bus(settings(broker_url), service="there") as other,
        asyncio.timeout(BOUND),
    ):
        await bus.consume(QUEUE, here, may_take_suspects=lambda: bool(here.in_hand), gate="shared")
        await bus.publish(AdvanceRun(run_id="long"), QUEUE)
        await here.has("long")
        await suspected(bus, "suspect")
        bus.look_for_suspects()
        number = 0
        while len(here.in_hand) > number:  # until the gate is closed
            number = len(here.in_hand)
            await bus.publish(AdvanceRun(run_id=f"before-{number}"), QUEUE)
            await asyncio.sleep(0.2)
        await other.consume(QUEUE, there, prefetch=1, may_take_suspects=lambda: True)
        while "suspect" not in there.in_hand:
            there.let_go(*(there.in_hand - {"suspect"}))
            await asyncio.sleep(0.01)
        while len(here.in_hand) <= number:  # those that were kept waiting are let in, though the long one is there
            await asyncio.sleep(0.01)
        assert "long" in here.in_hand
        here.let_go(*here.in_hand, *(f"before-{kept}" for kept in range(number + 2)))
        there.let_go("suspect")
        await there.had(1)


async def test_no_more_suspects_are_taken_by_a_process_that_may_have_none_any_more(broker_url: str) -> None:
    company = Held()
    async with Bus(settings(broker_url), service="busy") as bus, asyncio.timeout(BOUND):
        for name in ("first", "second"):
            await suspected(bus, name)
        await bus.consume(QUEUE, company, may_take_suspects=lambda: not company.handled or company.handled[-1] == "other")
        await company.has("first")
        company.let_go("first", "second")
        await bus.publish(AdvanceRun(run_id="other"), QUEUE)
        await company.has("other")
        assert company.handled == ["first"]
        company.let_go("other")
        await company.had(3)


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
