"""The bus alone against a broker and a network that misbehave: it publishes until confirmed, asks until answered, consumes what comes."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import pytest
from tests.integration.faults.proxy import FaultProxy

from rowmill.dev.private import PrivateServers
from rowmill.runtime import session as session_module
from rowmill.runtime import sessions
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts import topology
from rowmill_contracts.run_questions import GetRun, RunShown
from rowmill_contracts.runs import AdvanceRun

BOUND = 60.0
QUEUE = topology.EXECUTOR_ADVANCE


def settings(url: str, **changes: Any) -> ServiceSettings:
    return ServiceSettings(broker_url=url, time_scale=0.05, **{"heartbeat_seconds": 3, **changes})


def through(proxy: FaultProxy, url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"))


@asynccontextmanager
async def plain_channel(url: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """A channel that knows nothing of ours, to do harm with."""
    async with await aio_pika.connect(url) as connection:
        yield await connection.channel()


async def becomes(bus: Bus, *, ready: bool) -> None:
    async with asyncio.timeout(BOUND):
        while bus.ready is not ready:
            await asyncio.sleep(0.02)


class Echo:
    """A bus that consumes and answers, and what it saw."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.seen: set[str] = set()

    async def start(self) -> None:
        await self.bus.consume(QUEUE, self._see)
        await self.bus.consume(topology.ADMISSION_ASKS, self._answer)

    async def _see(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        self.seen.add(delivery.message.run_id)

    async def _answer(self, delivery: Delivery) -> None:
        await self.bus.reply(delivery, RunShown(run=None))

    async def works(self, word: str) -> None:
        """Return when messages pass and questions are answered."""
        async with asyncio.timeout(BOUND):
            await self.bus.publish(AdvanceRun(run_id=word), QUEUE)
            while word not in self.seen:
                await asyncio.sleep(0.02)
            assert await self.bus.ask(GetRun(run_id=word), topology.ADMISSION_ASKS, RunShown, timeout=BOUND) == RunShown(run=None)
            while not self.bus.ready:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def echoing(url: str) -> AsyncIterator[Echo]:
    async with Bus(settings(url), service="echo") as bus:
        echo = Echo(bus)
        await echo.start()
        await echo.works("at first")
        yield echo


@pytest.mark.parametrize("queue", [QUEUE, topology.ADMISSION_ASKS, "replies"])
async def test_a_queue_deleted_under_its_consumer_is_declared_and_consumed_again(broker_url: str, queue: str) -> None:
    async with echoing(broker_url) as echo:
        async with plain_channel(broker_url) as channel:
            await channel.queue_delete(echo.bus.reply_to if queue == "replies" else queue)
        await echo.works("afterwards")


async def test_a_question_is_asked_again_when_its_reply_queue_was_lost(broker_url: str) -> None:
    asked: list[Delivery] = []
    never = 2 * BOUND / 0.05  # at the scale of these tests
    async with Bus(settings(broker_url, ask_again=never), service="asker") as asker, Bus(settings(broker_url), service="answerer") as answerer:

        async def forgets_once(delivery: Delivery) -> None:
            asked.append(delivery)
            if len(asked) > 1:
                await answerer.reply(delivery, RunShown(run=None))

        await answerer.consume(topology.SHEETS_ASKS, forgets_once)
        asking = asyncio.create_task(asker.ask(GetRun(run_id="r"), topology.SHEETS_ASKS, RunShown, timeout=BOUND))
        async with asyncio.timeout(BOUND):
            while not asked:
                await asyncio.sleep(0.02)
        async with plain_channel(broker_url) as channel:
            await channel.queue_delete(asker.reply_to)
        assert await asking == RunShown(run=None)
    assert {delivery.message_id for delivery in asked} == {asked[0].message_id}


async def test_a_channel_closed_by_the_broker_loses_no_message_and_repeats_the_one_in_hand(broker_url: str) -> None:
    seen: list[Delivery] = []
    go = asyncio.Event()

    async def acknowledges_into_the_void(delivery: Delivery) -> None:
        seen.append(delivery)
        await go.wait()

    async with Bus(settings(broker_url), service="test") as bus:
        await bus.consume(topology.EXECUTOR_KEYS, acknowledges_into_the_void)
        await bus.publish(AdvanceRun(run_id="once"), topology.EXECUTOR_KEYS)
        async with asyncio.timeout(BOUND):
            while not seen:
                await asyncio.sleep(0.02)
            session = bus._sessions.current
            assert session is not None
            attached = session._attached[topology.EXECUTOR_KEYS]
            underlay = await attached.channel.get_underlay_channel()
            await underlay.basic_ack(4_711)  # a tag that never was: the broker closes the channel
            await session.ended.wait()
            go.set()
            while len(seen) < 2:
                await asyncio.sleep(0.02)
            await bus.publish(AdvanceRun(run_id="after"), topology.EXECUTOR_KEYS)
            while len(seen) < 3:
                await asyncio.sleep(0.02)
    assert [delivery.message.run_id for delivery in seen if isinstance(delivery.message, AdvanceRun)] == ["once", "once", "after"]
    assert seen[1].deliveries == 2


async def test_a_consumer_that_the_broker_forgot_is_noticed(broker_url: str) -> None:
    async with echoing(broker_url) as echo:
        session = echo.bus._sessions.current
        assert session is not None
        attached = session._attached[QUEUE]
        underlay = await attached.channel.get_underlay_channel()
        await underlay.basic_cancel(attached.tag)  # behind the session's back
        await echo.works("afterwards")
        assert session.ended.is_set()


async def test_a_consumer_that_gets_nothing_though_messages_are_ready_is_noticed(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with echoing(broker_url) as echo:
        session = echo.bus._sessions.current
        assert session is not None
        depths = session.depths

        async def ready(queues: list[str]) -> dict[str, tuple[int, int]]:
            return {name: (7 if name == QUEUE else 0, consumers) for name, (_, consumers) in (await depths(queues)).items()}

        monkeypatch.setattr(session, "depths", ready)
        async with asyncio.timeout(BOUND):
            while not session.ended.is_set():
                if (wrong := await session.look()) is not None:
                    session.end(wrong)
        assert f"{QUEUE} has 7 messages ready" in str(session.reason)
        await echo.works("afterwards")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 2.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["cut", "half_open", "stall", "slow"])
async def test_a_bus_goes_on_after_its_connection_was(own_servers: PrivateServers, fault: str) -> None:
    url = own_servers.broker.url
    port = urlsplit(url).port
    assert port is not None
    async with FaultProxy(port) as proxy, echoing(through(proxy, url)) as echo:
        publishing = [asyncio.create_task(echo.bus.publish(AdvanceRun(run_id=f"{fault} {number}"), QUEUE)) for number in range(50)]
        match fault:
            case "cut":
                proxy.cut()
            case "half_open":
                proxy.half_open()
            case "stall":
                proxy.stall()
            case _:
                proxy.slow(20_000)
        if fault == "stall":
            await becomes(echo.bus, ready=False)
            proxy.heal()
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*publishing)
            while not {f"{fault} {number}" for number in range(50)} <= echo.seen:
                await asyncio.sleep(0.02)
        await echo.works(f"after {fault}")
        if fault == "slow":
            assert proxy.accepted == 1, "a slow connection is no reason for a new one"


