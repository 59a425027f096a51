"""How many keys a second the receipts take, without the bus: `python tests/bench/receipt_rates.py [--url URL] [--keys N] [--page N]`.

Starts a private database unless one is named. Prints rates for keys that are new, cached, completed, released, refreshed; asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path

import msgspec
import uvloop

from rowmill.dev import private_servers
from rowmill.runtime.db import Database
from rowmill_contracts.receipts import Claim, ClaimReceipts
from rowmill_receipt_store.leases import Wanted
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import SCHEMA, Completed, Lease, Store

OUTPUT = msgspec.json.encode({"raw": {"email": "somebody@example.com", "score": 80, "filler": "x" * 200}, "data": None, "meta": {}})


def keys(count: int, salt: str) -> list[bytes]:
    return [hashlib.sha256(f"{salt}{n}".encode()).digest() for n in range(count)]


def page(of: list[bytes], run_id: str, *, confirm: bool, cost: Decimal, force: bool = False, started_at: float = 0.0) -> list[Wanted]:
    request = ClaimReceipts(holder="gateway-1", claims=[], confirm=confirm)
    return [
        Wanted(
            key,
            Claim(
                key=key.hex(),
                lease_id=f"{run_id}{key.hex()[:24]}",
                run_id=run_id,
                tool="hunter.find",
                effect="read",
                started_at=started_at,
                caller=f"leads/{key.hex()}",
                cost=cost,
                force=force,
            ),
            request,
        )
        for key in of
    ]


async def rate(name: str, pages: list[list[bytes]], work: Callable[[list[bytes]], Awaitable[object]], statements: int) -> None:
    waiting = list(pages)

    async def worker() -> None:
        while waiting:
            await work(waiting.pop())

    started = time.perf_counter()
    cpu = time.process_time()
    await asyncio.gather(*(worker() for _ in range(statements)))
    seconds = time.perf_counter() - started
    count = sum(map(len, pages))
    print(f"{name:34} {count / seconds:10,.0f} keys/s   {1e6 * (time.process_time() - cpu) / count:6.1f} µs of ours a key")


async def measure(url: str, count: int, size: int, statements: int) -> None:
    database = await Database.connect(url, schema=SCHEMA, size=statements + 1, server_settings=SERVER_SETTINGS)
    await database.migrate("rowmill_receipt_store")
    store = Store(database, queued_lease=10, running_lease=60, shard_lease=6, answer_bytes=8 << 20)
    receipts = Receipts(store, held_poll=0.25, output_limit=8 << 20)
    for cost in (Decimal(0), Decimal("0.01")):
        run = secrets.token_hex(8)
        mine = keys(count, run)
        pages = [mine[start : start + size] for start in range(0, count, size)]

        async def complete(some: list[bytes], run: str = run, cost: Decimal = cost) -> None:
            results = [
                Completed(key=key, lease_id=f"{run}{key.hex()[:24]}", dispatch=1, run_id=run, output=OUTPUT, no_result=False, cost=cost)
                for key in some
            ]
            assert {answer.state for answer in await receipts.complete(results)} == {"stored"}

        async def claim(some: list[bytes], run: str = run, cost: Decimal = cost) -> None:
            await receipts.claim(page(some, run, confirm=True, cost=cost))

        async def renew(some: list[bytes], run: str = run) -> None:
            await receipts.renew([Lease(key=key, lease_id=f"{run}{key.hex()[:24]}") for key in some])

        async def refresh(some: list[bytes], cost: Decimal = cost) -> None:
            await receipts.claim(page(some, "another-run", confirm=True, cost=cost, force=True, started_at=time.time()))

        print(f"pages of {size}, {statements} at once, cost {cost}")
        await rate("claim and confirm, new", pages, claim, statements)
        await rate("claim, held by us", pages, claim, statements)
        await rate("renew", pages, renew, statements)
        await rate("complete", pages, complete, statements)
        await rate("claim, answered from what is stored", pages, claim, statements)
        await rate("claim, forced refresh", pages, refresh, statements)
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--page", type=int, default=1000)
    parser.add_argument("--statements", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.url:
        uvloop.run(measure(arguments.url, arguments.keys, arguments.page, arguments.statements))
        return
    with tempfile.TemporaryDirectory(prefix="rowmill-bench-", dir="/tmp") as folder:
        servers = private_servers(Path(folder))
        servers.database.start()
        try:
            uvloop.run(measure(servers.database.url, arguments.keys, arguments.page, arguments.statements))
        finally:
            servers.database.delete()


if __name__ == "__main__":
    main()
