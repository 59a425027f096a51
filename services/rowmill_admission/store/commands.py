"""The table ``commands``: what was made of commands on runs, so that one that is repeated undoes nothing that was decided since."""

from __future__ import annotations

from dataclasses import dataclass

from rowmill.runtime.db import Connection, Database
from rowmill_admission.store import SQL


@dataclass(frozen=True, slots=True)
class Heard:
    """``decision``: of a resumption that is not carried out to its end, its number; None: there is nothing more to do. ``refused``: why it was not
    done, to a person.
    """

    decision: int | None = None
    refused: str = ""


async def find(connection: Connection, run_id: str, identity: str) -> Heard | None:
    """What was made of this command on a locked run; None: it comes for the first time."""
    row = await connection.fetchrow(SQL["command"], run_id, identity)
    return None if row is None else Heard(row["decision"], row["refused"])


async def note(connection: Connection, run_id: str, identity: str, heard: Heard = Heard()) -> Heard:
    """Keep what was made of a command that came for the first time."""
    await connection.execute(SQL["note_command"], run_id, identity, heard.decision, heard.refused)
    return heard


async def resumption(connection: Connection, run_id: str) -> int | None:
    """The number of the newest decision on a locked run, if that is a resumption and not carried out to its end; None: nobody resumes the run."""
    number: int | None = await connection.fetchval(SQL["resumption"], run_id)
    return number


async def carried_out(connection: Connection, run_id: str, decision: int) -> None:
    """All is done that this resumption calls for."""
    await connection.execute(SQL["carried_out"], run_id, decision)


async def forget(database: Database, seconds: float) -> None:
    """Drop commands that were first heard that long ago."""
    await database.execute(SQL["forget_commands"], seconds)
