"""The sheet writer's tables. The only module that knows SQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import asyncpg
import msgspec

from rowmill.errors import MalformedMessage
from rowmill.runtime.db import Connection, Database, Queries
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, encode
from rowmill_contracts.rows import SheetsQueried
from rowmill_contracts.runs import PageProgress
from rowmill_sheet_writer.counts import DatasetCounts, DatasetId, Raise
from rowmill_sheet_writer.deciding import Renewal
from rowmill_sheet_writer.events import Event, OwedEvent
from rowmill_sheet_writer.marks import SENT, End, letter_of, rank_of
from rowmill_sheet_writer.pages import PageId, PageRecord
from rowmill_sheet_writer.querying import refused, sheets_queried
from rowmill_sheet_writer.reading import StoredCells
from rowmill_sheet_writer.reuse import StoredRow
from rowmill_sheet_writer.settlement import RowId, RowWrite

QUERIES = Queries.of(__package__ or "rowmill_sheet_writer")

SERVER_SETTINGS = {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off", "jit": "off"}
"""Every statement finds a page's worth of rows by key; on small or freshly filled tables the planner would read the whole sheet instead."""

ResultT = TypeVar("ResultT")

_encode = msgspec.json.Encoder(decimal_format="string").encode
_decode_ends = msgspec.json.Decoder(dict[int, End]).decode
_decode_inputs = msgspec.json.Decoder(dict[int, msgspec.Raw]).decode
_decode_problem = msgspec.json.Decoder(Problem).decode


class Transaction:
    """What can be done within one commit. Lock page records, then sheet rows, then counts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read_rows(self, row_ids: Iterable[RowId]) -> dict[RowId, StoredRow]:
        wanted = sorted(set(row_ids))
        if not wanted:
            return {}
        records = await self._connection.fetch(QUERIES["read_rows"], [row.sheet_id for row in wanted], [row.key for row in wanted])
        return {
            RowId(sheet_id, key): StoredRow(number, attempt, status, shadows, input_row, values, meta)
            for sheet_id, key, number, attempt, status, shadows, input_row, values, meta in records
        }

    async def add_pages(self, pages: Iterable[PageRecord]) -> set[PageId]:
        """Record pages that have no record yet; returns which these were."""
        rows = [
            (*page.page_id, page.sheet_id, page.first_index, len(page.letters), "".join(page.letters), page.keys, _inputs(page))
            for page in sorted(pages, key=lambda page: page.page_id)
        ]
        records = await self._connection.fetch(QUERIES["add_pages"], *_columns(rows, 9))
        return {PageId(*record) for record in records}

    async def lock_pages(self, page_ids: Iterable[PageId]) -> dict[PageId, PageRecord]:
        """The records that exist, locked until the commit."""
        records = await self._connection.fetch(QUERIES["lock_pages"], *_columns(sorted(page_ids), 3))
        return {page.page_id: page for page in map(_page_of, records)}

    async def lock_pages_to_reopen(self, dataset_id: DatasetId, first: int, letters: str, limit: int) -> list[PageRecord]:
        """The next pages, from number ``first`` on, with a row that is out or ended with one of these letters; locked until the commit."""
        records = await self._connection.fetch(QUERIES["lock_pages_to_reopen"], *dataset_id, first, f"[{SENT}{letters}]", limit)
        return [_page_of(record) for record in records]

    async def save_pages(self, pages: Iterable[PageRecord]) -> None:
        """Store the marks and ends of locked (or just added) pages that changed."""
        rows = [(*page.page_id, "".join(page.letters), _encode(page.ends).decode() if page.ends else None) for page in pages if page.changed]
        if rows:
            await self._connection.execute(QUERIES["save_pages"], *_columns(rows, 5))

    async def write_rows(self, writes: Mapping[RowId, RowWrite]) -> None:
        """Write settled rows, each unless what stands there is newer.

        Raises:
            MalformedMessage: a row's JSON text is not UTF-8.

        """
        rows = [_written(row_id, writes[row_id]) for row_id in sorted(writes)]
        await self._connection.execute(QUERIES["write_rows"], *_columns(rows, 11))

    async def renew_inputs(self, number: int, sheet_id: int, renewals: Iterable[Renewal]) -> set[bytes]:
        """Store the run's input columns of reused rows; returns the keys of those that had not changed since they were seen."""
        by_key = {renewal.key: renewal for renewal in renewals}
        seen = [(sheet_id, key, *by_key[key].seen) for key in sorted(by_key)]
        locked = [record["row_key"] for record in await self._connection.fetch(QUERIES["lock_rows"], *_columns(seen, 4))]
        rows = [(sheet_id, key, number, by_key[key].input, by_key[key].shadows) for key in locked]
        if rows:
            await self._connection.execute(QUERIES["renew_inputs"], *_columns(rows, 5))
        return set(locked)

    async def raise_counts(self, raised: Mapping[DatasetId, Raise]) -> dict[DatasetId, DatasetCounts]:
        if not raised:
            return {}
        rows = []
        for dataset_id in sorted(raised):
            change = raised[dataset_id]
            tally = change.tally
            rows.append(
                (
                    *dataset_id,
                    change.sheet_id,
                    change.number,
                    tally.admitted,
                    tally.completed,
                    tally.failed,
                    tally.cancelled,
                    tally.reused,
                    tally.duplicates,
                    tally.calls,
                    tally.cost,
                    _problem_text(tally.first_error),
                )
            )
        return _counts_of(await self._connection.fetch(QUERIES["raise_counts"], *_columns(rows, 13)))

    async def read_counts(self, dataset_ids: Iterable[DatasetId]) -> dict[DatasetId, DatasetCounts]:
        wanted = sorted(set(dataset_ids))
        if not wanted:
            return {}
        return _counts_of(await self._connection.fetch(QUERIES["read_counts"], *_columns(wanted, 2)))