async def test_a_blocked_connection_waits_and_goes_on(own_servers: PrivateServers) -> None:
    async with echoing(own_servers.broker.url) as echo:
        session = echo.bus._sessions.current
        await asyncio.to_thread(own_servers.broker.control, "set_vm_memory_high_watermark", "0.00001")
        try:
            publishing = [asyncio.create_task(echo.bus.publish(AdvanceRun(run_id=f"blocked {number}"), QUEUE)) for number in range(20)]
            await becomes(echo.bus, ready=False)
        finally:
            await asyncio.to_thread(own_servers.broker.control, "set_vm_memory_high_watermark", "0.4")
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*publishing)
        await echo.works("afterwards")
        assert echo.bus._sessions.current is session, "an alarm is no reason for a new session"


async def test_a_broker_that_is_away_at_first_is_found_later(own_servers: PrivateServers) -> None:
    url = own_servers.broker.url
    await asyncio.to_thread(own_servers.broker.stop)
    bus = Bus(settings(url), service="early")
    starting = asyncio.create_task(bus.start())
    publishing = asyncio.create_task(bus.publish(AdvanceRun(run_id="early"), QUEUE))
    await asyncio.sleep(0.5)
    assert not publishing.done()
    await asyncio.to_thread(own_servers.broker.start)
    async with asyncio.timeout(BOUND):
        await starting
        await publishing
    await becomes(bus, ready=True)
    await bus.stop()
    await becomes(bus, ready=False)


async def test_stopping_lets_what_is_in_hand_finish_and_takes_nothing_more(broker_url: str) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    finished: list[str] = []

    async def handler(delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        began.set()
        await go.wait()
        finished.append(delivery.message.run_id)

    bus = Bus(settings(broker_url, drain_timeout=600.0), service="stopping")
    await bus.start()
    await bus.consume(topology.ADMISSION_COUNTS, handler, prefetch=1)
    await bus.publish(AdvanceRun(run_id="in hand"), topology.ADMISSION_COUNTS)
    await bus.publish(AdvanceRun(run_id="not taken"), topology.ADMISSION_COUNTS)
    await asyncio.wait_for(began.wait(), BOUND)
    stopping = asyncio.create_task(bus.stop())
    await asyncio.sleep(0.2)
    go.set()
    await asyncio.wait_for(stopping, BOUND)
    assert finished == ["in hand"]
    async with Bus(settings(broker_url), service="reader") as reader:
        left: asyncio.Queue[Delivery] = asyncio.Queue()
        await reader.consume(topology.ADMISSION_COUNTS, left.put)
        delivery = await asyncio.wait_for(left.get(), BOUND)
    assert delivery.message == AdvanceRun(run_id="not taken")
    assert delivery.deliveries == 1


async def test_nothing_of_former_sessions_is_kept(broker_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="aiormq")  # what pytest captures of its warnings keeps tracebacks, and with them connections
    monkeypatch.setattr(sessions, "SETTLED_SECONDS", 0.0)
    former: list[weakref.ref[session_module.Session]] = []
    async with echoing(broker_url) as echo:
        for number in range(10):
            session = echo.bus._sessions.current
            assert session is not None
            former.append(weakref.ref(session))
            session.connection.abort()
            await session.ended.wait()
            await echo.works(f"after {number}")
        del session
        async with asyncio.timeout(BOUND):
            while kept(former) or echo.bus._sessions._closings:
                await asyncio.sleep(0.2)


def kept(former: Iterable[weakref.ref[session_module.Session]]) -> int:
    gc.collect()
    return sum(one() is not None for one in former)
