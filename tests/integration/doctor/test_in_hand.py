"""Messages in hand on a real broker: found once they are there for too long, or in nobody's hand, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aio_pika
import pytest

from rowmill.dev import ServerSet
from rowmill.doctor import in_hand
from rowmill.doctor.health import listed
from rowmill.doctor.in_hand import InHandLooked, look
from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import encode
from rowmill_contracts.in_hand import QueueInHand
from rowmill_contracts.run_questions import GetRun, RunShown
from rowmill_contracts.runs import AdvanceRun
from rowmill_contracts.topology import ADMISSION_ASKS, EXECUTOR_ADVANCE, EXECUTOR_KEYS, suspect

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]

BOUND = 30.0
SOON, LATE = 0.5, 60.0
"""Deadlines: one that passes within a test, and one that does not."""


@pytest.fixture
async def connection(broker_url: str) -> AsyncIterator[aio_pika.abc.AbstractConnection]:
    async with await aio_pika.connect(broker_url) as connection:
        yield connection


class Worker:
    """A service whose handler keeps what it gets until it is ``let``, however often it is cancelled."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.bus = Bus(ServiceSettings(broker_url=url, time_scale=0.05, **settings), service="row-executor")
        self.began = 0
        self.over = 0
        self.let = asyncio.Event()

    async def handle(self, delivery: Delivery) -> None:
        self.began += 1
        while not self.let.is_set():
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                continue
        self.over += 1

    @asynccontextmanager
    async def working(self, *queues: str, deadline: float, handler: Callable[[Delivery], Awaitable[None]] | None = None) -> AsyncIterator[Bus]:
        async with self.bus:
            for queue in queues:
                await self.bus.consume(queue, handler or self.handle, deadline=deadline)
            try:
                yield self.bus
            finally:
                self.let.set()

    async def has(self, count: int) -> None:
        await until(lambda: self.began == count)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not holds():
            await asyncio.sleep(0.01)


async def asked(connection: aio_pika.abc.AbstractConnection, *queues: str) -> InHandLooked:
    """What one consumer of these queues says, and what is made of it."""
    return await look(connection, dict.fromkeys(queues, 1))


def of(looked: InHandLooked, queue: str = EXECUTOR_ADVANCE) -> QueueInHand:
    [shown] = [each for answer in looked.answers for each in answer.queues if each.queue == queue]
    return shown


async def test_a_handler_that_hangs_is_found_once_its_message_is_past_its_deadline_and_not_before(
    broker_url: str, connection: aio_pika.abc.AbstractConnection
) -> None:
    """What another has in hand rightly, a suspect, is told and not found."""
    worker, other = Worker(broker_url), Worker(broker_url)
    async with worker.working(EXECUTOR_ADVANCE, deadline=SOON) as bus, other.working(EXECUTOR_KEYS, deadline=LATE):
        await bus.publish(AdvanceRun(run_id="works"), suspect(EXECUTOR_KEYS))
        await other.has(1)
        await bus.publish(AdvanceRun(run_id="hangs"), EXECUTOR_ADVANCE, message_id="m1")
        await worker.has(1)
        async with asyncio.timeout(BOUND):
            while not (looked := await asked(connection, EXECUTOR_ADVANCE, EXECUTOR_KEYS)).findings:
                assert of(looked).messages == 1
                assert (of(looked).oldest or 0) <= SOON + 0.05  # ages are told in tenths
        oldest = of(looked).oldest
        assert oldest is not None
        assert oldest >= SOON
        [finding] = looked.findings
        said = f"A message of {EXECUTOR_ADVANCE}, AdvanceRun.v1 (id m1, run hangs), has been in hand of row-executor (process {bus.process_id}, "
        assert (finding.check, finding.problem.startswith(said)) == ("in hand", True)
        assert finding.problem.endswith(f" for {oldest} s; at most {SOON} s is right.")
        held = of(looked, suspect(EXECUTOR_KEYS))
        assert (held.messages, held.deadline, held.consumed) == (1, LATE, False)
        worker.let.set()
        await until(lambda: worker.over == 1)
        async with asyncio.timeout(BOUND):
            while (looked := await asked(connection, EXECUTOR_ADVANCE, EXECUTOR_KEYS)).findings:
                await asyncio.sleep(0.01)
        assert of(looked).messages == 0


