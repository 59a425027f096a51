"""What the sheet writer does with each message it gets: store, publish what follows, answer; the bus acknowledges when a handler returns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from rowmill.errors import MalformedMessage
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import PAGE_BYTES
from rowmill_contracts.retries import ReopenRows, RowsReopened
from rowmill_contracts.rows import (
    LookupRows,
    QuerySheets,
    ReadCounts,
    ReadRow,
    ReadRows,
    RowsLooked,
    RowsRead,
    RowsSettled,
    SheetsQueried,
)
from rowmill_contracts.runs import RowsCommitted
from rowmill_sheet_writer.announcing import Announcer
from rowmill_sheet_writer.counts import DatasetId
from rowmill_sheet_writer.deciding import Lookup
from rowmill_sheet_writer.events import settled_events
from rowmill_sheet_writer.looking import Looked, look_up
from rowmill_sheet_writer.merging import Merger
from rowmill_sheet_writer.querying import refusal
from rowmill_sheet_writer.reading import places, read_row, size_of
from rowmill_sheet_writer.reopening import reopen
from rowmill_sheet_writer.settings import SheetWriterSettings
from rowmill_sheet_writer.settling import Settled, committed_message, settle_messages
from rowmill_sheet_writer.store import Store

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Told:
    """A settled message with the telling of admission, which it shares with the other messages of its commit."""

    settled: Settled
    admission: asyncio.Task[None] | None


class Handlers:
    """One object's methods are the handlers of both queues."""

    def __init__(self, bus: Bus, store: Store, announcer: Announcer, settings: SheetWriterSettings) -> None:
        self._bus = bus
        self._store = store
        self._announcer = announcer
        self._query_timeout = settings.query_timeout
        bounds = {"max_rows": settings.merge_rows, "max_bytes": settings.merge_bytes, "at_once": settings.merges_at_once}
        self._settling: Merger[RowsSettled, _Told] = Merger(self._settle_all, **bounds)
        self._looking: Merger[Lookup, Looked] = Merger(self._look_up_all, **bounds)

    async def on_settle(self, delivery: Delivery) -> None:
        """The queue of rows that ended."""
        match delivery.message:
            case RowsSettled() as message:
                await self._settle(message, len(delivery.body))
            case other:
                raise Rejected(f"{other.message_type} does not belong on this queue")

    async def on_ask(self, delivery: Delivery) -> None:
        """The queue of questions."""
        match delivery.message:
            case LookupRows() as request:
                await self._bus.reply(delivery, await self._look_up(request, len(delivery.body)))
            case ReadRows() as request:
                await self._bus.reply(delivery, await self._read_rows(request))
            case ReadCounts() as request:
                await self._bus.reply(delivery, await self._read_counts(request))
            case ReopenRows() as request:
                await self._bus.reply(delivery, await self._reopen(request))
            case QuerySheets() as request:
                await self._bus.reply(delivery, await self._query(request))
            case other:
                raise Rejected(f"{other.message_type} does not belong on this queue")

    # ---- settling ---------------------------------------------------------------------------------------------------------------------

    async def _settle(self, message: RowsSettled, size: int) -> None:
        told = await self._settling.submit(message, rows=len(message.rows), size=size)
        await self._announcer.events(settled_events(message, told.settled.told))
        if told.admission is not None:
            await asyncio.shield(told.admission)
        unknown, lost = told.settled.unknown, told.settled.lost
        if unknown:
            log.error("settled_rows_unknown", rows=len(unknown), first_index=unknown[0].index, page=unknown[0].page)
        if lost:
            raise Rejected(f"{len(lost)} rows are in no page record of the run, the first with index {lost[0].index} of page {lost[0].page}")

    async def _settle_all(self, messages: list[RowsSettled]) -> list[_Told]:
        outcomes = await self._store.transact(lambda transaction: settle_messages(transaction, messages))
        committed = {outcome.dataset_id: outcome.committed for outcome in outcomes if outcome.committed is not None}
        telling = {dataset_id: asyncio.create_task(self._announcer.committed(message)) for dataset_id, message in committed.items()}
        return [_Told(outcome, telling.get(outcome.dataset_id)) for outcome in outcomes]

    # ---- looking up -------------------------------------------------------------------------------------------------------------------

    async def _look_up(self, request: LookupRows, size: int) -> RowsLooked:
        if not request.rows:
            return RowsLooked(error=Problem(code=MalformedMessage.code, message=f"page {request.page} has no rows"))
        sheet_id = await self._store.sheet_id(request.org, request.play, request.dataset)
        try:
            lookup = Lookup.of(request, sheet_id)
        except MalformedMessage as error:
            return RowsLooked(error=Problem(code=error.code, message=str(error)))
        looked = await self._looking.submit(lookup, rows=len(request.rows), size=size)
        committed = looked.committed()
        telling = [self._announcer.committed(committed)] if committed is not None else []
        await asyncio.gather(*telling, self._announcer.events(looked.events()))
        return looked.answer()

    async def _look_up_all(self, lookups: list[Lookup]) -> list[Looked]:
        return await self._store.transact(lambda transaction: look_up(transaction, lookups))

    # ---- reading ----------------------------------------------------------------------------------------------------------------------

    async def _read_rows(self, request: ReadRows) -> RowsRead:
        dataset_id = DatasetId(request.run_id, request.dataset)
        past = request.offset + request.limit
        pages = await self._store.read_pages(dataset_id, request.offset, past)
        wanted = places(pages, request.offset, past)
        rows: list[ReadRow] = []
        if wanted:
            keys = [place.key for place in wanted]
            cells = await self._store.read_cells(pages[0].sheet_id, keys, max_bytes=PAGE_BYTES, meta=request.meta)
            size = 0
            for place, row_cells in zip(wanted, cells, strict=False):  # cells may end earlier
                row = read_row(place, row_cells, meta=request.meta)
                size += size_of(row)
                if rows and size > PAGE_BYTES:
                    break
                rows.append(row)
        following = past if len(rows) == len(wanted) else rows[-1].index + 1
        recorded = await self._store.rows_recorded(dataset_id)
        return RowsRead(rows=rows, next_offset=following if following < recorded else None)

    async def _reopen(self, request: ReopenRows) -> RowsReopened:
        return await self._store.transact(lambda transaction: reopen(transaction, request))

    async def _read_counts(self, request: ReadCounts) -> RowsCommitted:
        dataset_id = DatasetId(request.run_id, request.dataset)
        found = await self._store.read_counts(dataset_id)
        if found is None:
            return RowsCommitted(run_id=request.run_id, dataset=request.dataset, counts=Counts(), version=0)
        return committed_message(dataset_id, *found)

    async def _query(self, request: QuerySheets) -> SheetsQueried:
        refused = refusal(request.sql)
        if refused is not None:
            return refused
        return await self._store.query(request.sql, request.parameters, limit=request.limit, offset=request.offset, timeout=self._query_timeout)
