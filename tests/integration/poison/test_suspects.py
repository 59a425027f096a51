"""The bus on a real broker with consumers that die of what they are given: suspects, halves, and the end of poison."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import aio_pika
import msgspec

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.rest import working
from rowmill.runtime.session import Session
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.suspicion import CONDEMNED_AFTER, CRASHES
from rowmill.runtime.work_record import record_name
from rowmill_contracts import topology
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import AdvanceRun

BOUND = 60.0
QUEUE = topology.EXECUTOR_ROWS


def settings(url: str) -> ServiceSettings:
    return ServiceSettings(broker_url=url, time_scale=0.05, drain_timeout=0.0)


def page(name: str, rows: int) -> RowTasks:
    tasks = [RowTask(key=f"{name}{number:02x}", index=number, page=0, data=msgspec.Raw(b"{}")) for number in range(rows)]
    return RowTasks(run_id=name, number=1, org="o", play="p", dataset="d", started_at=1.0, code_digest="c", rows=tasks)


class Mortal:
    """Processes one after the other, as far as the broker can tell: each is a bus whose connection breaks when its handler meets something deadly.

    ``deadly_at_rest``: what breaks it while no author code is at work, as far as its handler says. ``beside``: how many messages were in hand with
    each suspect, itself included.
    """

    def __init__(self, url: str, deadly: Callable[[Message], bool], deadly_at_rest: Callable[[Message], bool] = lambda _: False) -> None:
        self._url = url
        self._deadly = deadly
        self._deadly_at_rest = deadly_at_rest
        self._in_hand = 0
        self.handled: Counter[str] = Counter()
        self.beside: Counter[int] = Counter()
        self.deaths = 0

    async def live(self, until: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND):
            while not until():
                await self._live_once(until)

    async def _live_once(self, until: Callable[[], bool]) -> None:
        died = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            self._in_hand += 1
            try:
                if CRASHES in delivery.headers:
                    self.beside[self._in_hand] += 1
                await asyncio.sleep(0.01)
                async with working(delivery.rest):
                    await asyncio.sleep(0.001)
                while delivery.rest is not None and delivery.rest.recorded:
                    await asyncio.sleep(0.001)
                if self._deadly_at_rest(delivery.message):
                    died.set()
                    await asyncio.sleep(BOUND)
                if self._deadly(delivery.message):
                    async with working(delivery.rest):
                        died.set()
                        await asyncio.sleep(BOUND)
                self.handled.update(names_in(delivery.message))
            finally:
                self._in_hand -= 1

        bus = Bus(settings(self._url), service="mortal")
        async with bus:
            await bus.consume(QUEUE, handle, watched=True)
            while not died.is_set() and not until():
                await asyncio.sleep(0.01)
            if died.is_set():
                self.deaths += 1
                bus._sessions.begin_end()
                session = bus._sessions.current
                assert session is not None
                await self._acknowledgements(session)
                session.connection.abort()
                await session.ended.wait()

    async def _acknowledgements(self, session: Session) -> None:
        """Return once the broker has those of all that was handled: one that was lost would have its message handled again, rightly."""
        handled, rounds = -1, 0
        while rounds < 2:
            rounds = rounds + 1 if handled == self.handled.total() else 0
            handled = self.handled.total()
            await session.depths([QUEUE])


def names_in(message: Message) -> list[str]:
    return [row.key for row in message.rows] if isinstance(message, RowTasks) else [getattr(message, "run_id", "")]


async def letters(url: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
    """The dead letters of the queue, taken."""
    found = []
    async with await aio_pika.connect(url) as connection:
        dead = await (await connection.channel()).get_queue(topology.dead(QUEUE), ensure=False)
        while (message := await dead.get(fail=False)) is not None:
            await message.ack()
            found.append(message)
    return found


async def died_of(url: str, mortal: Mortal, enough: Callable[[], bool] = lambda: True) -> list[aio_pika.abc.AbstractIncomingMessage]:
    """Let it live until a letter is dead and what else is waited for has happened; the dead letters, taken."""
    found: list[aio_pika.abc.AbstractIncomingMessage] = []
    done = asyncio.Event()
    living = asyncio.create_task(mortal.live(done.is_set))
    async with asyncio.timeout(BOUND):
        while not found or not enough():
            found += await letters(url)
            await asyncio.sleep(0.05)
    done.set()
    await living
    return found


async def publish(url: str, *messages: Message) -> None:
    async with Bus(settings(url), service="publisher") as bus:
        for number, message in enumerate(messages):
            await bus.publish(message, QUEUE, message_id=f"m{number}", correlation_id="asked", reply_to="replies.nobody")


async def left(url: str) -> dict[str, int]:
    async with Bus(settings(url), service="look") as bus:
        return {name: ready for name, (ready, _) in (await bus.depths([QUEUE, topology.suspect(QUEUE)])).items() if ready}


async def test_a_poison_row_dies_alone_and_every_row_beside_it_is_handled_once(broker_url: str) -> None:
    pages = [page(name, 8) for name in "abcde"]
    await publish(broker_url, *pages)
    healthy = {name for each in pages for name in names_in(each)} - {"c05"}
    mortal = Mortal(broker_url, lambda message: "c05" in names_in(message))
    dead = await died_of(broker_url, mortal, lambda: set(mortal.handled) >= healthy)
    assert set(mortal.handled) == healthy
    assert max(mortal.handled.values()) == 1
    assert mortal.deaths == 7, "two in the work queue, one for each halving of eight, two for the row alone"
    assert set(mortal.beside) == {1}, "nothing runs beside a suspect"
    assert len(dead) == 1
    died = decode(dead[0].type, dead[0].body)
    assert names_in(died) == ["c05"]
    assert dead[0].headers["x-rowmill-error"] == "poison: crashed its consumer 7 times"
    assert dead[0].headers["x-rowmill-error-type"] == "poison"
    assert (dead[0].headers["x-rowmill-exchange"], dead[0].headers["x-rowmill-key"]) == (topology.EXCHANGE, QUEUE)
    assert dead[0].message_id == "m2.1.0.1", "each half is a message of its own, not a copy of the other"
    assert not await left(broker_url)


async def test_what_is_no_page_dies_at_its_third_delivery_alone(broker_url: str) -> None:
    await publish(broker_url, AdvanceRun(run_id="deadly"), AdvanceRun(run_id="well"))
    mortal = Mortal(broker_url, lambda message: "deadly" in names_in(message))
    dead = await died_of(broker_url, mortal, lambda: "well" in mortal.handled)
    assert [letter.headers["x-rowmill-error"] for letter in dead] == ["poison: crashed its consumer 4 times"]
    assert [(letter.message_id, letter.correlation_id, letter.reply_to) for letter in dead] == [("m0", "asked", "replies.nobody")]
    assert mortal.handled == {"well": 1}
    assert not await left(broker_url)


async def test_what_is_at_rest_when_its_consumers_die_is_handled_by_the_first_that_lives(broker_url: str) -> None:
    """Far more often than would condemn what was at work; and once it is at work, its deaths count as ever."""
    await publish(broker_url, page("well", 1), page("deadly", 1))
    deaths: Counter[str] = Counter()

    def at_rest(message: Message) -> bool:
        name = names_in(message)[0]
        deaths[name] += 1
        return deaths[name] <= (10 if name == "well00" else 6)

    mortal = Mortal(broker_url, lambda message: names_in(message) == ["deadly00"], at_rest)
    dead = await died_of(broker_url, mortal, lambda: "well00" in mortal.handled)
    assert mortal.handled == {"well00": 1}
    assert [letter.message_id for letter in dead] == ["m1"]
    assert (deaths["well00"], deaths["deadly00"]) == (11, 8)
    assert dead[0].headers["x-rowmill-error"] == "poison: crashed its consumer 8 times"
    assert not await left(broker_url)


async def test_what_kills_only_while_it_seems_to_wait_is_condemned_in_the_end(broker_url: str) -> None:
    await publish(broker_url, page("hidden", 1))
    mortal = Mortal(broker_url, lambda _: False, lambda _: True)
    dead = await died_of(broker_url, mortal)
    assert (mortal.deaths, mortal.handled) == (2 + CONDEMNED_AFTER, {})
    assert dead[0].headers["x-rowmill-error"] == "poison: its consumer died 22 times, 20 times while it only seemed to wait"
    assert not await left(broker_url)


async def test_a_suspect_whose_record_cannot_be_kept_is_handled_and_blamed_for_none_of_its_deaths(broker_url: str) -> None:
    """Somebody else has a queue of its name, so that the broker refuses ours."""
    async with await aio_pika.connect(broker_url) as connection:
        taken = await (await connection.channel()).declare_queue(record_name(QUEUE, "m0"), durable=True)
        await publish(broker_url, page("well", 1))
        deaths = 0

        def at_rest(_: Message) -> bool:
            nonlocal deaths
            deaths += 1
            return deaths <= 6

        mortal = Mortal(broker_url, lambda _: False, at_rest)
        done = asyncio.Event()
        living = asyncio.create_task(mortal.live(done.is_set))
        async with asyncio.timeout(BOUND):
            while not mortal.handled or await left(broker_url):
                await asyncio.sleep(0.05)
        done.set()
        await living
        await taken.delete(if_unused=False, if_empty=False)
    assert (mortal.handled, mortal.deaths) == ({"well00": 1}, 6)
    assert not await letters(broker_url)


async def test_deliveries_that_a_process_outlived_make_nothing_suspect(broker_url: str) -> None:
    deliveries: list[int] = []
    suspects: list[bool] = []
    let_go = asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        deliveries.append(delivery.deliveries)
        suspects.append(CRASHES in delivery.headers)
        await let_go.wait()

    async with Bus(settings(broker_url), service="cut") as bus, asyncio.timeout(BOUND):
        await bus.consume(QUEUE, slow)
        await bus.publish(AdvanceRun(run_id="slow"), QUEUE)
        for cut in range(1, 5):
            while len(deliveries) < cut:
                await asyncio.sleep(0.02)
            if cut < 4:
                (await bus.live_session()).connection.abort()
        let_go.set()
    assert deliveries == [1, 2, 3, 4]
    assert not any(suspects)


async def test_a_suspect_that_a_process_cannot_finish_before_it_stops_does_not_count_as_its_crash(broker_url: str) -> None:
    """Its stop is no sign of poison: the next process finds it as if it had never been taken."""
    async with Bus(settings(broker_url), service="publisher") as bus:
        await bus.publish_body(
            encode(AdvanceRun(run_id="slow")), AdvanceRun.message_type, topology.suspect(QUEUE), message_id="s", headers={CRASHES: 2}
        )
    deliveries: list[int] = []

    async def slow(delivery: Delivery) -> None:
        deliveries.append(delivery.deliveries)
        if len(deliveries) < 4:
            await asyncio.sleep(BOUND)

    async with asyncio.timeout(BOUND):
        for stop in range(1, 5):
            async with Bus(settings(broker_url), service="stopping") as bus:
                await bus.consume(QUEUE, slow)
                while len(deliveries) < stop:
                    await asyncio.sleep(0.02)
        while await left(broker_url):
            await asyncio.sleep(0.05)
    assert deliveries == [1, 1, 1, 1]
    assert not await letters(broker_url)