async def test_a_message_that_waits_for_an_outage_is_named_as_that(broker_url: str, connection: aio_pika.abc.AbstractConnection) -> None:
    """Its handler says so; or nobody answers it, and the database is away, too: what is away is told, and nothing is called a hang."""
    says, asks = Worker(broker_url), Worker(broker_url)

    async def say(_: Delivery) -> None:
        if not says.let.is_set():
            raise UnavailableError("away")

    async def ask(_: Delivery) -> None:
        asks.began += 1
        if not asks.let.is_set():
            await asks.bus.ask(GetRun(run_id="r"), ADMISSION_ASKS, RunShown, timeout=0.2)

    saying = says.working(EXECUTOR_KEYS, deadline=SOON, handler=say)
    async with saying, asks.working(EXECUTOR_ADVANCE, deadline=SOON, handler=ask) as bus:
        database_away = bus.outages.noting("the database")
        await bus.publish(AdvanceRun(run_id="says"), EXECUTOR_KEYS)
        await bus.publish(AdvanceRun(run_id="asks"), EXECUTOR_ADVANCE)
        await asks.has(2)
        database_away(True)
        async with asyncio.timeout(BOUND):
            while len((looked := await asked(connection, EXECUTOR_ADVANCE, EXECUTOR_KEYS)).findings) < 2:
                assert {finding.check for finding in looked.findings} <= {"outage"}
        assert {finding.check for finding in looked.findings} == {"outage"}
        told = [finding.problem for finding in looked.findings]
        why = {name: problem.partition(" without ")[2] for problem in told for name in ("says", "asks") if f"run {name}" in problem}
        assert why["says"] == "what its handlers need."
        assert why["asks"].startswith(f"answers on {ADMISSION_ASKS}, for ")
        assert "; the database, for " in why["asks"]
        database_away(False)
        says.let.set()
        asks.let.set()
        async with asyncio.timeout(BOUND):
            while of(looked).messages or of(looked, EXECUTOR_KEYS).messages:
                looked = await asked(connection, EXECUTOR_ADVANCE, EXECUTOR_KEYS)
        assert looked.findings == []


async def test_after_its_connection_is_cut_a_message_is_counted_once(broker_url: str, connection: aio_pika.abc.AbstractConnection) -> None:
    worker = Worker(broker_url)
    async with worker.working(EXECUTOR_ADVANCE, deadline=LATE) as bus:
        await bus.publish(AdvanceRun(run_id="cut"), EXECUTOR_ADVANCE)
        await worker.has(1)
        (await bus.live_session()).connection.abort()
        await worker.has(2)
        looked = await asked(connection, EXECUTOR_ADVANCE)
        assert (of(looked).messages, of(looked).peak, worker.over) == (1, 1, 0)


async def test_a_process_that_finishes_what_it_has_in_hand_before_it_stops_still_answers(
    broker_url: str, connection: aio_pika.abc.AbstractConnection
) -> None:
    worker = Worker(broker_url, drain_timeout=BOUND / 0.05)
    await worker.bus.start()
    await worker.bus.consume(EXECUTOR_ADVANCE, worker.handle, deadline=SOON)
    await worker.bus.publish(AdvanceRun(run_id="drained"), EXECUTOR_ADVANCE)
    await worker.has(1)
    channel = await connection.channel()
    stopping = asyncio.create_task(worker.bus.stop())
    try:
        async with asyncio.timeout(BOUND):
            while not (await channel.declare_queue(EXECUTOR_ADVANCE, passive=True)).declaration_result.message_count:  # it takes no more
                await channel.default_exchange.publish(aio_pika.Message(encode(AdvanceRun(run_id="left")), type="AdvanceRun.v1"), EXECUTOR_ADVANCE)
        looked = await asked(connection, EXECUTOR_ADVANCE)
        assert of(looked).messages == worker.began
    finally:
        worker.let.set()
        await stopping
        await (await channel.get_queue(EXECUTOR_ADVANCE, ensure=False)).purge()


