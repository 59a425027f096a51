"""A peer: one message per row on a durable queue, a bare aio-pika consumer, one POST and one committed row each, then the acknowledgement.

python plain_aio_pika.py BROKER_URL DATABASE_URL URL PREFIX ROWS     prints {"rows": …, "seconds": …, "cpu_seconds": …}

The rows are published (confirmed) before the clock starts, which favours this peer: ours counts staging.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import aio_pika
import aiohttp
import asyncpg
import uvloop
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

IN_FLIGHT = 100
QUEUE = "bench.plain"


async def publish(channel: AbstractChannel, prefix: str, rows: int) -> None:
    numbers = iter(range(rows))

    async def one_of_many() -> None:
        for number in numbers:
            body = json.dumps({"domain": f"{prefix}-{number}.example"}).encode()
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, QUEUE)

    await asyncio.gather(*(one_of_many() for _ in range(200)))


async def measure(given: argparse.Namespace) -> tuple[float, float]:
    connection = await aio_pika.connect(given.broker_url)
    pool = await asyncpg.create_pool(given.database_url, min_size=8, max_size=8)
    async with connection, pool, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:
        await pool.execute("CREATE TABLE IF NOT EXISTS plain (domain text PRIMARY KEY, result text)")
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=IN_FLIGHT)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        await publish(channel, given.prefix, given.rows)
        left = given.rows
        done = asyncio.Event()

        async def handle(message: AbstractIncomingMessage) -> None:
            nonlocal left
            headers = {"Content-Type": "application/json"}
            async with session.post(given.url + "/v2/find", data=message.body, headers=headers) as answer:
                result = await answer.json()
            domain = json.loads(message.body)["domain"]
            await pool.execute("INSERT INTO plain VALUES ($1, $2) ON CONFLICT (domain) DO NOTHING", domain, json.dumps(result))
            await message.ack()
            left -= 1
            if not left:
                done.set()

        started, used = time.perf_counter(), time.process_time()
        await queue.consume(handle)
        await done.wait()
        return time.perf_counter() - started, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("broker_url", "database_url", "url", "prefix"):
        parser.add_argument(name)
    parser.add_argument("rows", type=int)
    given = parser.parse_args()
    seconds, used = uvloop.run(measure(given))
    print(json.dumps({"rows": given.rows, "seconds": seconds, "cpu_seconds": used}))


if __name__ == "__main__":
    main()
