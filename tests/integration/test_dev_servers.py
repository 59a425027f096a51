"""Private servers: started, stopped, killed, frozen; what they stored stays."""

from __future__ import annotations

import asyncio

import aio_pika
import asyncpg
import pytest

from rowmill.dev.private import PrivateServers

pytestmark = pytest.mark.servers


async def test_each_module_gets_an_empty_database_of_its_own(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        assert "test_dev_servers" in await connection.fetchval("SELECT current_database()")
    finally:
        await connection.close()


async def test_each_module_gets_a_virtual_host_of_its_own(broker_url: str) -> None:
    connection = await aio_pika.connect(broker_url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("hello", durable=True, arguments={"x-queue-type": "quorum"})
        await channel.default_exchange.publish(aio_pika.Message(b"hi"), routing_key=queue.name)
        message = await queue.get(timeout=5)
        assert message.body == b"hi"
        await message.ack()


async def test_what_was_acknowledged_survives_a_kill_of_both_servers(own_servers: PrivateServers) -> None:
    database, broker = own_servers.database, own_servers.broker
    urls = database.url, broker.url
    connection = await asyncpg.connect(database.url)
    await connection.execute("CREATE TABLE kept (value int)")
    await connection.execute("INSERT INTO kept VALUES (42)")
    async with await aio_pika.connect(broker.url) as session:
        channel = await session.channel()
        queue = await channel.declare_queue("kept", durable=True, arguments={"x-queue-type": "quorum"})
        sent = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(sent, routing_key=queue.name)
        await asyncio.to_thread(broker.sync_new_queues)
        await asyncio.to_thread(database.kill)
        await asyncio.to_thread(broker.kill)
        assert not database.running
        assert not broker.running
    connection.terminate()

    await asyncio.to_thread(own_servers.start)

    assert (database.url, broker.url) == urls
    connection = await asyncpg.connect(database.url)
    assert await connection.fetchval("SELECT value FROM kept") == 42
    await connection.close()
    async with await aio_pika.connect(broker.url) as session:
        channel = await session.channel()
        queue = await channel.get_queue("kept", ensure=False)
        assert (await queue.get(timeout=5, no_ack=True)).body == b"kept"
