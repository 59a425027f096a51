"""The table ``owed``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rowmill.runtime.db import Connection, Database
from rowmill_admission.store import SQL
from rowmill_contracts.envelope import encode

if TYPE_CHECKING:
    from rowmill_admission.owed import Owed


@dataclass(frozen=True, slots=True)
class Entry:
    owed_id: int
    run_id: str
    lane: str
    exchange: str
    key: str
    message_type: str
    body: bytes
    asked: bool


async def add(connection: Connection, *messages: Owed) -> None:
    """Store messages in the caller's transaction."""
    if messages:
        await connection.execute(
            SQL["insert_owed"],
            [owed.run_id for owed in messages],
            [owed.lane for owed in messages],
            [owed.exchange for owed in messages],
            [owed.key for owed in messages],
            [owed.message.message_type for owed in messages],
            [encode(owed.message) for owed in messages],
            [owed.asked for owed in messages],
        )


async def of_run(database: Database, run_id: str) -> list[Entry]:
    return [Entry(run_id=run_id, **dict(row)) for row in await database.fetch(SQL["owed_of"], run_id)]


async def delete(database: Database, owed_ids: Sequence[int]) -> None:
    if owed_ids:
        await database.execute(SQL["delete_owed"], owed_ids)


async def give_up(connection: Connection, run_id: str, body: bytes) -> bool:
    """Forget a question that no one survives who is asked it; whether it was owed still."""
    return bool(await connection.fetch(SQL["give_up_owed"], run_id, body))


async def runs_owing(database: Database, seconds: float) -> list[str]:
    """Runs with a message unconfirmed for that long."""
    return [row["run_id"] for row in await database.fetch(SQL["runs_owing"], seconds)]
