"""Every named statement is understood by the database, and used."""

from __future__ import annotations

import importlib.resources
import re
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from rowmill.runtime.db import Database
from rowmill_admission.store import SQL, runs, waits
from rowmill_contracts.runs import RunStart

pytestmark = pytest.mark.servers


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = await Database.connect(database_url, schema="admission", wait=10)
    await database.migrate("rowmill_admission")
    yield database
    await database.close()


async def test_every_statement_can_be_prepared(database: Database) -> None:
    async with database.pool.acquire() as connection:
        for name in SQL.names():
            await connection.prepare(SQL[name])


async def test_due_rows_are_released_in_turn_by_organisation_then_by_run(database: Database) -> None:
    for number, (run_id, org) in enumerate([("big", "a"), ("small", "a"), ("other", "b")]):
        await database.execute(
            "INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options) VALUES ($1, $1, $2, 'p', 'running', '{}', '[]', '{}')",
            run_id,
            org,
        )
        await database.execute(
            "INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, run_window) VALUES ($1, 'd', 'i', '{}', 200, 2000)", run_id
        )
        await database.execute(
            "INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason)"
            " SELECT dataset_seq, n, 'k', 0, 1, 1, now() - make_interval(secs => 100 - 10 * $2 + n / 1000.0), 'r'"
            " FROM datasets, generate_series(1, 100) n WHERE run_id = $1",
            run_id,
            number,
        )
    seqs = {row["run_id"]: row["dataset_seq"] for row in await database.fetch("SELECT run_id, dataset_seq FROM datasets")}
    first = await waits.release_due(database, 40, but_for=[])
    assert Counter(wait.dataset_seq for wait in first) == {seqs["big"]: 10, seqs["small"]: 10, seqs["other"]: 20}
    second = await waits.release_due(database, 40, but_for=[seqs["other"]])
    assert Counter(wait.dataset_seq for wait in second) == {seqs["big"]: 20, seqs["small"]: 20}
    assert not {(wait.dataset_seq, wait.row_index) for wait in first} & {(wait.dataset_seq, wait.row_index) for wait in second}
    assert len(await waits.release_due(database, 1_000, but_for=[])) == 300 - 80


async def test_rows_are_called_back_at_the_rate_their_runs_in_turn_and_of_each_run_the_oldest_first(database: Database) -> None:
    """Two rows of a run at a time, five now (or one turn later) and then two together, ten a second."""
    for run_id, rows, asked in (("first", 4, "100 - n"), ("second", 5, "50 + n"), ("halted", 1, "1"), ("elsewhere", 1, "2")):
        await database.execute(
            "INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options) VALUES ($1, $1, 'own', 'p', 'running', '{}', '[]', '{}')",
            run_id,
        )
        await database.execute(
            "INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, run_window) VALUES ($1, 'd', 'i', '{}', 200, 2000)", run_id
        )
        await database.execute(
            "INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason, provider, halted, asked)"  # noqa: S608 - our own
            f" SELECT dataset_seq, n, 'k', n, 1, 1, now() + interval '1 hour', 'r', $2, $1 = 'halted', {asked}"
            " FROM datasets, generate_series(1, $3) n WHERE run_id = $1",
            run_id,
            "other" if run_id == "elsewhere" else "away",
            rows,
        )
    await database.execute("UPDATE waits SET due_at = now() - interval '1 s' FROM datasets d WHERE d.run_id = 'second' AND row_index = 3")
    turns = [("first", 4), ("first", 3), ("second", 1), ("second", 2), ("first", 2), ("first", 1), ("second", 3), ("second", 4), ("second", 5)]

    for at_once, expected in ((5, [0, 0, 0, 0, 0, 0.2, 0.2, 0.4]), (-1, [0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0])):
        told = waits.Turns(per_second=10.0, at_once=at_once, together=2, of_a_run=2, rows=8)
        await waits.provider_serves(database, "own", "away", told)
        found = await database.fetch(
            "SELECT d.run_id, w.row_index, w.called_back, extract(epoch FROM w.due_at - now())::float8 AS due"
            " FROM waits w JOIN datasets d USING (dataset_seq) WHERE d.run_id IN ('first', 'second', 'halted', 'elsewhere')"
        )
        by_row = {(row["run_id"], row["row_index"]): row for row in found}
        start = by_row[turns[0]]["due"] - expected[0]
        assert [by_row[row]["due"] - start for row in turns[:8]] == pytest.approx(expected, abs=0.001)
        assert by_row[turns[8]]["due"] > 3000, "its turn is after those that are spoken of"
        assert all(by_row[row]["called_back"] for row in turns)
        left_alone = [by_row["halted", 1], by_row["elsewhere", 1]]
        assert all(row["due"] > 3000 and not row["called_back"] for row in left_alone)

    await database.execute(
        "UPDATE waits SET state = 'released', released_at = clock_timestamp() FROM datasets d"
        " WHERE d.dataset_seq = waits.dataset_seq AND d.run_id = 'first' AND row_index = 4"
    )
    await waits.provider_serves(database, "own", "away", waits.Turns(per_second=10.0, at_once=2, together=1, of_a_run=2, rows=9))
    found = await database.fetch(
        "SELECT d.run_id, w.row_index FROM waits w JOIN datasets d USING (dataset_seq) WHERE w.called_back AND w.state = 'waiting' ORDER BY due_at"
    )
    order = [(row["run_id"], row["row_index"]) for row in found]
    assert set(order[:2]) == {("second", 1), ("second", 2)}, "the other run has had its turn"
    assert order[2:] == [("first", 3), ("first", 2), ("second", 3), ("second", 4), ("first", 1), ("second", 5)]


