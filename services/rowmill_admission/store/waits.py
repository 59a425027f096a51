"""The table ``waits``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rowmill.runtime.db import Connection, Database
from rowmill_admission.store import SQL
from rowmill_contracts.runs import ParkedRow

LOOKED_AT: Final = 20_000
"""Due rows among which those are chosen that are released together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A row that waits or has waited. ``asked``: when its call was first asked for, seconds since the epoch."""

    dataset_seq: int
    row_index: int
    key: str
    page: int
    attempt: int
    waits: int
    state: Literal["waiting", "releasing", "released"]
    asked: float | None


def _wait(row: Any) -> Wait:
    return Wait(
        dataset_seq=row["dataset_seq"],
        row_index=row["row_index"],
        key=row["key"],
        page=row["page"],
        attempt=row["attempt"],
        waits=row["waits"],
        state=row["state"],
        asked=row["asked"],
    )


async def add(connection: Connection, dataset_seq: int, rows: Sequence[ParkedRow], reason: str, *, halted: bool = False) -> None:
    """Store waits (one per row), each where it is newer than the row's last. ``halted``: until their run is resumed."""
    await connection.execute(
        SQL["store_waits"],
        dataset_seq,
        [row.index for row in rows],
        [row.key for row in rows],
        [row.page for row in rows],
        [row.attempt for row in rows],
        [row.waits for row in rows],
        [row.wait_ms for row in rows],
        [row.asked for row in rows],
        [row.provider for row in rows],
        reason,
        halted,
        [row.index for row in rows if row.away],
    )


async def end_halts(connection: Connection, run_id: str) -> None:
    """The run goes on: rows that waited for that are due."""
    await connection.execute(SQL["end_halts"], run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How rows are called back: ``at_once`` of them now (below 0: so many turns later), then ``per_second``, so many ``together``. Runs in turn, of
    each so many rows (``of_a_run``), the oldest first; ``rows`` of them, the others later. ``sooner``: only those for whom that is sooner.
    """

    per_second: float
    at_once: int
    together: int
    of_a_run: int
    rows: int
    sooner: bool = False


async def provider_serves(database: Database, org: str, provider: str, turns: Turns) -> bool:
    """Call back the rows that wait for this provider. False where that changes nothing."""
    order = (turns.per_second, turns.at_once, turns.together, turns.of_a_run, turns.rows)
    row = await database.fetchrow(SQL["provider_serves"], org, provider, *order, turns.sooner)
    return row is not None and bool(row["changed"])


async def release_due(database: Database, limit: int, *, but_for: Collection[int], looked_at: int = LOOKED_AT) -> list[Wait]:
    """Mark due rows of runs that go on as being published, in turn by organisation, then run; they are ours to publish. ``but_for``: not of these
    datasets. ``looked_at``: due rows among which they are chosen.
    """
    return [_wait(row) for row in await database.fetch(SQL["release_due"], limit, sorted(but_for), looked_at)]


async def release_ended(database: Database, limit: int, *, but_for: Collection[int]) -> list[Wait]:
    """The same for rows of runs that were stopped or are over, due or not."""
    return [_wait(row) for row in await database.fetch(SQL["release_ended"], limit, sorted(but_for))]


async def release_stuck(database: Database, limit: int, seconds: float, *, but_for: Collection[int]) -> list[Wait]:
    """The same for rows that somebody began to publish that long ago."""
    return [_wait(row) for row in await database.fetch(SQL["release_stuck"], limit, seconds, sorted(but_for))]


async def released(database: Database, dataset_seq: int, waits: Sequence[Wait]) -> None:
    """Note that these rows were published."""
    ordered = sorted(waits, key=lambda wait: wait.row_index)
    await database.execute(SQL["released"], dataset_seq, [wait.row_index for wait in ordered], [wait.waits for wait in ordered])


async def next_due(database: Database) -> float | None:
    """Seconds until the next row of a run that goes on is due (negative: overdue), perhaps sooner; None: none waits for a time."""
    row = await database.fetchrow(SQL["next_due"])
    return None if row is None else row[0]


async def for_providers(connection: Connection, run_id: str) -> dict[str, int]:
    """How many rows of a run wait for each provider, by its name."""
    return {row["provider"]: row["rows"] for row in await connection.fetch(SQL["rows_waiting"], run_id)}


async def of_page(database: Database, dataset_seq: int, page: int) -> dict[int, Wait]:
    """By row index."""
    return {row["row_index"]: _wait(row) for row in await database.fetch(SQL["waits_of_page"], dataset_seq, page)}
