"""The statements: each is valid and takes an index, and the order of writes in SQL is the order in `marks.replaces`."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import AsyncIterator
from decimal import Decimal

import asyncpg
import pytest

from rowmill.runtime.db import Connection, Database
from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import SettledRow
from rowmill_sheet_writer.marks import Standing, letter_of, rank_of, replaces
from rowmill_sheet_writer.settlement import RowId, RowWrite
from rowmill_sheet_writer.store import QUERIES, SERVER_SETTINGS, Transaction

pytestmark = pytest.mark.servers


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = await Database.connect(database_url, schema="sheets", server_settings=SERVER_SETTINGS)
    await database.migrate("rowmill_sheet_writer")
    yield database
    await database.close()


@pytest.mark.parametrize("name", QUERIES.names())
async def test_the_database_understands(database: Database, name: str) -> None:
    async with database.pool.acquire() as connection:
        await connection.prepare(QUERIES[name])


def write(number: int, attempt: int, kind: str) -> RowWrite:
    status = "failed" if kind == "dead_lettered" else kind
    error = None if status == "completed" else Problem(code=kind, message=kind)
    return RowWrite(
        number,
        SettledRow(key="00" * 32, index=0, page=0, attempt=attempt, status=status, error=error, cost=Decimal(0)),  # type: ignore[arg-type]
    )


WRITES = [write(*parts) for parts in itertools.product((1, 2), (1, 2), ("completed", "failed", "cancelled", "dead_lettered"))]


def standing(write: RowWrite) -> Standing:
    return Standing(write.number, write.row.attempt, rank_of(letter_of(write.row)))


async def test_the_order_of_writes_is_the_same_in_sql_and_in_python(database: Database) -> None:
    pairs = list(itertools.product(WRITES, WRITES))
    row_ids = [RowId(99, number.to_bytes(32, "big")) for number in range(len(pairs))]

    async def work(connection: Connection) -> list[asyncpg.Record]:
        transaction = Transaction(connection)
        await transaction.write_rows({row_id: first for row_id, (first, _) in zip(row_ids, pairs, strict=True)})
        await transaction.write_rows({row_id: second for row_id, (_, second) in zip(row_ids, pairs, strict=True)})
        return await connection.fetch("SELECT run_number, attempt, standing FROM sheet_rows WHERE sheet_id = 99 ORDER BY row_key")

    stored = [Standing(*record) for record in await database.transact(work)]
    expected = [standing(second) if replaces(standing(second), standing(first)) else standing(first) for first, second in pairs]
    assert stored == expected


@pytest.mark.parametrize("rows", [0, 20_000])
async def test_pages_and_rows_are_found_by_index_in_small_and_large_tables(database: Database, rows: int) -> None:
    """A generic plan, as a connection uses it from the sixth time on."""
    async with database.pool.acquire() as connection:
        await connection.execute(
            "INSERT INTO sheet_rows (sheet_id, run_number, attempt, standing, row_key, status)"
            " SELECT 5, 1, 1, 3, sha256(n::text::bytea), 'completed' FROM generate_series(1, $1::int) AS n",
            rows,
        )
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        for name in ("read_rows", "lock_rows", "renew_inputs", "lock_pages", "save_pages", "read_counts", "read_cells", "read_pages"):
            sql = QUERIES[name]
            parameters = max(map(int, re.findall(r"\$(\d+)", sql)))
            await connection.execute(f"PREPARE checked AS {sql}")
            plan = await connection.fetch(f"EXPLAIN EXECUTE checked({', '.join(['NULL'] * parameters)})")
            text = "\n".join(line[0] for line in plan)
            assert "Seq Scan" not in text, f"{name}:\n{text}"
            assert "Index" in text, f"{name}:\n{text}"
            await connection.execute("DEALLOCATE checked")


@pytest.mark.parametrize("statement", ["SELECT pg_advisory_lock(77)", "SELECT pg_advisory_lock(77), 1 / 0"])
async def test_what_a_foreign_statement_takes_for_its_session_does_not_outlive_it(database: Database, statement: str) -> None:
    async def work(connection: Connection) -> None:
        await connection.execute(statement)

    with contextlib.suppress(asyncpg.DivisionByZeroError):
        await database.transact(work, foreign=True)
    held = await database.fetch("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 77")
    assert not held
