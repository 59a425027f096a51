"""The tables ``runs``, ``stops`` and ``recorded_calls``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill_admission.runs import Run
from rowmill_admission.store import SQL
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import NULL
from rowmill_contracts.run_questions import ListRuns
from rowmill_contracts.runs import RecordedCall, RunOptions, RunStart, RunState, StagedInput

_encoder = msgspec.json.Encoder(decimal_format="string")
_options = msgspec.json.Decoder(RunOptions)
_inputs = msgspec.json.Decoder(list[StagedInput])
_problem = msgspec.json.Decoder(Problem)


def json_of(value: Any) -> str:
    """JSON text for a json column."""
    return _encoder.encode(value).decode()


def problem_of(text: str | None) -> Problem | None:
    return None if text is None else _problem.decode(text)


def _run(row: Any) -> Run:
    return Run(
        run_id=row["run_id"],
        number=row["number"],
        org=row["org"],
        play=row["play"],
        state=row["state"],
        input=msgspec.Raw(row["input"].encode()),
        inputs=_inputs.decode(row["inputs"]),
        options=_options.decode(row["options"]),
        created=row["created"],
        finished=row["finished"],
        waiting_for=row["waiting_for"],
        output=msgspec.Raw(row["output"].encode()),
        error=problem_of(row["error"]),
        stop_reason=row["stop_reason"],
        halt_reason=row["halt_reason"],
        term=row["term"],
        lease_id=row["lease_id"],
        lease_live=row["lease_live"],
        released_term=row["released_term"],
        advance_wanted=row["advance_wanted"],
        attempt=row["attempt"],
        retrying=row["retrying"],
        code_digest=row["code_digest"],
        charged=row["charged"],
        calls=row["calls"],
        charges_version=row["charges_version"],
    )


async def serialise(connection: Connection, run_id: str) -> None:
    """Make what concerns this run id, known or not, wait its turn until the transaction ends."""
    await connection.execute(SQL["lock_run_id"], run_id)


async def known_of_identity(connection: Connection, identity: str) -> tuple[float | None, int, str | None]:
    """Age in seconds of the newest run of that identity (None: there is none), how many there are, and a stop that came before the first."""
    row = await connection.fetchrow(SQL["known_of_identity"], identity)
    return (None, 0, None) if row is None else (row["age"], row["runs"], row["stop_reason"])


async def insert(
    connection: Connection, run_id: str, identity: str, start: RunStart, org: str, inputs: Sequence[StagedInput], stop_reason: str | None
) -> Run | None:
    """Store a new run, which is ours alone until the transaction ends; None where that id is taken."""
    row = await connection.fetchrow(
        SQL["insert_run"],
        run_id,
        identity,
        org,
        start.play,
        "queued" if stop_reason is None else "cancelled",
        json_of(start.input),
        json_of(list(inputs)),
        json_of(start.options),
        stop_reason,
    )
    if row is not None and inputs:
        await connection.execute(SQL["insert_run_inputs"], sorted({staged.input_id for staged in inputs}), run_id)
    return None if row is None else _run(row)


async def insert_stop(connection: Connection, run_id: str, reason: str) -> None:
    await connection.execute(SQL["insert_stop"], run_id, reason)


async def is_stopped(connection: Connection, run_id: str) -> bool:
    """Whether a stop is stored, also one that came when the run was over."""
    found: bool = await connection.fetchval(SQL["stop_stored"], run_id)
    return found


async def lock(connection: Connection, run_id: str) -> Run | None:
    row = await connection.fetchrow(SQL["lock_run"], run_id)
    return None if row is None else _run(row)


async def read(connection: Connection, run_id: str) -> Run | None:
    row = await connection.fetchrow(SQL["read_run"], run_id)
    return None if row is None else _run(row)


async def listed(database: Database, request: ListRuns) -> list[Run]:
    rows = await database.fetch(SQL["list_runs"], request.org, request.play, request.state, request.limit, request.before)
    return [_run(row) for row in rows]


async def oldest(connection: Connection) -> float | None:
    """When the oldest run started that is not over, of all that are stored or being stored."""
    await connection.execute(SQL["settle_runs"])
    started_at: float | None = await connection.fetchval(SQL["oldest_run"])
    return started_at


async def oldest_to_retry(connection: Connection, retention: float) -> float | None:
    """When the oldest run started that is not over, or whose rows could be worked again: ``retention`` seconds after they ended."""
    started_at: float | None = await connection.fetchval(SQL["oldest_run_to_retry"], retention)
    return started_at


async def take(connection: Connection, run_id: str, lease_id: str, seconds: float) -> int:
    """Give the lease under the next term, which is returned."""
    term: int = await connection.fetchval(SQL["take_run"], run_id, lease_id, seconds)
    return term


async def renew(connection: Connection, run_id: str, seconds: float) -> None:
    await connection.execute(SQL["renew_run"], run_id, seconds)


async def release(connection: Connection, run_id: str) -> None:
    await connection.execute(SQL["release_run"], run_id)


async def set_waiting(connection: Connection, run_id: str, waiting_for: str | None) -> None:
    await connection.execute(SQL["set_run_waiting"], run_id, waiting_for)


async def halt(connection: Connection, run_id: str, reason: str) -> None:
    await connection.execute(SQL["halt_run"], run_id, reason)


async def resume(connection: Connection, run_id: str) -> None:
    await connection.execute(SQL["resume_run"], run_id)


async def resumed_within(connection: Connection, run_id: str, seconds: float) -> bool:
    found: bool = await connection.fetchval(SQL["resumed_within"], run_id, seconds)
    return found


async def decide(connection: Connection, run_id: str, wall_time: float | None) -> tuple[int, float | None]:
    """Raise the run's decision number; answers it and when ``wall_time`` seconds are over, seconds since the epoch by the database's clock."""
    row: Any = await connection.fetchrow(SQL["decide_run"], run_id, wall_time)
    return row["decision"], row["deadline"]


async def worked_seconds(connection: Connection, run_id: str) -> float:
    """How much of its wall time a run has used."""
    seconds: float = await connection.fetchval(SQL["worked_seconds"], run_id)
    return seconds


async def is_out_of_time(connection: Connection, run_id: str) -> bool:
    found: bool = await connection.fetchval(SQL["run_out_of_time"], run_id)
    return found


async def out_of_time(database: Database) -> list[str]:
    return [row["run_id"] for row in await database.fetch(SQL["runs_out_of_time"])]


async def note_halt(connection: Connection, run_id: str, reason: str | None) -> None:
    """A run whose retry is being prepared is to wait for a person once it is; None: not any more."""
    await connection.execute(SQL["note_halt"], run_id, reason)


async def newest_decision(connection: Connection, run_id: str) -> int:
    number: int = await connection.fetchval(SQL["newest_decision"], run_id)
    return number


async def set_options(connection: Connection, run_id: str, options: RunOptions) -> None:
    await connection.execute(SQL["set_options"], run_id, json_of(options))


async def finish(connection: Connection, run_id: str, state: RunState, *, output: msgspec.Raw = NULL, error: Problem | None = None) -> None:
    await connection.execute(SQL["finish_run"], run_id, state, bytes(output).decode(), None if error is None else json_of(error))


async def store_charges(database: Database, told: Sequence[RunCharges]) -> None:
    """Keep what runs were charged, where it is newer than what was heard before."""
    newest = {each.run_id: each for each in told if each.version}
    if newest:
        found = newest.values()
        await database.execute(
            SQL["store_charges"],
            list(newest),
            [each.version for each in found],
            [each.cost for each in found],
            [each.calls for each in found],
        )


async def stop(connection: Connection, run_id: str, reason: str) -> None:
    await connection.execute(SQL["stop_run"], run_id, reason)


async def want_advance(connection: Connection, run_id: str) -> None:
    await connection.execute(SQL["want_advance"], run_id)


async def note_advance(connection: Connection, run_id: str) -> None:
    await connection.execute(SQL["note_advance"], run_id)


async def note_advance_again(connection: Connection, run_id: str) -> None:
    await connection.execute(SQL["note_advance_again"], run_id)


async def to_advance_again(database: Database, interval: float, limit: float) -> list[str]:
    return [row["run_id"] for row in await database.fetch(SQL["runs_to_advance_again"], interval, limit)]


async def waiting_for(connection: Connection, what: str) -> list[str]:
    return [row["run_id"] for row in await connection.fetch(SQL["runs_waiting_for"], what)]


async def insert_calls(connection: Connection, run_id: str, calls: Sequence[RecordedCall]) -> None:
    """Put calls on record; a position that is on record stays as it is."""
    await connection.execute(
        SQL["insert_calls"],
        run_id,
        [call.position for call in calls],
        [call.kind for call in calls],
        [call.name for call in calls],
        [call.request for call in calls],
        [bytes(call.result).decode() for call in calls],
    )


async def calls_of(connection: Connection, run_id: str) -> list[RecordedCall]:
    return [
        RecordedCall(position=row["position"], kind=row["kind"], name=row["name"], request=row["request"], result=msgspec.Raw(row["result"].encode()))
        for row in await connection.fetch(SQL["calls_of"], run_id)
    ]


async def insert_event(connection: Connection, event_id: str, name: str, key: str, payload: msgspec.Raw) -> None:
    await connection.execute(SQL["insert_event"], event_id, name, key, bytes(payload).decode())


async def forget_events(database: Database, age: float) -> None:
    await database.execute(SQL["forget_events"], age)


async def stopped_with_nothing_open(database: Database) -> list[str]:
    return [row["run_id"] for row in await database.fetch(SQL["runs_stopped"])]
