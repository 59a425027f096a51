"""Every named statement is understood by the database, and used."""

from __future__ import annotations

import importlib.resources
import re

import pytest

from rowmill.runtime.db import Database
from rowmill_admission.store import SQL

pytestmark = pytest.mark.servers


async def test_every_statement_can_be_prepared(database_url: str) -> None:
    database = await Database.connect(database_url, schema="admission", wait=10)
    try:
        await database.migrate("rowmill_admission")
        async with database.pool.acquire() as connection:
            for name in SQL.names():
                await connection.prepare(SQL[name])
    finally:
        await database.close()


def test_every_statement_is_used() -> None:
    folder = importlib.resources.files("rowmill_admission") / "store"
    source = "".join(entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".py"))
    used = set(re.findall(r'SQL\["(\w+)"\]', source))
    assert set(SQL.names()) == used
