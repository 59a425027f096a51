"""The sheet writer's statements, column by column: what adds up, what stays, and what only a row that is as it was seen is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.rows import SettledRow
from rowmill_sheet_writer.counts import DatasetCounts, DatasetId, Raise, Tally
from rowmill_sheet_writer.deciding import Renewal
from rowmill_sheet_writer.marks import CANCELLED, COMPLETED, DEAD_LETTERED, DUPLICATE, FAILED, REUSED, SENT, End
from rowmill_sheet_writer.pages import PageId, PageRecord
from rowmill_sheet_writer.reuse import StoredRow
from rowmill_sheet_writer.settlement import RowId, RowWrite
from rowmill_sheet_writer.store import SERVER_SETTINGS, Store, Transaction

pytestmark = pytest.mark.servers

SHEET = 77


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = await Database.connect(database_url, schema="sheets", server_settings=SERVER_SETTINGS)
    await found.migrate("rowmill_sheet_writer")
    yield found
    await found.execute("TRUNCATE sheet_rows, pages, dataset_counts")
    await found.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


# ---- counts -------------------------------------------------------------------------------------------------------------------------------

LEADS = DatasetId("run", "leads")


async def raised(store: Store, tally: Tally) -> DatasetCounts:
    async def work(transaction: Transaction) -> DatasetCounts:
        return (await transaction.raise_counts({LEADS: Raise(SHEET, 1, tally)}))[LEADS]

    return await store.transact(work)


def tally(letters: dict[str, int], *, admitted: int = 0, error: str | None = None, calls: int = 0, cost: str = "0") -> Tally:
    made = Tally(admitted=admitted, calls=calls, cost=Decimal(cost), first_error=None if error is None else Problem(code=error, message=error))
    made.by_letter.update(letters)
    return made


async def test_counts_add_up_and_each_change_is_a_version(store: Store) -> None:
    one = {COMPLETED: 1, FAILED: 2, DEAD_LETTERED: 1, CANCELLED: 4, REUSED: 5, DUPLICATE: 6}
    first = await raised(store, tally(one, admitted=50, calls=7, cost="0.01"))
    assert (first.version, first.counts.failed, first.counts.cost) == (1, 3, Decimal("0.01"))
    second = await raised(store, tally(one, admitted=50, calls=7, cost="0.02"))
    assert second.version == 2
    assert second.counts == Counts(admitted=100, completed=2, failed=6, cancelled=8, reused=10, duplicates=12, calls=14, cost=Decimal("0.03"))


async def test_the_first_error_stays_for_as_long_as_a_row_has_failed(store: Store) -> None:
    async def error(tally: Tally) -> str | None:
        found = (await raised(store, tally)).first_error
        return None if found is None else found.code

    assert await error(tally({}, admitted=3)) is None
    assert await error(tally({FAILED: 1}, error="first")) == "first"
    assert await error(tally({FAILED: 1}, error="second")) == "first"
    assert await error(tally({FAILED: -1, COMPLETED: 1})) == "first"
    assert await error(tally({FAILED: -1, COMPLETED: 1})) is None
    assert await error(tally({FAILED: 1}, error="third")) == "third"


# ---- rows ---------------------------------------------------------------------------------------------------------------------------------

KEY = b"k" * 32
ROW = RowId(SHEET, KEY)


def settled(attempt: int, *, status: str = "completed", **facts: Any) -> SettledRow:
    return SettledRow(key=KEY.hex(), index=0, page=0, attempt=attempt, status=status, **facts)  # type: ignore[arg-type]


def cells(name: str, *, shadows: bool = False) -> dict[str, Any]:
    return {
        "input": msgspec.Raw(f'{{"name":"{name}"}}'.encode()),
        "values": msgspec.Raw(f'{{"email":"{name}"}}'.encode()),
        "meta": msgspec.Raw(f'{{"email":"{name}"}}'.encode()),
        "shadows": shadows,
    }


async def written(store: Store, number: int, row: SettledRow) -> StoredRow:
    async def work(transaction: Transaction) -> StoredRow:
        await transaction.write_rows({ROW: RowWrite(number, row)})
        return (await transaction.read_rows([ROW]))[ROW]

    return await store.transact(work)


async def test_a_row_that_ends_without_cells_keeps_those_that_stood_there_with_their_input(store: Store, database: Database) -> None:
    await written(store, 1, settled(1, **cells("ann", shadows=True)))
    failure = Problem(code="no", message="no")
    row = await written(store, 2, settled(1, status="failed", error=failure, input=msgspec.Raw(b'{"name":"bob"}')))
    assert (row.number, row.status) == (2, "failed")
    assert (row.input, row.values, row.meta, row.shadows) == ('{"name":"ann"}', '{"email":"ann"}', '{"email":"ann"}', True)
    [stands] = await database.fetch("SELECT cells_kept, completed_at, error FROM sheet_rows")
    assert (stands["cells_kept"], stands["completed_at"]) == (True, None)
    row = await written(store, 3, settled(1, **cells("cat")))
    assert (row.input, row.values, row.meta, row.shadows) == ('{"name":"cat"}', '{"email":"cat"}', '{"email":"cat"}', False)
    [stands] = await database.fetch("SELECT cells_kept, completed_at, error FROM sheet_rows")
    assert (stands["cells_kept"], stands["completed_at"] is None, stands["error"]) == (False, False, None)


@pytest.mark.parametrize(("seen", "renewed"), [((1, 2), True), ((1, 1), False), ((2, 2), False)])
async def test_only_a_row_that_is_as_it_was_seen_gets_the_input_of_the_run_that_reuses_it(store: Store, seen: tuple[int, int], renewed: bool) -> None:
    await written(store, 1, settled(2, **cells("ann")))

    async def work(transaction: Transaction) -> tuple[set[bytes], StoredRow]:
        renewal = Renewal(position=0, key=KEY, seen=seen, input='{"name":"new"}', shadows=True)
        keys = await transaction.renew_inputs(5, SHEET, [renewal])
        return keys, (await transaction.read_rows([ROW]))[ROW]

    keys, row = await store.transact(work)
    assert keys == ({KEY} if renewed else set())
    assert (row.input, row.shadows, row.number, row.attempt) == (('{"name":"new"}', True, 5, 1) if renewed else ('{"name":"ann"}', False, 1, 2))
    assert row.values == '{"email":"ann"}'


# ---- pages --------------------------------------------------------------------------------------------------------------------------------


async def test_who_changes_a_page_waits_for_whoever_does(store: Store, database: Database) -> None:
    page_id = PageId(*LEADS, 3)
    others: list[asyncio.Task[None]] = []

    async def add(transaction: Transaction) -> None:
        await transaction.add_pages([PageRecord(page_id, SHEET, 6, KEY * 2, [SENT, SENT])])

    async def overtaken() -> None:
        """Return once another waits for the page, or has it."""
        others.append(asyncio.create_task(settle(1)))
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        async with asyncio.timeout(30):
            while not others[0].done() and not await database.fetch(waiting):
                await asyncio.sleep(0.01)

    async def settle(position: int) -> None:
        async def work(transaction: Transaction) -> None:
            page = (await transaction.lock_pages([page_id]))[page_id]
            if not others:
                await overtaken()
            page.letters[position] = COMPLETED
            page.ends[position] = End(position + 2, 1, Decimal("0.5"))
            page.changed = True
            await transaction.save_pages([page])

        await store.transact(work)

    await store.transact(add)
    await settle(0)
    await others[0]
    [page] = await store.read_pages(LEADS, 0, 100)
    assert page.letters == [COMPLETED, COMPLETED]
    assert page.ends == {0: End(2, 1, Decimal("0.5")), 1: End(3, 1, Decimal("0.5"))}