async def test_what_a_stranger_holds_is_found_by_what_the_broker_counts(broker_url: str, servers: ServerSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that does not answer has two messages, one of them suspect; what our own processes have in hand is accounted for."""
    monkeypatch.setattr(in_hand, "ASTRAY_SECONDS", 0.0)
    control = getattr(servers.broker, "control", None)
    if control is None:
        pytest.skip("only a broker of our own says what is unacknowledged")
    count = partial(asyncio.to_thread, listed, broker_url, control)
    ours, stranger = Worker(broker_url), await aio_pika.connect(broker_url)
    async with ours.working(EXECUTOR_ADVANCE, EXECUTOR_KEYS, deadline=LATE) as bus, stranger:
        await bus.publish(AdvanceRun(run_id="ours"), EXECUTOR_ADVANCE)
        await ours.has(1)
        channel = await stranger.channel()
        await channel.set_qos(prefetch_count=1)
        held: list[aio_pika.abc.AbstractIncomingMessage] = []
        await bus.stop_consuming(EXECUTOR_KEYS)
        await (await channel.get_queue(EXECUTOR_KEYS, ensure=False)).consume(hold(held))
        await bus.publish(AdvanceRun(run_id="lost"), EXECUTOR_KEYS)
        await bus.publish(AdvanceRun(run_id="lost"), suspect(EXECUTOR_KEYS))
        held.append(await (await channel.get_queue(suspect(EXECUTOR_KEYS), ensure=False)).get(timeout=BOUND))
        await until(lambda: len(held) == 2)
        consumers = {EXECUTOR_ADVANCE: 1, EXECUTOR_KEYS: 1}
        async with asyncio.timeout(BOUND):
            while len((looked := await look(stranger, consumers, count)).findings) < 2:
                assert all(EXECUTOR_ADVANCE not in finding.problem for finding in looked.findings)
        assert sorted(finding.problem for finding in looked.findings) == [
            f"1 message of {queue} is unacknowledged, and nobody who answers has it in hand." for queue in (EXECUTOR_KEYS, suspect(EXECUTOR_KEYS))
        ]
        assert all(f"1 of the 1 who consume {EXECUTOR_KEYS} do not answer" in finding.advice for finding in looked.findings)
        for message in held:
            await message.ack()
        async with asyncio.timeout(BOUND):
            while (looked := await look(stranger, consumers, count)).findings:
                assert all(EXECUTOR_ADVANCE not in finding.problem for finding in looked.findings)
        assert of(looked).messages == 1


def hold(held: list[aio_pika.abc.AbstractIncomingMessage]) -> Callable[[aio_pika.abc.AbstractIncomingMessage], Awaitable[None]]:
    async def keep(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        held.append(message)

    return keep


async def test_what_the_broker_counts_is_a_finding_only_if_all_looks_show_it(
    connection: aio_pika.abc.AbstractConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two at least, and the fewest messages of all looks count."""
    monkeypatch.setattr(in_hand, "APART_SECONDS", 0.01)
    for seconds, later, fewest in ((0.0, [3], 3), (0.2, [3, 2, *[9] * 100], 2)):
        monkeypatch.setattr(in_hand, "ASTRAY_SECONDS", seconds)
        counts = [{EXECUTOR_KEYS: (5, 5), EXECUTOR_ADVANCE: (1, 1)}, *({EXECUTOR_KEYS: (held, held)} for held in later)]
        looked = await look(connection, {EXECUTOR_ADVANCE: 0}, counted(counts))
        assert [finding.problem.partition(" are ")[0] for finding in looked.findings] == [f"{fewest} messages of {EXECUTOR_KEYS}"]
        assert looked.listed in ({EXECUTOR_KEYS: (3, 3)}, {EXECUTOR_KEYS: (9, 9)})


async def test_what_is_in_somebodys_hand_in_a_later_look_is_no_finding(
    connection: aio_pika.abc.AbstractConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that author code held up, which then answers, or goes on."""
    monkeypatch.setattr(in_hand, "APART_SECONDS", 0.01)
    counts = [{EXECUTOR_KEYS: (held, held)} for held in (5, 5, 5, 0)]
    looked = await look(connection, {EXECUTOR_ADVANCE: 0}, counted(counts))
    assert (looked.findings, counts) == ([], []), "and nobody looks any longer"


def counted(counts: list[dict[str, tuple[int, int]]]) -> Callable[[], Awaitable[dict[str, tuple[int, int]]]]:
    """What a broker counts, one look after the other."""

    async def count() -> dict[str, tuple[int, int]]:
        return counts.pop(0)

    return count


async def test_nobody_is_waited_for_where_nobody_consumes(connection: aio_pika.abc.AbstractConnection) -> None:
    looked = await look(connection, {EXECUTOR_ADVANCE: 0})
    assert (looked.answers, looked.findings) == ([], [])
