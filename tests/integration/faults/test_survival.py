"""One system through one fault after another, each in the middle of a run. Each fault by itself, and what takes longer, is in the modules beside."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest
from tests.e2e.stage import BOUND, Books, leads
from tests.integration.faults.conftest import Harmed
from tests.integration.faults.proxy import FaultProxy
from tests.integration.faults.running import alarm, survives
from tests.integration.faults.watched import Watched

from rowmill.client import Client
from rowmill.dev.services import ServiceSet
from rowmill.runtime.hosting import SERVICES
from rowmill_contracts import topology

SHORT = 1.5
"""Seconds that a connection stalls or a process stands still; at full size half a minute."""

BLOCKED = 3.0
"""Seconds of a memory alarm; at full size a minute."""

STORING = {"admission", "receipt-store", "sheet-writer"}
"""Services that have a database."""

LATE_ROWS = 100


async def test_the_broker_is_killed(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        await asyncio.to_thread(system.nodes.broker.kill)
        await asyncio.to_thread(system.nodes.broker.start)

    await asyncio.to_thread(system.nodes.broker.sync_new_queues)
    await survives(system, client, "broker", fault)


async def test_the_database_is_killed(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        await asyncio.to_thread(system.nodes.database.kill)
        await asyncio.to_thread(system.nodes.database.start)

    await survives(system, client, "database", fault)


@pytest.mark.long
async def test_connections_are_cut_and_stall(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        for place in ("broker", "database"):
            system.network.order(place, FaultProxy.cut)
            await asyncio.sleep(0.5)
        for place in ("broker", "database"):
            system.network.order(place, FaultProxy.stall)
        await asyncio.sleep(SHORT)
        system.network.heal()

    await survives(system, client, "network", fault)


@pytest.mark.long
async def test_queues_are_deleted_under_publishers_and_consumers(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        listed = await asyncio.to_thread(system.nodes.broker.control, "list_queues", "name", "--no-table-headers")
        replies = [name for name in listed.splitlines() if name.startswith("replies.")]
        assert len(replies) >= len(SERVICES)
        async with await aio_pika.connect(system.broker_url) as connection:
            channel = await connection.channel()
            for name in [queue.name for queue in topology.WORK_QUEUES] + replies:
                await channel.queue_delete(name)

    await survives(system, client, "queues", fault)


@pytest.mark.long
async def test_the_broker_takes_no_messages_for_a_while(system: Harmed, client: Client) -> None:
    await survives(system, client, "alarm", lambda: alarm(system, "memory", BLOCKED))


@pytest.mark.long
async def test_each_process_stands_still_for_a_while(system: Harmed, client: Client) -> None:
    async def fault() -> None:
        for service in SERVICES:
            system.freeze(service)
            await asyncio.sleep(SHORT)
            system.resume(service)

    await survives(system, client, "frozen", fault)


@pytest.mark.long
async def test_two_instances_of_each_service_share_a_run_and_a_broker_restart(system: Harmed, client: Client) -> None:
    others = ServiceSet(system.environment, system.project / "other-logs")
    others.start(keep_alive=False)
    try:
        await asyncio.sleep(3.0)
        await survives(system, client, "two-of-each", lambda: asyncio.to_thread(system.nodes.broker.restart), rows=1_000)
        fell = [f"{process.name} {process.exit_status}:\n{process.last_words(40)}" for process in others.processes if process.pid is None]
        assert not fell, "\n\n".join(fell)
    finally:
        await asyncio.to_thread(others.stop)
    await survives(system, client, "one-of-each", lambda: asyncio.sleep(0))


@pytest.mark.parametrize(
    ("away", "unready"),
    [(("database",), STORING), pytest.param(("broker", "database"), set(SERVICES), marks=pytest.mark.long)],
    ids=["database", "broker and database"],
)
async def test_services_started_while_servers_are_away_say_so_and_work_once_they_are_there(
    system: Harmed, away: tuple[str, ...], unready: set[str]
) -> None:
    nodes = [getattr(system.nodes, name) for name in away]
    await asyncio.to_thread(system.services.stop)
    for node in nodes:
        await asyncio.to_thread(node.stop)
    watched = Watched(system)
    system.services = watched.services
    system.services.start(keep_alive=False)
    await watched.until("/livez", dict.fromkeys(SERVICES, 200))
    await watched.until("/readyz", {service: 503 if service in unready else 200 for service in SERVICES})
    for node in reversed(nodes):
        assert system.all_run(), "a service gave up"
        assert unready >= {service for service, status in (await watched.health("/readyz")).items() if status == 503} >= STORING
        await asyncio.to_thread(node.start)
    await watched.until("/readyz", dict.fromkeys(SERVICES, 200))
    await system.consuming()
    given = leads(LATE_ROWS, f"late-{len(nodes)}")
    async with system.connected() as client:
        job = await client.start(system.play(), leads=given)
        async with asyncio.timeout(BOUND):
            await job.wait()
        assert (await system.audit(client, job, given)).counts.completed == LATE_ROWS
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in given)
    assert system.all_run(), "a service fell over"
