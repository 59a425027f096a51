"""Admission's tables, written to by tests: what a statement finds, or makes of a row, without anybody around."""

from __future__ import annotations

from typing import Any

from rowmill.runtime.db import Database


class Tables:
    """Writes rows of which only what matters is said, as SQL: ``ago(3)`` is three seconds ago."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def run(self, run_id: str, **columns: str) -> None:
        told = {"identity": "'i'", "org": "'o'", "play": "'p'", "state": "'running'", "input": "'{}'", "inputs": "'[]'", "options": "'{}'"}
        long_ago = {"created_at": ago(1000), "changed_at": ago(1000), "advanced_at": ago(1000)}
        await self.insert("runs", {"run_id": f"'{run_id}'", **told, **long_ago, **columns})

    async def dataset(self, run_id: str, name: str = "d", **columns: str) -> int:
        definition = f"""'{{"run_id":"{run_id}","term":1,"dataset":"{name}","input_id":"i","columns":[],"code_digest":"c"}}'"""
        told = {"run_id": f"'{run_id}'", "dataset": f"'{name}'", "input_id": "'i'", "definition": definition, "page_rows": "2", "run_window": "9"}
        row = await self.insert("datasets", {**told, **columns}, returning="dataset_seq")
        seq: int = row["dataset_seq"]
        return seq

    async def page(self, seq: int, page: int, **columns: str) -> None:
        counted = dict.fromkeys(("first_index", "rows", "input_page", "input_offset", "sent", "bytes"), "0")
        await self.insert("pages", {"dataset_seq": f"{seq}", "page": f"{page}", **counted, "duplicates": "'{}'", "digests": "''", **columns})

    async def names(self, seqs: list[int]) -> list[str]:
        rows = await self.database.fetch("SELECT run_id FROM datasets WHERE dataset_seq = ANY($1::bigint[]) ORDER BY run_id", seqs)
        return [row["run_id"] for row in rows]

    async def one(self, sql: str, *arguments: Any) -> Any:
        row = await self.database.fetchrow(sql, *arguments)
        assert row is not None
        return row

    async def insert(self, table: str, columns: dict[str, str], returning: str = "1") -> Any:
        return await self.one(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(columns.values())}) RETURNING {returning}")  # noqa: S608


def ago(seconds: float) -> str:
    return f"clock_timestamp() - interval '{seconds} s'"
