"""Which rows that wait have their turn, however many others stand before them: of runs that are halted, that had theirs, of anybody else."""

from __future__ import annotations

import re

import pytest
from tests.integration.admission.admission_tables import ago
from tests.integration.admission.test_admission_waits import Waits, tables

from rowmill_admission.store import SQL, waits

__all__ = ["tables"]

pytestmark = pytest.mark.servers

ENDS = {"halted": {"halt_reason": "'pause'"}, "stopped": {"stop_reason": "''"}, "over": {"finished_at": ago(1), "state": "'failed'"}}
"""Runs that do not go on."""


async def wait_many(tables: Waits, seq: int, rows: int, *, due_at: str = "clock_timestamp() + interval '1000 s'", **columns: str) -> None:
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", {value}" for value in columns.values())
    await tables.database.execute(
        f"INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, reason, due_at{names})"  # noqa: S608 - our own
        f" SELECT {seq}, n, 'k', 0, 1, 1, 'r', {due_at}{values} FROM generate_series(1, {rows}) n"
    )


async def has_due(tables: Waits, seq: int) -> list[int]:
    sql = "SELECT row_index FROM waits WHERE dataset_seq = $1 AND state = 'waiting' AND due_at <= clock_timestamp() ORDER BY row_index"
    return [row["row_index"] for row in await tables.database.fetch(sql, seq)]


async def test_due_rows_of_runs_that_do_not_go_on_hold_up_no_others_however_many(tables: Waits) -> None:
    for run_id, columns in ENDS.items():
        await wait_many(tables, await tables.of(run_id, **columns), 30, due_at=ago(100))
    goes_on = await tables.of("goes on", org="'another'")
    assert await waits.next_due(tables.database) is None, "nobody is to be woken for what is not released"
    await wait_many(tables, goes_on, 10, due_at=ago(1))
    due = await waits.next_due(tables.database)
    assert due is not None
    assert -100 < due < 0
    released = await waits.release_due(tables.database, 50, but_for=[], looked_at=20)
    assert [wait.dataset_seq for wait in released] == [goes_on] * 10


async def test_of_more_due_rows_than_are_looked_at_each_organisation_and_run_has_its_part(tables: Waits) -> None:
    big, small, other = await tables.of("big"), await tables.of("small"), await tables.of("other", org="'another'")
    for seconds, seq in enumerate((other, small, big)):
        await wait_many(tables, seq, 40, due_at=ago(10 * seconds + 1))
    released = [wait.dataset_seq for wait in await waits.release_due(tables.database, 20, but_for=[], looked_at=20)]
    assert [released.count(seq) for seq in (big, small, other)] == [5, 5, 10]


@pytest.mark.parametrize("sooner", [True, False])
async def test_rows_of_runs_that_do_not_go_on_take_no_turn_of_those_that_wait_for_a_provider(tables: Waits, sooner: bool) -> None:
    ended = [await tables.of(run_id, **columns) for run_id, columns in ENDS.items()]
    goes_on = await tables.of("goes on")
    for seq in (*ended, goes_on):
        await wait_many(tables, seq, 5, provider="'hunter'", asked="n")
    turns = waits.Turns(per_second=0.1, at_once=2, together=1, of_a_run=1, rows=2, sooner=sooner)
    assert await waits.provider_serves(tables.database, "o", "hunter", turns)
    assert await has_due(tables, goes_on) == [1, 2]
    assert [await has_due(tables, seq) for seq in ended] == [[], [], []]


async def test_what_an_idle_provider_changes_nothing_of_is_not_written_anew(tables: Waits) -> None:
    seq = await tables.of("r")
    await wait_many(tables, seq, 5, provider="'hunter'", due_at="CASE n WHEN 2 THEN NULL ELSE clock_timestamp() + interval '1000 s' END", asked="n")
    turns = waits.Turns(per_second=0.1, at_once=2, together=1, of_a_run=1, rows=2, sooner=True)
    assert [await waits.provider_serves(tables.database, "o", "hunter", turns) for _ in range(2)] == [True, False]
    assert await has_due(tables, seq) == [1], "who waits for something to happen does not wait for a turn"


