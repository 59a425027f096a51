"""A peer: what anyone would write in an afternoon. Rows of a CSV, one POST per domain, 100 in flight, results kept in Postgres, nothing durable.

python plain_aiohttp.py URL PREFIX ROWS [--batch 50] [--csv FILE --database URL]     prints {"rows": …, "seconds": …, "cpu_seconds": …}

With ``--csv`` and ``--database`` it does the job that ours does, on plain asyncio: it reads the rows, asks for each, and copies row and result into a
table, a thousand at a time, while it goes on asking. Without them it asks only, on uvloop, with bodies that are ready before the clock starts, and
throws the answers away: what the HTTP client can do at most.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp
import asyncpg
import uvloop

IN_FLIGHT = 100
COPIED_AT_ONCE = 1_000


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


class Table:
    """Results kept in Postgres: buffered, and copied by one task at a time."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._buffer: list[tuple[str, str]] = []
        self._copying = asyncio.Lock()
        self._copies: set[asyncio.Task[None]] = set()
        self.kept = 0

    def keep(self, row: dict[str, Any]) -> None:
        self._buffer.append((row["domain"], json.dumps(row)))
        if len(self._buffer) >= COPIED_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        batch, self._buffer = self._buffer, []
        copy = asyncio.create_task(self._copy(batch))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    async def _copy(self, batch: list[tuple[str, str]]) -> None:
        async with self._copying:
            await self._connection.copy_records_to_table("plain_rows", records=batch, columns=["domain", "row"])
        self.kept += len(batch)

    async def finish(self) -> int:
        self._flush()
        await asyncio.gather(*self._copies)
        return self.kept


async def work(url: str, path: str, database: str) -> int:
    """The number of rows whose result is in the table."""
    connection = await asyncpg.connect(database)
    await connection.execute("CREATE TABLE IF NOT EXISTS plain_rows (domain text, row jsonb)")
    table = Table(connection)

    async def one_of_many(session: aiohttp.ClientSession, waiting: Iterator[dict[str, Any]]) -> None:
        for row in waiting:
            async with session.post(url, json={"domain": row["domain"]}) as answer:
                row["email"] = (await answer.json()).get("email")
                answer.raise_for_status()
            table.keep(row)

    with open(path, newline="", encoding="utf-8") as file:  # noqa: ASYNC230, PTH123 - as the script of an afternoon has it
        rows: Iterable[dict[str, Any]] = csv.DictReader(file)
        waiting = iter(rows)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:
            await asyncio.gather(*(one_of_many(session, waiting) for _ in range(IN_FLIGHT)))
    kept = await table.finish()
    await connection.close()
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("prefix")
    parser.add_argument("rows", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--csv")
    parser.add_argument("--database")
    given = parser.parse_args()
    if given.csv:
        expected = given.rows
        started, used = time.perf_counter(), time.process_time()
        done = asyncio.run(work(given.url + "/v2/find", given.csv, given.database))
    else:
        items = [{"domain": f"{given.prefix}-{number}.example"} for number in range(given.rows)]
        size = given.batch
        if size == 1:
            url, bodies = given.url + "/v2/find", [json.dumps(item).encode() for item in items]
        else:
            url = given.url + "/v2/bulk"
            bodies = [json.dumps({"items": items[start : start + size]}).encode() for start in range(0, len(items), size)]
        expected = len(bodies)
        started, used = time.perf_counter(), time.process_time()
        done = uvloop.run(ask(url, bodies))
    if done != expected:
        raise SystemExit(f"only {done} of {expected} were answered")
    print(json.dumps({"rows": given.rows, "seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}))


if __name__ == "__main__":
    main()