class Store:
    """The tables, outside and inside of transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sheet_ids: dict[tuple[str, str, str], int] = {}

    async def transact(self, work: Callable[[Transaction], Awaitable[ResultT]]) -> ResultT:
        """Run ``work`` in a transaction; it may run more than once (see `Database.transact`)."""
        return await self._database.transact(lambda connection: work(Transaction(connection)))

    async def sheet_id(self, org: str, play: str, dataset: str) -> int:
        """The sheet's number, made at its first use."""
        name = (org, play, dataset)
        found = self._sheet_ids.get(name)
        while found is None:
            record = await self._database.fetchrow(QUERIES["find_sheet"], *name)
            if record is None:
                await self._database.execute(QUERIES["add_sheet"], *name)
            else:
                found = self._sheet_ids[name] = record["sheet_id"]
        return found

    async def read_counts(self, dataset_id: DatasetId) -> tuple[DatasetCounts, list[PageProgress]] | None:
        """A dataset's counts, and each page that has open rows; None where nothing is recorded."""
        records = await self._database.fetch(QUERIES["read_counts_and_open_pages"], *dataset_id)
        if not records:
            return None
        pages = [PageProgress(page=record["page"], open=record["open"]) for record in records if record["page"] is not None]
        return _counts_of(records[:1])[dataset_id], pages

    async def read_pages(self, dataset_id: DatasetId, first: int, past: int) -> list[PageRecord]:
        """The page records that hold rows from index ``first`` to below ``past``, in input order."""
        records = await self._database.fetch(QUERIES["read_pages"], *dataset_id, first, past)
        return [_page_of(record) for record in records]

    async def rows_recorded(self, dataset_id: DatasetId) -> int:
        """One past the last index of which there is a record."""
        record = await self._database.fetchrow(QUERIES["read_last_page"], *dataset_id)
        return record["past"] if record is not None else 0

    async def read_cells(self, sheet_id: int, keys: list[bytes], *, max_bytes: int, meta: bool) -> list[StoredCells]:
        """The rows of these keys, in this order, up to the one with which they come to ``max_bytes``."""
        records = await self._database.fetch(QUERIES["read_cells"], sheet_id, keys, max_bytes, meta)
        return [
            StoredCells(status, bool(shadows), bool(kept), input_row, values, meta_text, _problem_of(error))
            for status, shadows, kept, input_row, values, meta_text, error in records
        ]

    async def query(self, sql: str, parameters: list[Any], *, limit: int, offset: int, timeout: float) -> SheetsQueried:
        """Rows ``offset`` to ``offset + limit - 1`` of a statement's result, run as a role that may only read the views.

        ``timeout``: seconds for the statement. Its errors are the answer; nothing that it sets outlives it.
        """

        async def ask(connection: Connection) -> SheetsQueried:
            await connection.execute(QUERIES["become_reader"], str(max(1, int(timeout * 1000))))
            statement = await connection.prepare(sql)
            attributes = statement.get_attributes()
            if not attributes:
                return refused("only statements that return rows can be asked")
            cursor = await statement.cursor(*parameters)
            if offset:
                await cursor.forward(offset)
            records = await cursor.fetch(limit)
            return sheets_queried([a.name for a in attributes], [a.type.name for a in attributes], [tuple(r) for r in records])

        async def work(connection: Connection) -> SheetsQueried:
            asking = connection.transaction()  # a savepoint, always rolled back: what the statement may have set goes with it
            await asking.start()
            try:
                answer = await ask(connection)
            except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if connection.is_closed():
                    raise
                answer = refused(str(error))
            await asking.rollback()
            return answer

        return await self._database.transact(work, foreign=True)

    async def add_owed(self, events: Iterable[Event]) -> None:
        rows = [(e.message.event_id, e.routing_key, e.message.message_type, e.message.run_id, encode(e.message)) for e in events]
        await self._database.execute(QUERIES["add_owed"], *_columns(sorted(rows), 5))

    async def read_owed(self, *, after: str, limit: int) -> list[OwedEvent]:
        """Owed events in the order of their ids, from the one that follows ``after``."""
        return [OwedEvent(*record) for record in await self._database.fetch(QUERIES["read_owed"], after, limit)]

    async def delete_owed(self, event_ids: Iterable[str]) -> None:
        await self._database.execute(QUERIES["delete_owed"], list(event_ids))


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Rows as the index-aligned arrays that ``unnest`` takes."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def _written(row_id: RowId, write: RowWrite) -> tuple[Any, ...]:
    row = write.row
    letter = letter_of(row)
    without_cells = row.meta == EMPTY_OBJECT and row.status != "completed"
    try:
        return (
            *row_id,
            write.number,
            row.attempt,
            rank_of(letter),
            row.status,
            row.shadows,
            str(row.input, "utf-8"),
            None if without_cells else str(row.values, "utf-8"),
            None if without_cells else str(row.meta, "utf-8"),
            _problem_text(row.error),
        )
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"row {row.index}: its JSON is not UTF-8: {error}") from error


