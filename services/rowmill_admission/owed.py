"""Messages that a commit calls for: stored with it, sent after it, deleted once confirmed.

What is stored here survives any crash between a commit and its messages; the repair look sends what nobody did. A run's messages of one lane
(work, events) go in the order in which they were stored; each may go more than once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from rowmill.errors import AskDied, MalformedMessage, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Database
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.store import owed as owed_store
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.events import RunEvent
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


Lane = tuple[str, str]
"""A run, and which of its messages: ``work`` or ``events``."""

LANES: Final = ("work", "events")


class Postman:
    """Sends what is owed. One sender per lane of a run and process, so that a lane's messages keep their order, and events that a slow reader
    refuses hold up no work. ``booked``: the event with what its run was charged; raises `UnavailableError` where that is not to be learnt now.
    """

    def __init__(self, database: Database, bus: Bus, booked: Callable[[RunEvent], Awaitable[RunEvent]]) -> None:
        self._database = database
        self._bus = bus
        self._booked = booked
        self._sending: dict[Lane, asyncio.Task[None]] = {}
        self._again: set[Lane] = set()
        self._stopped = False

    def wake(self, run_ids: Iterable[str]) -> None:
        """Send what these runs owe; returns at once."""
        for run_id in () if self._stopped else run_ids:
            for lane in LANES:
                self._wake((run_id, lane))

    def _wake(self, lane: Lane) -> None:
        if lane in self._sending:
            self._again.add(lane)
        else:
            self._sending[lane] = asyncio.create_task(self._send_all(lane), name=f"owed {lane}")

    async def sent(self, run_id: str, *, within: float, otherwise: str) -> None:
        """Send what this run owes, and wait for its work, not for its events.

        Raises:
            UnavailableError: something is not sent ``within`` so many seconds, or had to be left to the repair look; ``otherwise`` says so.

        """
        self.wake([run_id])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while (task := self._sending.get((run_id, "work"))) is not None:
                    await asyncio.wait([task])
                if all(entry.lane != "work" for entry in await owed_store.of_run(self._database, run_id)):
                    return
        raise UnavailableError(otherwise)

    async def idle(self) -> None:
        """Wait until nothing is being sent."""
        while self._sending:
            await asyncio.wait(set(self._sending.values()))

    async def stop(self) -> None:
        """Leave what is not confirmed to the next start."""
        self._stopped = True
        await cancel_all(self._sending.values())

    async def _send_all(self, lane: Lane) -> None:
        run_id, kind = lane
        try:
            while True:
                self._again.discard(lane)
                entries = [entry for entry in await owed_store.of_run(self._database, run_id) if entry.lane == kind]
                whole = await self._send_lane(entries)
                if not whole or (not entries and lane not in self._again):
                    return
        except UnavailableError as error:
            log.warning("owed_left_to_repair", run_id=run_id, error=str(error))
        finally:
            self._sending.pop(lane, None)
            if lane in self._again and not self._stopped:
                self._again.discard(lane)
                self._wake(lane)

    async def _send_lane(self, entries: list[owed_store.Entry]) -> bool:
        """Send in order; False where one got no answer, and what comes after it must wait."""
        sent: list[int] = []
        whole = True
        for entry in entries:
            try:
                await self._send(entry)
            except (UnavailableError, MalformedMessage, AskDied) as error:  # what died is given up where it is buried
                log.warning("owed_left_to_repair", message_type=entry.message_type, error=str(error))
                whole = False
                break
            sent.append(entry.owed_id)
        await owed_store.delete(self._database, sent)
        return whole

    async def _send(self, entry: owed_store.Entry) -> None:
        if entry.asked:
            await self._bus.ask(decode(entry.message_type, entry.body), entry.key, RunHalted)
            return
        body = entry.body
        if entry.message_type == RunEvent.message_type:
            event = decode(entry.message_type, entry.body)
            if isinstance(event, RunEvent):
                body = encode(await self._booked(event))
        await self._bus.publish_body(body, entry.message_type, entry.key, exchange=entry.exchange, correlation_id=entry.run_id)