async def test_runs_take_turns_from_one_message_about_an_idle_provider_to_the_next(tables: Waits) -> None:
    """Each message is for two rows; what is due then comes."""
    seqs = [await tables.of(run_id) for run_id in ("x", "y", "z")]
    for seq in seqs:
        await wait_many(tables, seq, 20, provider="'hunter'", asked="n")
    turns = waits.Turns(per_second=0.1, at_once=2, together=1, of_a_run=1, rows=2, sooner=True)
    came: list[int] = []
    for _ in range(6):
        await waits.provider_serves(tables.database, "o", "hunter", turns)
        for wait in await waits.release_due(tables.database, 10, but_for=[]):
            await waits.released(tables.database, wait.dataset_seq, [wait])
            came.append(wait.dataset_seq)
    assert [came.count(seq) for seq in seqs] == [4, 4, 4]


async def test_rows_that_were_called_back_long_ago_are_not_read_again(tables: Waits) -> None:
    """What is out is looked up four times a second."""
    database = tables.database
    await database.execute(
        "INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options)"
        " SELECT 'run' || n, '', 'o', 'p', 'running', '{}', '[]', '{}' FROM generate_series(1, 50) n"
    )
    await database.execute(
        "INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, run_window, sent)"
        " SELECT run_id, 'd', 'i', '{}', 200, 2000, 2000 FROM runs"
    )
    await database.execute(
        "INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason, state, called_back, released_at)"
        " SELECT dataset_seq, n, 'k', 0, 1, 1, now(), 'r', CASE WHEN n > 1000 THEN 'waiting' ELSE 'released' END, n <= 1000,"
        " CASE WHEN n <= 1000 THEN now() - interval '10 minutes' END FROM datasets, generate_series(1, 2000) n"
    )
    await database.execute("ANALYZE runs, datasets, waits")
    plan = await database.fetch(f"EXPLAIN {SQL['flights'].replace('$1', '15.0::float8')}")
    text = "\n".join(line[0] for line in plan)
    lately = text.partition("waits_back_lately")[2].partition("SubPlan")[0]
    assert re.search(r"Index Cond: .*released_at", lately), text
    assert len(re.findall("Aggregate", text)) == 1, f"waiting rows are counted once:\n{text}"


async def test_rows_that_wait_are_found_by_index_in_large_tables(tables: Waits) -> None:
    """A generic plan, as a connection may use it from the sixth time on: runs that are over, other organisations' and rows that do not wait."""
    database = tables.database
    await database.execute(
        "INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options, finished_at)"
        " SELECT 'run' || n, '', 'o' || n % 100, 'p', CASE WHEN n > 4900 THEN 'running' ELSE 'completed' END, '{}', '[]', '{}',"
        " CASE WHEN n <= 4900 THEN now() END FROM generate_series(1, 5000) n"
    )
    await database.execute(
        "INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, run_window, state)"
        " SELECT run_id, 'd', 'i', '{}', 200, 2000, CASE state WHEN 'running' THEN 'open' ELSE 'closed' END FROM runs"
    )
    await database.execute(
        "INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason, provider, asked)"
        " SELECT dataset_seq, n, 'k', 0, 1, 1, now() + make_interval(secs => n), 'r', 'hunter', n FROM datasets, generate_series(1, 200) n"
        " WHERE state = 'open'"
    )
    await database.execute("ANALYZE runs, datasets, waits")
    async with database.pool.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        for name in ("release_due", "next_due", "provider_serves"):
            sql = SQL[name]
            await connection.execute(f"PREPARE checked AS {sql}")
            nothing = ", ".join(["NULL"] * max(map(int, re.findall(r"\$(\d+)", sql)), default=0))
            plan = await connection.fetch(f"EXPLAIN EXECUTE checked{f'({nothing})' * bool(nothing)}")
            text = "\n".join(line[0] for line in plan)
            assert "Seq Scan" not in text, f"{name}:\n{text}"
            assert "waits_waiting" in text or "waits_for_provider" in text, f"{name}:\n{text}"
            await connection.execute("DEALLOCATE checked")