def _page_of(record: asyncpg.Record) -> PageRecord:
    run_id, dataset, page, sheet_id, first_index, marks, keys, ends, inputs = record
    return PageRecord(
        PageId(run_id, dataset, page),
        sheet_id,
        first_index,
        keys,
        list(marks),
        _decode_ends(ends) if ends is not None else {},
        _decode_inputs(inputs) if inputs is not None else {},
    )


def _inputs(page: PageRecord) -> str | None:
    return _encode(page.inputs).decode() if page.inputs else None


def _counts_of(records: Iterable[asyncpg.Record]) -> dict[DatasetId, DatasetCounts]:
    return {
        DatasetId(record["run_id"], record["dataset"]): DatasetCounts(
            Counts(
                admitted=record["admitted"],
                completed=record["completed"],
                failed=record["failed"],
                cancelled=record["cancelled"],
                reused=record["reused"],
                duplicates=record["duplicates"],
                calls=record["calls"],
                cost=record["cost"],
            ),
            record["version"],
            _problem_of(record["first_error"]),
        )
        for record in records
    }


def _problem_text(problem: Problem | None) -> str | None:
    """Statements look into it, ours and those of people, which Postgres refuses where a word of an author's or a provider's holds a NUL."""
    if problem is None:
        return None
    readable = msgspec.structs.replace(problem, code=problem.code.replace("\x00", "\\x00"), message=problem.message.replace("\x00", "\\x00"))
    return _encode(readable).decode()


def _problem_of(text: str | None) -> Problem | None:
    return _decode_problem(text) if text is not None else None
