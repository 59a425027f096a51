"""Auditing one run: its rows, counts, messages, leases and waits, read from the tables at one moment.

Everything is read in one read-only transaction on one snapshot, so a run that goes on meanwhile is not misjudged by what changed in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import asyncpg
import msgspec

from rowmill.doctor import run_checks
from rowmill.doctor.books import Books
from rowmill.doctor.findings import Finding
from rowmill.doctor.run_checks import Charged, DatasetFacts, Lease, Owing, RunFacts
from rowmill.errors import UnavailableError, UsageError
from rowmill.runtime.db import Queries
from rowmill.runtime.transport import redacted
from rowmill_contracts.counts import Counts

CONNECT_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 90.0
"""How long something may be under way: three times the interval at which the services repair what was lost."""

SQL: Final = Queries.of(__package__ or "rowmill.doctor")

NO_TABLES: Final = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError)
"""What a database answers on which no service has run."""


@dataclass(frozen=True)
class Audit:
    """``rows``: of all datasets, as recorded. ``counts``: what their marks add up to, by dataset. ``unknown``: calls whose outcome nobody knows.
    ``calls``, ``cost``: what the run was charged.
    """

    run_id: str
    state: str
    rows: int
    counts: dict[str, Counts]
    unknown: int
    calls: int
    cost: Decimal
    findings: list[Finding] = field(default_factory=list)


@asynccontextmanager
async def reading(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection on one snapshot that can change nothing.

    Raises:
        UnavailableError: no database answers, or it has no tables of rowmill's.

    """
    try:
        connection = await asyncpg.connect(database_url, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise UnavailableError(f"no database answers at {redacted(database_url)}: {error or error!r}") from error
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            yield connection
    except NO_TABLES as error:
        raise UnavailableError(f"the database at {redacted(database_url)} has no tables of rowmill's: no service has run on it yet") from error
    finally:
        await connection.close()


async def audit(database_url: str, run_id: str, *, queued: int | None = None, patience: float = PATIENCE_SECONDS) -> Audit:
    """Look through a run's books. ``queued``: messages in queues that rows travel by (None: not known); ``patience``: see `run_checks`.

    Raises:
        UsageError: there is no such run. UnavailableError: the database cannot be read.

    """
    async with reading(database_url) as connection:
        return await audit_over(connection, run_id, queued=queued, patience=patience)


async def audit_over(connection: asyncpg.Connection, run_id: str, *, queued: int | None, patience: float) -> Audit:
    """As `audit`, in the caller's transaction."""
    record = await connection.fetchrow(SQL["run"], run_id)
    if record is None:
        raise UsageError(f"there is no run {run_id!r}; `rowmill runs list` shows those there are")
    run = RunFacts(
        run_id=run_id,
        state=record["state"],
        waiting_for=record["waiting_for"],
        stopped=record["stop_reason"] is not None,
        halt_reason=record["halt_reason"],
        leased=bool(record["leased"]),
        unheld_for=record["unheld_for"],
    )
    datasets = await _datasets(connection, run_id)
    found = [finding for dataset in datasets for finding in run_checks.accounts(dataset, patience)]
    found += run_checks.waits(run, datasets, patience, queued=queued)
    charged = await charged_by(connection, run_id)
    found += run_checks.charges(charged)
    found += run_checks.leases([Lease(**row) for row in await connection.fetch(SQL["leases"], run_id)], patience)
    found += run_checks.owing([Owing(**row) for row in await connection.fetch(SQL["owed"], run_id)], patience, owner="admission")
    found += run_checks.owing([Owing(**row) for row in await connection.fetch(SQL["events_owed"], run_id)], patience, owner="the sheet-writer")
    unknown: int = await connection.fetchval(SQL["unknown_outcomes"], run_id)
    return Audit(
        run_id=run_id,
        state=run.state,
        rows=sum(dataset.books.next_index for dataset in datasets),
        counts={dataset.dataset: dataset.books.counts for dataset in datasets},
        unknown=unknown,
        calls=charged.calls,
        cost=charged.told,
        findings=found,
    )


async def charged_by(connection: asyncpg.Connection, run_id: str) -> Charged:
    """What everybody says that a run, which there is, was charged."""
    [row] = await connection.fetch(SQL["charges"], run_id)
    return Charged(**row)


async def _datasets(connection: asyncpg.Connection, run_id: str) -> list[DatasetFacts]:
    written = {row["dataset"]: row for row in await connection.fetch(SQL["counts"], run_id)}
    found = []
    for row in await connection.fetch(SQL["datasets"], run_id):
        counted = written.get(row["dataset"])
        found.append(
            DatasetFacts(
                dataset=row["dataset"],
                state=row["state"],
                admission_done=row["admission_done"],
                counts=_counts(row),
                version=row["version"],
                written=None if counted is None else _counts(counted),
                written_version=0 if counted is None else counted["version"],
                input_state=row["input_state"],
                unfed_for=row["unfed_for"],
                silent_for=row["silent_for"],
                waiting=row["waiting"],
                due_since=row["due_since"],
                books=await _books(connection, run_id, row["dataset"]),
            )
        )
    return found


async def _books(connection: asyncpg.Connection, run_id: str, dataset: str) -> Books:
    books = Books(dataset)
    following = 0
    while pages := await connection.fetch(SQL["pages"], run_id, dataset, following):
        for page in pages:
            keys = page["row_keys"]
            wanted = sorted({keys[at : at + 32] for at in range(0, len(keys), 32)})
            rows = await connection.fetch(SQL["sheet_rows"], page["sheet_id"], wanted, run_id)
            books.take(dict(page), {row["row_key"]: row["status"] for row in rows})
        following = pages[-1]["page"] + 1
    return books


def _counts(row: Any) -> Counts:
    counts: Counts = msgspec.convert({name: row[name] for name in Counts.__struct_fields__}, Counts)
    return counts
