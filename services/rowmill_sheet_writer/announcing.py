"""Announcing what was committed: to admission and, as events, to anyone; confirmed before the message that caused it is acknowledged.

Events may have slow readers, of whom the engine knows nothing: those not confirmed in time are noted in the database and sent later, so that they
hold up nothing and are not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from rowmill.runtime.bus import Bus
from rowmill_contracts.runs import RowsCommitted
from rowmill_contracts.topology import ADMISSION_COUNTS, EVENTS
from rowmill_sheet_writer.events import Event, OwedEvent
from rowmill_sheet_writer.store import Store

log = structlog.get_logger()


class Announcer:
    """``event_confirm``: seconds to wait for events' confirms. Events of a routing key that was waited for in vain are noted at once, without
    another wait, until its owed ones go through again.
    """

    def __init__(self, bus: Bus, store: Store, *, event_confirm: float, owed_batch: int) -> None:
        self._bus = bus
        self._store = store
        self._event_confirm = event_confirm
        self._owed_batch = owed_batch
        self._slow_keys: set[str] = set()

    async def committed(self, message: RowsCommitted) -> None:
        """Tell admission; returns after the confirm."""
        await self._bus.publish(message, ADMISSION_COUNTS)

    async def events(self, events: Sequence[Event]) -> None:
        """Publish events; returns once each is confirmed or noted as owed."""
        owed = [event for event in events if event.routing_key in self._slow_keys]
        publishing = {asyncio.create_task(self._publish(event)): event for event in events if event.routing_key not in self._slow_keys}
        if publishing:
            try:
                done, late = await asyncio.wait(publishing, timeout=self._event_confirm)
            finally:
                for task in publishing:
                    task.cancel()
            for task in done:
                task.result()
            late_events = [publishing[task] for task in late]
            self._slow_keys.update(event.routing_key for event in late_events)
            owed += late_events
        if owed:
            log.warning("events_owed", events=len(owed))
            await self._store.add_owed(owed)

    async def send_owed(self) -> int:
        """Try to send each event that is owed; returns how many were confirmed."""
        sent = 0
        last = ""
        waiting_keys: set[str] = set()
        while owed := await self._store.read_owed(after=last, limit=self._owed_batch):
            last = owed[-1].event_id
            outcomes = await asyncio.gather(*(self._resend(event) for event in owed))
            confirmed = [event.event_id for event, done in zip(owed, outcomes, strict=True) if done]
            waiting_keys.update(event.routing_key for event, done in zip(owed, outcomes, strict=True) if not done)
            await self._store.delete_owed(confirmed)
            sent += len(confirmed)
        self._slow_keys &= waiting_keys
        return sent

    async def _publish(self, event: Event) -> None:
        await self._bus.publish(event.message, event.routing_key, exchange=EVENTS, message_id=event.message.event_id)

    async def _resend(self, event: OwedEvent) -> bool:
        try:
            async with asyncio.timeout(self._event_confirm):
                await self._bus.publish_body(
                    event.body,
                    event.message_type,
                    event.routing_key,
                    exchange=EVENTS,
                    correlation_id=event.run_id,
                    message_id=event.event_id,
                )
        except TimeoutError:
            return False
        return True
