"""Postgres for a service: a pool on its own schema, transactions repeated through outages, forward-only migrations, named queries.

Every transaction handed to `Database.transact` may run more than once (a commit whose answer is lost is unknown), so it must be idempotent,
which the engine's effects are by their keys.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg
import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime import metrics
from rowmill.runtime.clock import Clock, SystemClock, backoff
from rowmill.runtime.transport import redacted

log = structlog.get_logger()

ResultT = TypeVar("ResultT")
Connection = asyncpg.pool.PoolConnectionProxy

BUSY = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""What a statement raises because of its neighbours: the database is there."""

OUTAGES = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # shutting down, crashed, starting, or the statement was cancelled from outside
    asyncpg.InsufficientResourcesError,  # too many connections, memory or disk used up
    asyncpg.ObjectNotInPrerequisiteStateError,  # the database accepts no connections at present
    asyncpg.ReadOnlySQLTransactionError,  # a standby, or one that is about to be the primary
    *BUSY,
    ConnectionError,
    OSError,
    TimeoutError,
)
"""What a statement can raise because the database is away or busy, not because the statement is wrong.

Not asyncpg's `InterfaceError`: it says that a call made no sense, whether because its connection is gone by now (see `_or_end`) or because the
caller is wrong (a value that does not fit its type, two statements at once), and that stays wrong however often it is repeated.
"""

LOOK_SECONDS = 2.0
"""How often an idle database is asked whether it answers."""

STATEMENT_SECONDS = 15.0
"""How long a statement may take before its connection counts as dead. Ours touch a page of rows."""

MIGRATION_SECONDS = 3600.0

CLOSE_SECONDS = 10.0

OUTAGE_LIMIT = 120.0
"""Seconds for which a statement is repeated before the message that asked for it starts over (never longer than a message may be held)."""


class Queries:
    """SQL by name, read from a package's ``queries.sql``. Blocks start with ``-- name: <name>``; comment lines below describe them."""

    def __init__(self, text: str) -> None:
        blocks = re.split(r"^-- name: *(\w+) *$", text, flags=re.MULTILINE)
        self._by_name = {name: body.strip() for name, body in zip(blocks[1::2], blocks[2::2], strict=True)}

    @classmethod
    def of(cls, package: str) -> Queries:
        return cls(importlib.resources.files(package).joinpath("queries.sql").read_text("utf-8"))

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def names(self) -> list[str]:
        return list(self._by_name)


async def _keep_session(_: object) -> None:
    """Between uses a session stays as it is: nothing of ours outlives a transaction, and asyncpg's ``RESET ALL`` is a round trip for each use.

    asyncpg itself rolls back what is open, whatever is given here.
    """


async def _or_end(connection: Connection, work: Callable[[Connection], Awaitable[ResultT]]) -> ResultT:
    """Do the work; a connection over which it got no answer is dropped, since a rollback over it would get none either.

    Raises:
        ConnectionResetError: what asyncpg calls a wrong use of its interface was one of a connection that had closed.

    """
    try:
        return await work(connection)
    except (TimeoutError, OSError):
        connection.terminate()
        raise
    except asyncpg.InterfaceError as error:
        if _gone(connection):
            raise ConnectionResetError(str(error)) from error
        raise


def _gone(connection: Connection) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:  # the pool took it back when it closed
        return True


