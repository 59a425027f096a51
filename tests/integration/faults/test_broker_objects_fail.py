"""Queues vanish under consumers and publishers, and the broker stops taking messages, in the middle of a run."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest
from tests.e2e.stage import BOUND
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.proxy import FaultProxy
from tests.integration.faults.running import ALARMS, alarm, logged, survives

from rowmill.client import Client
from rowmill_contracts import topology

pytestmark = pytest.mark.long

BLOCKED = 3.0
"""Seconds; at full size this is a minute."""

CLOSED = 4
"""Channels at least that the broker closes in the middle of a run."""


async def delete(system: Harmed, names: list[str]) -> None:
    async with await aio_pika.connect(system.broker_url) as connection:
        channel = await connection.channel()
        for name in names:
            await channel.queue_delete(name)


async def private_queues(system: Harmed) -> list[str]:
    """The reply queues of services and client, and the services' listening queues as far as others may delete them."""
    listed = await asyncio.to_thread(system.nodes.broker.control, "list_queues", "name", "exclusive", "--no-table-headers")
    names = [line.split("\t") for line in listed.splitlines() if "\t" in line]
    return [name for name, exclusive in names if name.startswith("replies.") and exclusive != "true"]


async def test_work_queues_deleted_under_everyone_lose_no_row(system: Harmed, client: Client) -> None:
    names = [queue.name for queue in topology.WORK_QUEUES if queue.name != topology.ADMISSION_RUNS]
    await survives(system, client, "queues-deleted", lambda: delete(system, names), within=150)


async def test_the_public_queue_is_consumed_again_after_it_was_deleted(system: Harmed, client: Client) -> None:
    await delete(system, [topology.ADMISSION_RUNS, topology.ADMISSION_INPUTS, topology.ADMISSION_DEAD])
    await survives(system, client, "public-deleted", lambda: delete(system, [topology.ADMISSION_RUNS]))


async def test_reply_queues_deleted_under_everyone_leave_nobody_waiting(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        names = await private_queues(system)
        assert len(names) >= 5
        await delete(system, names)

    await survives(system, client, "replies-deleted", fault)


CLOSES = "timed out waiting for delivery acknowledgement"
"""What the broker says when it closes a channel for a message that is held for too long."""


async def test_channels_that_the_broker_closes_lose_no_row_and_repeat_no_request(system: Harmed, client: Client) -> None:
    """While the provider answers nothing, pages of rows and calls are held for longer than the broker allows for a while."""

    async def allow(held_ms: int) -> None:
        """Of channels that are opened from now on: so all are to be opened anew."""
        for setting, value in (("consumer_timeout", held_ms), ("channel_tick_interval", min(held_ms, 60_000))):
            await asyncio.to_thread(system.nodes.broker.control, "eval", f"application:set_env(rabbit, {setting}, {value}).")
        system.network.order("broker", FaultProxy.cut)

    async def fault() -> None:
        system.provider.control(hold=True)
        before = logged(system, CLOSES)
        try:
            await allow(300)
            async with asyncio.timeout(BOUND):
                while logged(system, CLOSES) < before + CLOSED:
                    await asyncio.sleep(0.05)
        finally:
            await allow(1_800_000)
            system.provider.control(hold=False)

    await survives(system, client, "channels-closed", fault)


@pytest.mark.parametrize("of", ALARMS)
async def test_an_alarm_stops_the_run_and_its_end_lets_it_go_on(system: Harmed, client: Client, of: str) -> None:
    await survives(system, client, f"{of}-alarm", lambda: alarm(system, of, BLOCKED))
