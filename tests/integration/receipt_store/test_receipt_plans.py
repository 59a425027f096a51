"""The receipts are reached by their key, however few or many they are (FACTS.md, "Pin the receipt plans")."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rowmill.runtime.db import Connection, Database
from rowmill_receipt_store.store import QUERIES

pytestmark = pytest.mark.servers

BY_KEY = [
    "claim",
    "load",
    "doubt",
    "confirm",
    "renew",
    "complete",
    "fail",
    "release",
    "settle_charges",
    "tallies",
    "windows",
    "report_windows",
    "end_presences",
    "standings",
    "tell_standings",
]

_OF_NO_RECEIPT = {"tallies", "windows", "report_windows", "end_presences", "standings", "tell_standings"}

FILL = (
    """
    INSERT INTO receipts (
        key, revision, state, dispatch, lease_id, holder, run_id, caller, org, tool, effect, reserved, took_over, expires_at, output
    )
    SELECT sha256(n::text::bytea), 1, 'completed', 1, 'lease', 'holder', 'run', 'leads/' || n, '', 'tool', 'read', 0, false, now(), '{"raw": 1}'
    FROM generate_series($1::bigint, $2::bigint) AS n
    """,
    "INSERT INTO failures SELECT sha256(n::text::bytea), 'run', 1, '{}', now() FROM generate_series($1::bigint, $2::bigint) AS n",
    """
    INSERT INTO charges (run_id, key, dispatch, reserved)
    SELECT 'run' || n % 10, sha256(n::text::bytea), 1, 0.01 FROM generate_series($1::bigint, $2::bigint) AS n
    """,
    "INSERT INTO runs (run_id, state, reason, charged) SELECT 'run' || n, 'running', '', 0 FROM generate_series($1::bigint, $2::bigint) AS n",
)


async def refill(database: Database, rows: int) -> None:
    await database.execute("TRUNCATE receipts, failures, charges, runs")
    for start in range(1, rows + 1, 100_000):
        for statement in FILL:
            await database.execute(statement, start, min(rows, start + 99_999))


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def generic_plan(connection: Connection, name: str) -> list[dict[str, Any]]:
    """The plan that the service's connections use for every execution, whatever the arguments."""
    statement = await connection.prepare(QUERIES[name])
    nothing = ", ".join(["NULL"] * len(statement.get_parameters()))
    explained = await connection.fetchval(f'EXPLAIN (FORMAT JSON) EXECUTE "{statement.get_name()}"({nothing})')
    return list(nodes(json.loads(explained)[0]["Plan"]))


async def check_plans(database: Database) -> None:
    """Tables are read by probing their indexes, once for each key asked, and in no other way. (There are sixteen shards: let it.)"""
    async with database.pool.acquire() as connection:
        for name in BY_KEY:
            plan = await generic_plan(connection, name)
            for node in plan:
                if node.get("Relation Name", "shards") != "shards" and node["Node Type"] != "ModifyTable":
                    assert node["Node Type"] == "Bitmap Heap Scan" or "Index Cond" in node, (name, node)
            for node in plan:  # a run has many charges: found by its id alone, each key would read them all
                assert node.get("Index Name") != "charges_pkey" or "(key = " in node["Index Cond"], (name, node)
            conditions = [node["Index Cond"] for node in plan if node.get("Index Name") == "receipts_pkey"]
            if name == "load":  # besides, those of calls that a run has under way
                assert "(key = ANY (ARRAY[w.key]))" in conditions
                conditions.remove("(key = ANY (ARRAY[w.key]))")
                [under_way] = [node for node in plan if node.get("Index Name") == "charges_open"]
                assert "THEN run_id" in under_way["Index Cond"]
            assert conditions == ([] if name in _OF_NO_RECEIPT | {"claim", "settle_charges"} else ["(key = ANY (ARRAY[a.key]))"]), name


@pytest.mark.parametrize("rows", [0, 1, 2, 40, 1_000])
async def test_statements_probe_tables_by_their_key(rows: int, database: Database) -> None:
    await refill(database, rows)
    await check_plans(database)
    await database.execute("VACUUM ANALYZE")
    await check_plans(database)


@pytest.mark.parametrize("rows", [0, 2_000])
@pytest.mark.parametrize("name", ["sweep", "correct_unsent"])
async def test_a_look_for_unsent_claims_reads_no_other_charges(name: str, rows: int, database: Database) -> None:
    await refill(database, rows)
    await database.execute("UPDATE charges SET unsent = false WHERE run_id <> 'run1'")
    for analyse in (False, True):
        if analyse:
            await database.execute("VACUUM ANALYZE")
        async with database.pool.acquire() as connection, connection.transaction():
            await connection.execute(QUERIES["walk_in_order"])
            statement = await connection.prepare(QUERIES[name])
            explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE \"{statement.get_name()}\"('0 s', '10 s', 2000)")
        used = [(node["Index Name"], node.get("Index Cond", "")) for node in nodes(json.loads(explained)[0]["Plan"]) if "Index Name" in node]
        assert "charges_unsent" in dict(used)
        assert "charges_open" not in dict(used)
        if rows:  # else everything costs the same
            assert all(name == "charges_unsent" or "key = " in condition for name, condition in used if name != "runs_pkey"), used
        assert "Seq Scan" not in explained


@pytest.mark.long
async def test_statements_probe_tables_of_a_million_rows_by_their_key(database: Database) -> None:
    await refill(database, 1_000_000)
    await check_plans(database)
    await database.execute("VACUUM ANALYZE")
    await check_plans(database)
