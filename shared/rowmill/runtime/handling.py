"""What becomes of each delivered message: decoded, handled, tried again, dead-lettered, acknowledged. Once, for every queue and every client."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.errors import MalformedMessage, RowmillError, UnavailableError
from rowmill.runtime import metrics
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.deliveries import MADE_ID, REPLAYED, Delivery, Rejected, Undecoded, death_headers, subject_headers, traceparent
from rowmill.runtime.ends import ends_the_task
from rowmill.runtime.gates import Gate
from rowmill.runtime.in_hand import Held, MessagesInHand
from rowmill.runtime.limits import end_process
from rowmill.runtime.rest import Rest
from rowmill.runtime.suspicion import (
    CRASHES,
    SUSPECTED_AFTER,
    Bury,
    Halve,
    Outlived,
    earlier_crashes,
    failed_deliveries,
    judge,
    untouched_headers,
)
from rowmill.runtime.transport import TRANSPORT_ERRORS, AsTransportErrors
from rowmill.runtime.work_record import BrokerWorkRecord
from rowmill.said import said_by
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import Message, UndecodableMessage, encode
from rowmill_contracts.halving import halves
from rowmill_contracts.public import decode_untyped
from rowmill_contracts.topology import WORK_QUEUES, dead, suspect

if TYPE_CHECKING:
    from rowmill.runtime.bus import Bus
    from rowmill.runtime.session import Session

log = structlog.get_logger()

Handler = Callable[[Delivery], Awaitable[None]]

Undecodable = Literal["bury", "hand over"]
"""What to do with a message that cannot be decoded: dead-letter it, or hand it to the handler as `Undecoded`."""

_WORK: Final = frozenset(queue.name for queue in WORK_QUEUES)
_EXCHANGE: Final = "x-rowmill-exchange"
_KEY: Final = "x-rowmill-key"

HANDLER_ATTEMPTS: Final = 3
"""Tries of a handler that raises something unexpected, before the message is dead-lettered."""


class Handling:
    """The policy of one bus. A message is acknowledged only after its handler returned, or after its dead letter was confirmed."""

    def __init__(self, bus: Bus, clock: Clock, in_hand: MessagesInHand) -> None:
        self._bus = bus
        self._clock = clock
        self._in_hand = in_hand
        self._gates: defaultdict[str, Gate] = defaultdict(Gate)
        self._outlived = Outlived()

    def share_gate(self, queue: str, name: str) -> None:
        """From now on the handlers of this queue go in and out by the gate of that name, with those of other queues."""
        self._gates[queue] = self.gate(name)

    def gate(self, queue: str) -> Gate:
        """Where the handlers of this queue go in and out."""
        return self._gates[queue]

    async def handle(self, session: Session, queue: str, handler: Handler, incoming: AbstractIncomingMessage, undecodable: Undecodable) -> None:
        """Handle one message to its end. ``session``: the one that it came by."""
        hand = self._in_hand.of(session, queue)
        in_hand = metrics.IN_HAND.labels(self._bus.service, queue)
        in_hand.inc()
        held = hand.take(incoming, self._clock.monotonic())
        try:
            if not await self._moved(queue, incoming):
                gate = self.gate(queue)
                await gate.enter()
                try:
                    if await self._handled(queue, handler, incoming, undecodable, held):
                        metrics.HANDLED.labels(self._bus.service, queue).inc()
                finally:
                    gate.leave()
            await self._acknowledge(session, queue, incoming)
        finally:
            hand.leave(held)
            in_hand.dec()

    # ---- suspects ---------------------------------------------------------------------------------------------------------------------

    def _crashes(self, queue: str, incoming: AbstractIncomingMessage) -> int:
        """How many consumers of this message may have crashed in that queue. To be asked once a delivery."""
        message_id = incoming.message_id or ""
        crashes = self._outlived.crashes(queue, message_id, failed_deliveries(incoming.headers or {}))
        self._outlived.delivered(queue, message_id)
        return crashes

    async def _moved(self, queue: str, incoming: AbstractIncomingMessage) -> bool:
        """Move a message that may have crashed its consumers to where it is handled alone; whether it was moved, confirmed."""
        if queue not in _WORK:
            return False
        crashes = self._crashes(queue, incoming)
        if crashes < SUSPECTED_AFTER:
            return False
        log.warning("message_suspect", queue=queue, message_type=incoming.type, message_id=incoming.message_id, crashes=crashes)
        metrics.SUSPECT.labels(self._bus.service, queue).inc()
        origin = {_EXCHANGE: incoming.exchange or "", _KEY: incoming.routing_key or ""}
        await self._to_suspects(queue, incoming, headers={CRASHES: earlier_crashes(incoming.headers or {}) + crashes, **origin})
        self._bus.look_for_suspects()
        return True

    async def _to_suspects(
        self, queue: str, incoming: AbstractIncomingMessage, *, headers: dict[str, Any], body: bytes | None = None, message_id: str | None = None
    ) -> None:
        await self._bus.publish_body(
            incoming.body if body is None else body,
            incoming.type,
            suspect(queue),
            correlation_id=incoming.correlation_id,
            reply_to=incoming.reply_to,
            message_id=message_id or id_of(incoming),
            headers=untouched_headers(incoming.headers or {}) | made_id(incoming) | headers,
        )

    async def handle_suspect(
        self,
        session: Session,
        queue: str,
        handler: Handler,
        incoming: AbstractIncomingMessage,
        undecodable: Undecodable,
        *,
        watched: bool = False,
    ) -> None:
        """Handle, halve or bury a message of the queue's suspects. ``watched``: see `Bus.consume`."""
        crashes = self._crashes(suspect(queue), incoming)
        message = self._decoded(incoming)
        record = BrokerWorkRecord(session, queue, id_of(incoming)) if watched and halves(message) is None else None
        rest = None if record is None else Rest(record)
        hand = self._in_hand.of(session, suspect(queue))
        held = hand.take(incoming, self._clock.monotonic())  # from here on whatever fails leaves it
        try:
            at_rest = await self._at_rest(session, record, crashes) if record is not None and crashes else 0
            log.warning("suspect_in_hand", queue=queue, message_type=incoming.type, message_id=incoming.message_id, crashes=crashes, at_rest=at_rest)
            earlier = earlier_crashes(incoming.headers or {})
            verdict = judge(message, crashes=crashes, earlier=earlier, at_rest=at_rest)
            if isinstance(verdict, Halve):
                await self._halve(queue, incoming, verdict, crashes=earlier + crashes)
            elif isinstance(verdict, Bury):
                subject, now = subject_headers(message), self._clock.now()
                await self._bury(queue, incoming, verdict.error, attempts=earlier + crashes, first_failure=now, subject=subject)
            elif await self._handled(queue, handler, incoming, undecodable, held, rest):
                metrics.HANDLED.labels(self._bus.service, queue).inc()
            if rest is not None:
                await rest.end()
            await self._acknowledge(session, suspect(queue), incoming)
            if record is not None:
                await record.forget()
        finally:
            hand.leave(held)
            if rest is not None:
                await rest.end()
            if record is not None:
                await record.close()

    @staticmethod
    async def _at_rest(session: Session, record: BrokerWorkRecord, crashes: int) -> int:
        """How many of a suspect's crashes found it at rest. Where its record cannot be read, all, for all that is known: that has a bound."""
        try:
            return max(0, crashes - await record.deaths())
        except (*TRANSPORT_ERRORS, RowmillError) as error:
            if session.ended.is_set():
                raise  # it comes again by the next one
            log.warning("work_record_unread", crashes=crashes, error=repr(error))
            return crashes

    async def _halve(self, queue: str, incoming: AbstractIncomingMessage, verdict: Halve, *, crashes: int) -> None:
        for number, part in enumerate(verdict.parts):
            await self._to_suspects(queue, incoming, headers={CRASHES: crashes}, body=encode(part), message_id=f"{id_of(incoming)}.{number}")

    async def hand_back(self, session: Session, queue: str, incoming: AbstractIncomingMessage) -> None:
        """Put a suspect back whose handling was broken off by us, so that it does not count as a crash: as one that nobody died of yet."""
        record = BrokerWorkRecord(session, queue, id_of(incoming))
        await record.forget()
        await record.close()
        await self._to_suspects(queue, incoming, headers={})
        await self._acknowledge(session, suspect(queue), incoming)

    # ---- any message ------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _decoded(incoming: AbstractIncomingMessage) -> Message:
        try:
            if incoming.type:
                return decode(incoming.type, incoming.body)
            return decode_untyped(str((incoming.headers or {}).get(_KEY) or incoming.routing_key or ""), incoming.body)
        except UndecodableMessage as error:
            return Undecoded(wire_type=incoming.type or "", reason=str(error))

    async def _handled(
        self, queue: str, handler: Handler, incoming: AbstractIncomingMessage, undecodable: Undecodable, held: Held, rest: Rest | None = None
    ) -> bool:
        """Whether the handler returned; if not, the message was dead-lettered."""
        headers = dict(incoming.headers or {})
        trace = headers.get("traceparent")
        traceparent.set(trace if isinstance(trace, str) else None)
        first_failure = self._clock.now()
        message = self._decoded(incoming)
        if isinstance(message, Undecoded) and undecodable == "bury":
            await self._bury(queue, incoming, MalformedMessage(message.reason), attempts=1, first_failure=first_failure, subject={})
            return False
        delivery = Delivery(
            message=message,
            body=incoming.body,
            queue=queue,
            message_id="" if MADE_ID in headers else incoming.message_id or "",
            correlation_id=incoming.correlation_id or "",
            reply_to=incoming.reply_to,
            deliveries=failed_deliveries(headers) + 1,
            headers=headers,
            rest=rest,
        )
        structlog.contextvars.bind_contextvars(**{k: v for k in ("run_id", "dataset") if (v := getattr(message, k, None))})
        failures = outages = 0
        while True:
            began = self._clock.monotonic()
            try:
                await handler(delivery)
            except UnavailableError as error:
                outages += 1
                log.warning("handler_waits", queue=queue, error=str(error), outages=outages)
                pause, now = backoff(outages, first=0.2, limit=5.0), self._clock.monotonic()
                held.waits(now - began, pause, now)
                await self._clock.sleep(pause)
            except (Rejected, MalformedMessage) as error:
                await self._bury(queue, incoming, error, attempts=failures + 1, first_failure=first_failure, subject=subject_headers(message))
                return False
            except MemoryError:
                end_process("memory_limit_reached", queue=queue)
            except BaseException as error:
                if ends_the_task(error):
                    raise
                failures += 1
                metrics.FAILED.labels(self._bus.service, queue).inc()
                log.exception("handler_failed", queue=queue, failures=failures)
                if failures >= HANDLER_ATTEMPTS:
                    await self._bury(queue, incoming, error, attempts=failures, first_failure=first_failure, subject=subject_headers(message))
                    return False
                await self._clock.sleep(backoff(failures, first=0.1, limit=2.0))
            else:
                return True

    async def _bury(
        self, queue: str, incoming: AbstractIncomingMessage, error: BaseException, *, attempts: int, first_failure: float, subject: dict[str, Any]
    ) -> None:
        """Publish to the dead-letter queue, untouched, with the reason; returns after the confirm, so that only then it is acknowledged."""
        log.error("message_dead", queue=queue, error=said_by(error), message_type=incoming.type)
        came_by = (incoming.headers or {}) if incoming.routing_key == suspect(queue) else {}
        kept = {name: value for name, value in (incoming.headers or {}).items() if name == REPLAYED}
        headers = death_headers(
            error,
            service=self._bus.service,
            queue=queue,
            exchange=str(came_by.get(_EXCHANGE, incoming.exchange or "")),
            key=str(came_by.get(_KEY, incoming.routing_key or "")),
            attempts=attempts,
            first_failure=first_failure,
            last_failure=self._clock.now(),
        )
        await self._bus.publish_body(
            incoming.body,
            incoming.type,
            dead(queue),
            correlation_id=incoming.correlation_id,
            reply_to=incoming.reply_to,
            message_id=id_of(incoming),
            headers={**headers, **subject, **kept, **made_id(incoming)},
        )
        metrics.DEAD.labels(self._bus.service, queue).inc()

    async def _acknowledge(self, session: Session, queue: str, incoming: AbstractIncomingMessage) -> None:
        if session.ended.is_set():
            return  # the broker delivers it again; its effect is stored
        try:
            with AsTransportErrors():
                await incoming.ack()
        except (*TRANSPORT_ERRORS, RowmillError) as error:
            log.info("acknowledge_lost", error=repr(error))
        else:
            self._outlived.acknowledged(queue, incoming.message_id or "")


def id_of(incoming: AbstractIncomingMessage) -> str:
    """A message's id; of one that has none, the same for each copy of it."""
    return incoming.message_id or hashlib.sha256(incoming.body).hexdigest()[:32]


def made_id(incoming: AbstractIncomingMessage) -> dict[str, Any]:
    """The header that says that a message's id was made from its body."""
    return {} if incoming.message_id and MADE_ID not in (incoming.headers or {}) else {MADE_ID: 1}
