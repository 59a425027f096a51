"""What is repeated because the database was away, and what is wrong however often it is tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from rowmill.errors import UnavailableError
from rowmill.runtime.db import Connection, Database

pytestmark = pytest.mark.servers


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = await Database.connect(database_url, schema="public", size=2)
    yield found
    await found.close()


async def backend(connection: Connection) -> int:
    number: int = await connection.fetchval("SELECT pg_backend_pid()")
    return number


async def test_a_statement_whose_connection_had_closed_is_repeated_on_another(database: Database) -> None:
    backends: list[int] = []

    async def work(connection: Connection) -> int:
        backends.append(await backend(connection))
        if len(backends) == 1:
            connection.terminate()
        return await backend(connection)

    assert await database.transact(work) == backends[1] != backends[0]
    assert len(backends) == 2


async def test_a_connection_that_the_server_ended_between_statements_is_replaced(database: Database) -> None:
    tries: list[int] = []

    async def work(connection: Connection) -> int:
        tries.append(await backend(connection))
        if len(tries) == 1:
            await database.execute("SELECT pg_terminate_backend($1)", tries[0])
            async with asyncio.timeout(10):
                while not connection.is_closed():
                    await asyncio.sleep(0.01)
        return await backend(connection)

    assert await database.transact(work) == tries[1]


@pytest.mark.parametrize(("arguments", "told"), [(("seven",), asyncpg.DataError), ((7, 8), asyncpg.InterfaceError)])
async def test_arguments_that_do_not_fit_are_told_at_once(database: Database, arguments: tuple[object, ...], told: type[Exception]) -> None:
    tries = 0

    async def work(connection: Connection) -> None:
        nonlocal tries
        tries += 1
        await connection.execute("SELECT $1::integer", *arguments)

    with pytest.raises(told):
        await database.transact(work)
    assert tries == 1


async def test_two_statements_at_once_on_a_connection_are_told_at_once(database: Database) -> None:
    tries = 0

    async def work(connection: Connection) -> None:
        nonlocal tries
        tries += 1
        slow = asyncio.ensure_future(connection.execute("SELECT pg_sleep(0.2)"))
        await asyncio.sleep(0)
        try:
            await connection.execute("SELECT 1")
        finally:
            await slow

    with pytest.raises(asyncpg.InterfaceError, match="another operation"):
        await database.transact(work)
    assert tries == 1


async def test_who_asks_while_we_close_is_told_that_we_are_unavailable(database_url: str) -> None:
    database = await Database.connect(database_url, schema="public", size=1)
    await database.close()
    with pytest.raises(UnavailableError, match="being closed"):
        await database.fetch("SELECT 1")


@pytest.mark.parametrize("told", [asyncpg.ReadOnlySQLTransactionError, asyncpg.ObjectNotInPrerequisiteStateError])
async def test_a_database_that_changes_its_role_is_waited_for(database: Database, told: type[asyncpg.PostgresError]) -> None:
    """As in a failover: for a while it is read-only, or takes nobody. Whose statement is told so has it repeated; it counts as away meanwhile."""
    away: list[bool] = []
    database.report_to(away.append)
    tries = 0

    async def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        if tries > 2:
            return tries
        if told is asyncpg.ReadOnlySQLTransactionError:
            await connection.execute("SET TRANSACTION READ ONLY")
            await connection.execute("CREATE TABLE kept (number integer)")
        else:
            await connection.execute(f"DO $$ BEGIN RAISE 'not now' USING ERRCODE = '{told.sqlstate}'; END $$")
        return 0

    assert await database.transact(work) == 3
    assert away == [True, False]
