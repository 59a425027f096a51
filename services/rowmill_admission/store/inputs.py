"""The tables ``inputs`` and ``input_pages``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rowmill.runtime.db import Connection, Database
from rowmill_admission.inputs import Input, StoredPage
from rowmill_admission.store import SQL
from rowmill_admission.store.runs import json_of, problem_of
from rowmill_contracts.counts import Problem
from rowmill_contracts.runs import InputSealed


def _input(row: Any) -> Input:
    return Input(
        input_id=row["input_id"],
        state=row["state"],
        pages=row["pages"],
        rows=row["rows"],
        seal_pages=row["seal_pages"],
        seal_rows=row["seal_rows"],
        seal_digest=row["seal_digest"],
        error=problem_of(row["error"]),
    )


async def lock(connection: Connection, input_ids: Sequence[str]) -> dict[str, Input]:
    """The inputs, made where they are not known yet, locked in order until the transaction ends."""
    ordered = sorted(set(input_ids))
    await connection.execute(SQL["ensure_inputs"], ordered)
    return {row["input_id"]: _input(row) for row in await connection.fetch(SQL["lock_inputs"], ordered)}


async def read(connection: Connection, input_id: str) -> Input | None:
    rows = await connection.fetch(SQL["read_input"], input_id)
    return _input(rows[0]) if rows else None


async def touch(connection: Connection, input_ids: Sequence[str]) -> None:
    """Count the time to be sealed from now."""
    await connection.execute(SQL["touch_inputs"], sorted(set(input_ids)))


async def insert_whole(connection: Connection, input_id: str, pages: int, rows: int) -> bool:
    """Store an input that is sealed from the start; False where that id is taken."""
    return await connection.fetchrow(SQL["insert_whole_input"], input_id, pages, rows) is not None


async def insert_pages(connection: Connection, pages: Sequence[StoredPage]) -> list[tuple[str, int, int]]:
    """Store pages (no two of one number); returns (input, page, rows) of those that were new."""
    rows = await connection.fetch(
        SQL["insert_input_pages"],
        [page.input_id for page in pages],
        [page.page for page in pages],
        [page.rows for page in pages],
        [page.digest for page in pages],
        [page.body for page in pages],
    )
    return [(row["input_id"], row["page"], row["rows"]) for row in rows]


async def digests_among(connection: Connection, pages: Sequence[StoredPage]) -> dict[tuple[str, int], bytes]:
    """Digests as stored, of these pages."""
    rows = await connection.fetch(SQL["page_digests_among"], [page.input_id for page in pages], [page.page for page in pages])
    return {(row["input_id"], row["page"]): row["digest"] for row in rows}


async def raise_counts(connection: Connection, input_id: str, pages: int, rows: int) -> None:
    await connection.execute(SQL["raise_input"], input_id, pages, rows)


async def note_seal(connection: Connection, seal: InputSealed) -> None:
    await connection.execute(SQL["note_seal"], seal.input_id, seal.pages, seal.rows, seal.digest)


async def whole(connection: Connection, input_id: str) -> list[tuple[int, int, bytes]]:
    """(number, rows, digest) of every page, in order."""
    return [(row["page"], row["rows"], row["digest"]) for row in await connection.fetch(SQL["whole_input"], input_id)]


async def end(connection: Connection, input_id: str, state: Literal["sealed", "failed"], error: Problem | None = None) -> None:
    await connection.execute(SQL["end_input"], input_id, state, None if error is None else json_of(error))


async def runs_of(connection: Connection, input_id: str) -> list[str]:
    """Runs started with this input or with an open dataset over it, in order."""
    return [row["run_id"] for row in await connection.fetch(SQL["runs_of_input"], input_id)]


async def unsealed_for(database: Database, seconds: float) -> list[str]:
    return [row["input_id"] for row in await database.fetch(SQL["inputs_abandoned"], seconds)]


async def pages_from(database: Database, input_id: str, page: int, max_pages: int, max_bytes: int) -> list[tuple[int, bytes]]:
    """(number, body) of the next pages from ``page`` on, in order; empty at the input's end."""
    rows = await database.fetch(SQL["read_input_pages"], input_id, page, max_pages, max_bytes)
    return [(row["page"], row["body"]) for row in rows]


async def ensure(database: Database, input_id: str) -> None:
    """Begin to count the time in which the input must be sealed, if nothing of it has come yet."""
    await database.execute(SQL["ensure_inputs"], [input_id])


async def sealed_rows(connection: Connection, input_id: str) -> int | None:
    """Rows of the input, once it is sealed."""
    known = await read(connection, input_id)
    return known.seal_rows if known is not None and known.state == "sealed" else None
