"""The bus on a real broker: delivery, asking, dead letters, and a broker that goes away."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
import pytest

from rowmill.dev.private import PrivateServers
from rowmill.errors import AskTimeout, Suspended, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts import runs, topology
from rowmill_contracts.run_questions import GetRun, RunShown
from rowmill_contracts.runs import AdvanceRun


def settings(url: str, **changes: Any) -> ServiceSettings:
    return ServiceSettings(broker_url=url, time_scale=0.05, **changes)


async def dead_letters(url: str, queue: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        dead = await channel.get_queue(topology.dead(queue), ensure=False)
        found = []
        for _ in range(50):
            message = await dead.get(fail=False)
            if message is not None:
                await message.ack()
                found.append(message)
            elif found:
                break
            else:
                await asyncio.sleep(0.05)
        return found


async def test_what_is_published_is_handled_with_its_envelope(broker_url: str) -> None:
    seen: asyncio.Queue[Delivery] = asyncio.Queue()
    async with Bus(settings(broker_url), service="test") as bus:
        await bus.consume(topology.EXECUTOR_ADVANCE, seen.put)
        await bus.publish(AdvanceRun(run_id="r1", reason="started"), topology.EXECUTOR_ADVANCE)
        delivery = await asyncio.wait_for(seen.get(), 10)
    assert delivery.message == AdvanceRun(run_id="r1", reason="started")
    assert delivery.correlation_id == "r1"
    assert delivery.message_id
    assert delivery.headers["traceparent"].startswith("00-")


@pytest.mark.parametrize("run_id", ["é" * 150, "\U0001f33e" * 200, "r" * 255])
async def test_ids_that_fit_no_property_are_delivered_all_the_same(broker_url: str, run_id: str) -> None:
    seen: asyncio.Queue[Delivery] = asyncio.Queue()
    async with Bus(settings(broker_url), service="test") as bus:
        await bus.consume(topology.EXECUTOR_ADVANCE, seen.put)
        for _ in range(2):
            await asyncio.wait_for(bus.publish(AdvanceRun(run_id=run_id), topology.EXECUTOR_ADVANCE, message_id=run_id), 10)
        first, again = [await asyncio.wait_for(seen.get(), 10) for _ in range(2)]
    assert first.message == again.message == AdvanceRun(run_id=run_id)
    assert first.message_id == first.correlation_id == again.message_id == again.correlation_id
    assert (first.message_id == run_id) is (len(run_id.encode()) <= 255)


async def test_a_question_is_answered_and_a_silent_service_is_named(broker_url: str) -> None:
    async with Bus(settings(broker_url), service="asker") as asker, Bus(settings(broker_url), service="answerer") as answerer:
        with pytest.raises(AskTimeout, match=r"GetRun.v1 on admission.asks.v1"):
            await asker.ask(GetRun(run_id="a"), topology.ADMISSION_ASKS, RunShown, timeout=0.3)

        async def answer(delivery: Delivery) -> None:
            await answerer.reply(delivery, RunShown(run=None))

        await answerer.consume(topology.ADMISSION_ASKS, answer)
        assert await asker.ask(GetRun(run_id="b"), topology.ADMISSION_ASKS, RunShown) == RunShown(run=None)


async def test_a_malformed_message_is_dead_at_once_and_untouched_with_the_reason(broker_url: str) -> None:
    async def never(_delivery: Delivery) -> None:
        raise AssertionError("a malformed message reached a handler")

    async with Bus(settings(broker_url), service="admission") as bus:
        await bus.consume(topology.ADMISSION_RUNS, never)
        await bus.publish_body(b'{"play": 7}', "RunStart.v1", topology.RUNS_START)
        await bus.publish_body(b"{}", "RunStart.v9", topology.RUNS_START)
        await bus.publish_body(b'{"run_id": "a\\u0000b"}', "AdvanceRun.v1", topology.RUNS_START)
        found: list[Any] = []
        while len(found) < 3:
            found += await dead_letters(broker_url, topology.ADMISSION_RUNS)
    reasons = {message.body: str(message.headers["x-rowmill-error"]) for message in found}
    assert "$.play" in reasons[b'{"play": 7}']
    assert "RunStart.v9" in reasons[b"{}"]
    assert "$.run_id" in reasons[b'{"run_id": "a\\u0000b"}']
    assert {message.headers["x-rowmill-key"] for message in found} == {topology.RUNS_START}
    assert {message.headers["x-rowmill-service"] for message in found} == {"admission"}


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, Suspended])
async def test_a_failing_handler_is_tried_again_then_the_message_is_dead_lettered(broker_url: str, error: type[BaseException]) -> None:
    tries = 0

    async def fails(_delivery: Delivery) -> None:
        nonlocal tries
        tries += 1
        raise error("bug in a handler")

    async with Bus(settings(broker_url), service="writer") as bus:
        await bus.consume(topology.SHEETS_SETTLE, fails)
        await bus.publish(AdvanceRun(run_id="r2"), topology.SHEETS_SETTLE)
        found = await dead_letters(broker_url, topology.SHEETS_SETTLE)
    assert tries == 3
    assert [(m.headers["x-rowmill-error-type"], m.headers["x-rowmill-attempts"], m.headers["x-rowmill-run-id"]) for m in found] == [
        (error.__name__, 3, "r2")
    ]


async def test_unavailable_is_no_reason_to_die_and_rejected_is(broker_url: str) -> None:
    tries: list[str] = []

    async def handler(delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        tries.append(delivery.message.run_id)
        if delivery.message.run_id == "never":
            raise Rejected("no such thing")
        if tries.count("later") < 5:
            raise UnavailableError("database away")

    async with Bus(settings(broker_url), service="writer") as bus:
        await bus.consume(topology.EXECUTOR_KEYS, handler)
        await bus.publish(AdvanceRun(run_id="later"), topology.EXECUTOR_KEYS)
        await bus.publish(AdvanceRun(run_id="never"), topology.EXECUTOR_KEYS)
        found = await dead_letters(broker_url, topology.EXECUTOR_KEYS)
        async with asyncio.timeout(30):
            while tries.count("later") < 5:
                await asyncio.sleep(0.05)
    assert [m.headers["x-rowmill-run-id"] for m in found] == ["never"]
    assert tries.count("never") == 1


async def test_a_message_survives_the_process_that_was_handling_it(broker_url: str) -> None:
    started = asyncio.Event()

    async def hangs(_delivery: Delivery) -> None:
        started.set()
        await asyncio.sleep(60)

    first = Bus(settings(broker_url, drain_timeout=0.0), service="first")
    await first.start()
    await first.consume(topology.EXECUTOR_ROWS, hangs)
    await first.publish(AdvanceRun(run_id="survivor"), topology.EXECUTOR_ROWS)
    await asyncio.wait_for(started.wait(), 10)
    await first.stop()

    seen: asyncio.Queue[Delivery] = asyncio.Queue()
    async with Bus(settings(broker_url), service="second") as second:
        await second.consume(topology.EXECUTOR_ROWS, seen.put)
        delivery = await asyncio.wait_for(seen.get(), 10)
    assert delivery.message == AdvanceRun(run_id="survivor")
    assert delivery.deliveries == 2


async def test_publishing_and_consuming_go_on_after_the_broker_was_killed(own_servers: PrivateServers) -> None:
    seen: set[str] = set()

    async def handler(delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        seen.add(delivery.message.run_id)

    async with Bus(settings(own_servers.broker.url), service="test") as bus:
        await bus.consume(topology.EXECUTOR_ADVANCE, handler)
        await bus.publish(AdvanceRun(run_id="before"), topology.EXECUTOR_ADVANCE)
        await asyncio.to_thread(own_servers.broker.kill)
        publishing = [asyncio.create_task(bus.publish(AdvanceRun(run_id=f"while{i}"), topology.EXECUTOR_ADVANCE)) for i in range(20)]
        await asyncio.to_thread(own_servers.broker.start)
        await asyncio.wait_for(asyncio.gather(*publishing), 60)
        await bus.publish(AdvanceRun(run_id="after"), topology.EXECUTOR_ADVANCE)
        async with asyncio.timeout(60):
            while not {"before", "after", *(f"while{i}" for i in range(20))} <= seen:
                await asyncio.sleep(0.05)


async def test_a_queue_deleted_under_the_publisher_is_declared_again(broker_url: str) -> None:
    async with Bus(settings(broker_url), service="test") as bus:
        connection = await aio_pika.connect(broker_url)
        async with connection:
            channel = await connection.channel()
            await channel.queue_delete(topology.ADMISSION_PARKED)
        await bus.publish(runs.RowsParked(run_id="r", dataset="d", reason="x", rows=[]), topology.ADMISSION_PARKED)
        seen: asyncio.Queue[Delivery] = asyncio.Queue()
        await bus.consume(topology.ADMISSION_PARKED, seen.put)
        assert (await asyncio.wait_for(seen.get(), 10)).message == runs.RowsParked(run_id="r", dataset="d", reason="x", rows=[])
