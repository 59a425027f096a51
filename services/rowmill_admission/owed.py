"""Messages that a commit calls for: stored with it, sent after it, deleted once confirmed.

What is stored here survives any crash between a commit and its messages; the repair look sends what nobody did. A run's messages of one lane
(work, events) go in the order in which they were stored; each may go more than once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from rowmill.errors import MalformedMessage, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Database
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.store import owed as owed_store
from rowmill_contracts.envelope import Message, decode
from rowmill_contracts.receipts import RunHalted
from rowmill_contracts.topology import EVENTS, EXCHANGE

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Owed:
    """A message of a run. ``asked``: done only when it was answered (by `RunHalted`), not when the broker has it."""

    run_id: str
    message: Message
    key: str
    exchange: str = EXCHANGE
    asked: bool = False

    @property
    def lane(self) -> str:
        return "events" if self.exchange == EVENTS else "work"


class Postman:
    """Sends what is owed. One sender per run and process, so that a run's messages keep their order."""

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database = database
        self._bus = bus
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._stopped = False

    def wake(self, run_ids: Iterable[str]) -> None:
        """Send what these runs owe; returns at once."""
        for run_id in () if self._stopped else run_ids:
            if run_id in self._sending:
                self._again.add(run_id)
            else:
                self._sending[run_id] = asyncio.create_task(self._send_all(run_id), name=f"owed {run_id}")

    async def sent(self, run_id: str) -> bool:
        """Send what this run owes, and wait for it; False where something had to be left to the repair look."""
        self.wake([run_id])
        while (task := self._sending.get(run_id)) is not None:
            await asyncio.wait([task])
        return not await owed_store.of_run(self._database, run_id)

    async def idle(self) -> None:
        """Wait until nothing is being sent."""
        while self._sending:
            await asyncio.wait(set(self._sending.values()))

    async def stop(self) -> None:
        """Leave what is not confirmed to the next start."""
        self._stopped = True
        await cancel_all(self._sending.values())

    async def _send_all(self, run_id: str) -> None:
        try:
            while True:
                self._again.discard(run_id)
                entries = await owed_store.of_run(self._database, run_id)
                lanes: dict[str, list[owed_store.Entry]] = {}
                for entry in entries:
                    lanes.setdefault(entry.lane, []).append(entry)
                whole = all(await asyncio.gather(*(self._send_lane(lane) for lane in lanes.values())))
                if not whole or (not entries and run_id not in self._again):
                    return
        except UnavailableError as error:
            log.warning("owed_left_to_repair", run_id=run_id, error=str(error))
        finally:
            self._sending.pop(run_id, None)
            if run_id in self._again:
                self._again.discard(run_id)
                self.wake([run_id])

    async def _send_lane(self, entries: list[owed_store.Entry]) -> bool:
        """Send in order; False where one got no answer, and what comes after it must wait."""
        sent: list[int] = []
        whole = True
        for entry in entries:
            if entry.asked:
                try:
                    await self._bus.ask(decode(entry.message_type, entry.body), entry.key, RunHalted)
                except (UnavailableError, MalformedMessage) as error:
                    log.warning("owed_left_to_repair", message_type=entry.message_type, error=str(error))
                    whole = False
                    break
            else:
                await self._bus.publish_body(entry.body, entry.message_type, entry.key, exchange=entry.exchange, correlation_id=entry.run_id)
            sent.append(entry.owed_id)
        await owed_store.delete(self._database, sent)
        return whole
