"""Wires the sheet writer: the only place that builds its bus, pool and handlers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

import structlog

from rowmill.runtime import deadlines
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock, SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.topology import SHEETS_ASKS, SHEETS_SETTLE
from rowmill_sheet_writer.announcing import Announcer
from rowmill_sheet_writer.handlers import Handlers
from rowmill_sheet_writer.settings import SheetWriterSettings
from rowmill_sheet_writer.store import SERVER_SETTINGS, Store

log = structlog.get_logger()

SCHEMA = "sheets"


class App:
    """The sheet writer. Several may run at once, in any number of processes."""

    name: ClassVar[str] = "sheet-writer"

    def __init__(self, settings: SheetWriterSettings | None = None) -> None:
        self._settings = settings or SheetWriterSettings()
        self._clock: Clock = SystemClock()
        self._bus = Bus(self._settings, service=self.name, clock=self._clock)
        self._database: Database | None = None
        self._looking_after_owed: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> None:
        """Connect, migrate, consume; returns once messages are being consumed."""
        settings = self._settings
        self._database = database = await Database.connect(
            settings.database_url, schema=SCHEMA, size=settings.sheets_connections, server_settings=SERVER_SETTINGS, clock=self._clock
        )
        database.report_to(self._bus.outages.noting("the database"))
        await database.migrate("rowmill_sheet_writer")
        store = Store(database)
        announcer = Announcer(self._bus, store, event_confirm=settings.event_confirm, owed_batch=settings.owed_batch)
        handlers = Handlers(self._bus, store, announcer, settings)
        await self._bus.start()
        await self._bus.consume(SHEETS_SETTLE, handlers.on_settle, prefetch=settings.settle_prefetch, deadline=deadlines.stored(settings))
        queries = deadlines.queries(settings, query_timeout=settings.query_timeout)
        await self._bus.consume(SHEETS_ASKS, handlers.on_ask, prefetch=settings.sheets_ask_prefetch, deadline=queries)
        self._looking_after_owed = asyncio.create_task(self._look_after_owed(announcer), name="events owed")
        self._started = True

    async def stop(self) -> None:
        """Stop consuming, let work under way finish to the drain deadline, close."""
        self._started = False
        if self._looking_after_owed is not None:
            self._looking_after_owed.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking_after_owed
        await self._bus.stop()
        if self._database is not None:
            await self._database.close()

    @property
    def ready(self) -> bool:
        return self._started and self._bus.ready and self._database is not None and self._database.reachable

    async def _look_after_owed(self, announcer: Announcer) -> None:
        """The 30 s look: send events that nobody confirmed."""
        while True:
            try:
                sent = await announcer.send_owed()
            except Exception:  # whatever it was, the next look tries again
                log.exception("owed_look_failed")
            else:
                if sent:
                    log.info("owed_events_sent", events=sent)
            await self._clock.sleep(self._settings.repair_interval)