async def test_rows_that_wait_for_an_idle_provider_come_sooner_and_none_later_and_new_ones_do_not_wait_for_them(database: Database) -> None:
    await database.execute(
        "INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options) VALUES ('r', 'r', 'own', 'p', 'running', '{}', '[]', '{}')"
    )
    await database.execute(
        "INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, run_window) VALUES ('r', 'd', 'i', '{}', 200, 2000)"
    )
    await database.execute(
        "INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason, provider, asked, called_back)"
        " SELECT dataset_seq, n, 'k', n, 1, 1, now() + make_interval(secs => CASE n WHEN 3 THEN 0.05 ELSE 1000 + n END), 'r', 'slow', n, n = 5"
        " FROM datasets, generate_series(0, 7) n WHERE run_id = 'r'"
    )
    await waits.provider_serves(database, "own", "slow", waits.Turns(per_second=10.0, at_once=1, together=1, of_a_run=1, rows=6, sooner=True))
    found = await database.fetch(
        "SELECT called_back, extract(epoch FROM due_at - now())::float8 AS due FROM waits"
        " WHERE dataset_seq IN (SELECT dataset_seq FROM datasets WHERE run_id = 'r') ORDER BY row_index"
    )
    start = found[0]["due"]
    assert [row["due"] - start for row in found[:6]] == pytest.approx([0, 0.1, 0.2, 0.05, 0.4, 0.5], abs=0.04)
    assert all(row["due"] > 1000 for row in found[6:])
    assert [row["called_back"] for row in found] == [False] * 5 + [True] + [False] * 2, "as it was"


async def test_a_run_starts_when_it_is_stored_not_when_its_transaction_began(database: Database) -> None:
    async with database.pool.acquire() as connection, connection.transaction():
        await connection.fetchval("SELECT now()")
        others = await database.fetchrow("SELECT extract(epoch FROM clock_timestamp())::float8 AS clock")
        run = await runs.insert(connection, "late", "late", RunStart(play="p"), "a", [], "stopped before it came")

    assert others is not None
    assert run is not None
    assert run.created >= others["clock"]


async def test_a_body_that_runs_waits_for_nobody_so_its_wall_time_passes(database: Database) -> None:
    async def standing() -> asyncpg.Record:
        row = await database.fetchrow("SELECT halted_seconds, deadline - created_at AS allowed, halted_at FROM runs WHERE run_id = 'taken'")
        assert row is not None
        return row

    async with database.pool.acquire() as connection:
        await runs.insert(connection, "taken", "taken", RunStart(play="p"), "a", [], None)
        await runs.set_waiting(connection, "taken", "halted: budget")
        await runs.decide(connection, "taken", 3600)
        await connection.execute("UPDATE runs SET halted_at = halted_at - interval '100 seconds' WHERE run_id = 'taken'")
        before = await standing()
        await runs.take(connection, "taken", "lease", 10)
        after = await standing()
        assert after["halted_at"] is None
        assert after["halted_seconds"] >= before["halted_seconds"] + 100
        assert after["allowed"] >= before["allowed"] + timedelta(seconds=100), "what it waited for a person is not counted"
        await connection.execute("UPDATE runs SET deadline = clock_timestamp() WHERE run_id = 'taken'")
        assert await runs.is_out_of_time(connection, "taken")

        await runs.halt(connection, "taken", "pause")
        await runs.take(connection, "taken", "another", 10)
        assert (await standing())["halted_at"] is not None, "its halt was not lifted"


def test_every_statement_is_used() -> None:
    folder = importlib.resources.files("rowmill_admission") / "store"
    source = "".join(entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".py"))
    used = set(re.findall(r'SQL\["(\w+)"\]', source))
    assert set(SQL.names()) == used
