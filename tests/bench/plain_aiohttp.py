"""A peer: what anyone would write in an afternoon. One POST per domain, 100 in flight, nothing durable.

python plain_aiohttp.py URL PREFIX ROWS [--batch 50]     prints {"rows": …, "seconds": …, "cpu_seconds": …}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import aiohttp
import uvloop

IN_FLIGHT = 100


async def ask(url: str, bodies: list[bytes]) -> int:
    """The number of answers that were read."""
    waiting = iter(bodies)
    answered = 0

    async def one_of_many(session: aiohttp.ClientSession) -> None:
        nonlocal answered
        for body in waiting:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                await answer.json()
                answered += answer.status == 200

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:
        await asyncio.gather(*(one_of_many(session) for _ in range(IN_FLIGHT)))
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("prefix")
    parser.add_argument("rows", type=int)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    items = [{"domain": f"{given.prefix}-{number}.example"} for number in range(given.rows)]
    size = given.batch
    if size == 1:
        url, bodies = given.url + "/v2/find", [json.dumps(item).encode() for item in items]
    else:
        url = given.url + "/v2/bulk"
        bodies = [json.dumps({"items": items[start : start + size]}).encode() for start in range(0, len(items), size)]
    started, used = time.perf_counter(), time.process_time()
    answered = uvloop.run(ask(url, bodies))
    if answered != len(bodies):
        raise SystemExit(f"only {answered} of {len(bodies)} requests were answered")
    print(json.dumps({"rows": given.rows, "seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}))


if __name__ == "__main__":
    main()