class Database:
    """A pool on one schema. Use `Database.connect`."""

    def __init__(self, pool: asyncpg.Pool, schema: str, clock: Clock) -> None:
        self.pool = pool
        self.schema = schema
        self._clock = clock
        self._reachable = True
        self._note_away: Callable[[bool], None] = lambda _: None
        self._looking = asyncio.create_task(self._look(), name=f"database {schema}")

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        schema: str,
        size: int = 8,
        server_settings: dict[str, str] | None = None,
        clock: Clock | None = None,
        wait: float | None = None,
    ) -> Database:
        """Open a pool whose connections have ``search_path`` set to ``schema``. Tries for ``wait`` seconds (None: as long as it takes).

        Raises:
            UnavailableError: no database answered within ``wait``.

        """
        clock = clock or SystemClock()
        started = clock.monotonic()
        failures = 0
        while True:
            try:
                pool = await asyncpg.create_pool(
                    url,
                    min_size=1,
                    max_size=size,
                    command_timeout=STATEMENT_SECONDS,
                    timeout=10,
                    reset=_keep_session,
                    server_settings={"search_path": schema, "application_name": f"rowmill {schema}", **(server_settings or {})},
                )
            except OUTAGES as error:
                failures += 1
                if wait is not None and clock.monotonic() - started > wait:
                    raise UnavailableError(f"no database answered at {redacted(url)} within {wait:g} s: {error}") from error
                log.warning("database_unreachable", database=redacted(url), error=str(error), failures=failures)
                await clock.sleep(backoff(failures, first=0.2, limit=5.0))
            else:
                return cls(pool, schema, clock)

    @property
    def reachable(self) -> bool:
        """Whether it answered when last asked, which is every few seconds at least."""
        return self._reachable

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            self._note_away(not reachable)

    def report_to(self, note_away: Callable[[bool], None]) -> None:
        """Call this whenever it is found to be away, or back."""
        self._note_away = note_away

    async def close(self) -> None:
        """Wait for what is under way, a few seconds at most, and disconnect."""
        self._looking.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.pool.close()
        except (asyncpg.InterfaceError, *OUTAGES):
            self.pool.terminate()

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.reachable = await self.healthy()

    async def transact(self, work: Callable[[Connection], Awaitable[ResultT]], *, foreign: bool = False) -> ResultT:
        """Run ``work`` in a transaction; repeated with backoff while the database is away.

        ``foreign``: it runs statements that are not ours, so the session is set back after it.

        Raises:
            UnavailableError: away for longer than `OUTAGE_LIMIT`, or we are closing.

        """

        async def in_transaction(connection: Connection) -> ResultT:
            try:
                async with connection.transaction():
                    return await work(connection)
            finally:
                if foreign:
                    await connection.reset()

        return await self._repeated(in_transaction)

    async def fetch(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        """One statement in a transaction of its own, repeated as `transact`."""

        async def work(connection: Connection) -> list[asyncpg.Record]:
            return await connection.fetch(sql, *arguments)

        return await self._repeated(work)

    async def fetchrow(self, sql: str, *arguments: Any) -> asyncpg.Record | None:
        async def work(connection: Connection) -> asyncpg.Record | None:
            return await connection.fetchrow(sql, *arguments)

        return await self._repeated(work)

    async def execute(self, sql: str, *arguments: Any) -> None:
        async def work(connection: Connection) -> None:
            await connection.execute(sql, *arguments)

        await self._repeated(work)

    async def _repeated(self, work: Callable[[Connection], Awaitable[ResultT]]) -> ResultT:
        started = self._clock.monotonic()
        failures = 0
        while True:
            try:
                async with self.pool.acquire(timeout=30) as connection:
                    result = await _or_end(connection, work)
            except OUTAGES as error:
                failures += 1
                metrics.DATABASE_REPEATS.labels(self.schema).inc()
                self.reachable = isinstance(error, BUSY)
                if self._clock.monotonic() - started > OUTAGE_LIMIT:
                    raise UnavailableError(f"the database has not answered for {OUTAGE_LIMIT:g} s: {error}") from error
                log.warning("database_repeat", schema=self.schema, error=repr(error), failures=failures)
                await self._clock.sleep(backoff(failures, first=0.02, limit=2.0))
            except asyncpg.InterfaceError as error:
                if self.pool.is_closing():
                    raise UnavailableError("the connections to the database are being closed") from error
                raise
            else:
                self.reachable = True
                return result

    async def healthy(self) -> bool:
        """Whether the database answers now."""
        try:
            async with self.pool.acquire(timeout=2) as connection:
                await connection.execute("SELECT 1", timeout=2)
        except (*OUTAGES, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        return True

    async def migrate(self, package: str) -> list[str]:
        """Bring the schema up to the migrations in ``<package>/migrations`` (``NNNN_name.sql``, in order); returns what was applied.

        Safe to run from several processes at once: they queue on an advisory lock.
        """
        files = sorted(
            (entry for entry in importlib.resources.files(package).joinpath("migrations").iterdir() if entry.name.endswith(".sql")),
            key=lambda entry: entry.name,
        )

        async def work(connection: Connection) -> list[str]:
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", f"rowmill migrations {self.schema}", timeout=MIGRATION_SECONDS)
            await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"')
            await connection.execute(
                f'CREATE TABLE IF NOT EXISTS "{self.schema}".migrations (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())'
            )
            done = {row["name"] for row in await connection.fetch(f'SELECT name FROM "{self.schema}".migrations')}  # noqa: S608 - our own schema name
            applied = []
            for entry in files:
                if entry.name not in done:
                    await connection.execute(entry.read_text("utf-8"), timeout=MIGRATION_SECONDS)
                    await connection.execute(f'INSERT INTO "{self.schema}".migrations (name) VALUES ($1)', entry.name)  # noqa: S608 - our own schema name
                    applied.append(entry.name)
            return applied

        return await self.transact(work)
