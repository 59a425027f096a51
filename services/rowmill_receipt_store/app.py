"""Wires the receipt-store: the only place that builds its bus, database and merger."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rowmill.runtime import deadlines
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE
from rowmill_receipt_store.deaths import DeathRule
from rowmill_receipt_store.gateway_store import GatewayStore
from rowmill_receipt_store.handlers import Handlers
from rowmill_receipt_store.leasing import Leasing
from rowmill_receipt_store.merging import Merger
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.operator_store import OperatorStore
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_receipt_store.standing_store import StandingStore
from rowmill_receipt_store.store import SCHEMA, Store
from rowmill_receipt_store.sweeping import Sweep
from rowmill_receipt_store.window_store import WindowStore


class App:
    """Receipts, charges and budgets, shard leases. Several may run side by side: whatever they decide is fenced in the database."""

    name: ClassVar[str] = "receipt-store"

    def __init__(self, settings: ReceiptStoreSettings | None = None) -> None:
        self._settings = settings or ReceiptStoreSettings()
        self._bus = Bus(self._settings, service=self.name)
        self._database: Database | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, migrate, consume; returns once both queues are being consumed."""
        settings = self._settings
        self._database = await Database.connect(settings.database_url, schema=SCHEMA, size=settings.statements + 1, server_settings=SERVER_SETTINGS)
        self._database.report_to(self._bus.outages.noting("the database"))
        await self._database.migrate("rowmill_receipt_store")
        presences = PresenceStore(self._database, lease=settings.presence_lease, grace=settings.presence_grace)
        receipts = Receipts(
            Store(
                self._database,
                queued_lease=settings.queued_lease,
                running_lease=settings.running_lease,
                shard_lease=settings.shard_lease,
                shard_grace=settings.shard_grace,
                answer_bytes=settings.answer_bytes,
                unsent_wait=settings.unsent_wait,
            ),
            held_poll=settings.held_poll,
            output_limit=settings.output_limit,
            presences=presences,
            rule=DeathRule(settings.suspected_after, settings.deaths_alone),
        )
        merger = Merger(statements=settings.statements, max_items=settings.merge_items, max_bytes=settings.merge_bytes)
        gateways = GatewayStore(self._database, life=settings.shard_lease)
        leasing = Leasing(receipts, WindowStore(self._database), gateways, StandingStore(self._database))
        operating = Operating(OperatorStore(self._database), receipts)
        handlers = Handlers(self._bus, receipts, presences, leasing, operating, merger)
        deadline = deadlines.stored(settings)
        await self._bus.consume(RECEIPTS_SETTLE, handlers.settle, prefetch=settings.prefetch, deadline=deadline)
        await self._bus.consume(RECEIPTS_CLAIMS, handlers.claim, prefetch=settings.prefetch, deadline=deadline)
        await self._bus.start()
        sweep = Sweep(
            self._database,
            SystemClock(),
            interval=settings.sweep_interval,
            patience=settings.queued_lease,
            page=settings.sweep_page,
        )
        self._sweeping = asyncio.create_task(sweep.run(), name="sweep")

    async def stop(self) -> None:
        """Stop consuming, let what is under way be stored and answered, close."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._bus.stop()
        if self._database is not None:
            await self._database.close()

    @property
    def ready(self) -> bool:
        """Both queues are consumed, and the database answers."""
        return self._database is not None and self._database.reachable and self._bus.ready
