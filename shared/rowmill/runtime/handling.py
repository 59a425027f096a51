"""What becomes of each delivered message: decoded, handled, tried again, dead-lettered, acknowledged. Once, for every queue and every client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.errors import MalformedMessage, RowmillError, UnavailableError
from rowmill.runtime import metrics
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.deliveries import Delivery, Rejected, Undecoded, death_headers, subject_headers, traceparent
from rowmill.runtime.transport import TRANSPORT_ERRORS, AsTransportErrors
from rowmill_contracts.envelope import Message, UndecodableMessage, decode
from rowmill_contracts.public import decode_untyped
from rowmill_contracts.topology import dead

if TYPE_CHECKING:
    from rowmill.runtime.bus import Bus
    from rowmill.runtime.session import Session

log = structlog.get_logger()

Handler = Callable[[Delivery], Awaitable[None]]

HANDLER_ATTEMPTS: Final = 3
"""Tries of a handler that raises something unexpected, before the message is dead-lettered."""


class Handling:
    """The policy of one bus. A message is acknowledged only after its handler returned, or after its dead letter was confirmed."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def handle(
        self, session: Session, queue: str, handler: Handler, incoming: AbstractIncomingMessage, undecodable: Literal["bury", "hand over"]
    ) -> None:
        """Handle one message to its end. ``session``: the one that it came by."""
        in_hand = metrics.IN_HAND.labels(self._bus.service, queue)
        in_hand.inc()
        try:
            if await self._handled(queue, handler, incoming, undecodable):
                metrics.HANDLED.labels(self._bus.service, queue).inc()
            await self._acknowledge(session, incoming)
        finally:
            in_hand.dec()

    async def _handled(self, queue: str, handler: Handler, incoming: AbstractIncomingMessage, undecodable: Literal["bury", "hand over"]) -> bool:
        """Whether the handler returned; if not, the message was dead-lettered."""
        headers = dict(incoming.headers or {})
        trace = headers.get("traceparent")
        traceparent.set(trace if isinstance(trace, str) else None)
        first_failure = self._clock.now()
        message: Message
        try:
            message = decode(incoming.type, incoming.body) if incoming.type else decode_untyped(incoming.routing_key or "", incoming.body)
        except UndecodableMessage as error:
            message = Undecoded(wire_type=incoming.type or "", reason=str(error))
        if isinstance(message, Undecoded) and undecodable == "bury":
            await self._bury(queue, incoming, MalformedMessage(message.reason), attempts=1, first_failure=first_failure, subject={})
            return False
        count = headers.get("x-delivery-count", 0)
        delivery = Delivery(
            message=message,
            body=incoming.body,
            queue=queue,
            message_id=incoming.message_id or "",
            correlation_id=incoming.correlation_id or "",
            reply_to=incoming.reply_to,
            deliveries=(count if isinstance(count, int) else 0) + 1,
            headers=headers,
        )
        structlog.contextvars.bind_contextvars(**{k: v for k in ("run_id", "dataset") if (v := getattr(message, k, None))})
        failures = outages = 0
        while True:
            try:
                await handler(delivery)
            except UnavailableError as error:
                outages += 1
                log.warning("handler_waits", queue=queue, error=str(error), outages=outages)
                await self._clock.sleep(backoff(outages, first=0.2, limit=5.0))
            except (Rejected, MalformedMessage) as error:
                await self._bury(queue, incoming, error, attempts=failures + 1, first_failure=first_failure, subject=subject_headers(message))
                return False
            except Exception as error:
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
        self, queue: str, incoming: AbstractIncomingMessage, error: Exception, *, attempts: int, first_failure: float, subject: dict[str, Any]
    ) -> None:
        """Publish to the dead-letter queue, untouched, with the reason; returns after the confirm, so that only then it is acknowledged."""
        log.error("message_dead", queue=queue, error=str(error), message_type=incoming.type)
        headers = death_headers(
            error,
            service=self._bus.service,
            queue=queue,
            exchange=incoming.exchange or "",
            key=incoming.routing_key or "",
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
            message_id=incoming.message_id,
            headers={**headers, **subject},
        )
        metrics.DEAD.labels(self._bus.service, queue).inc()

    async def _acknowledge(self, session: Session, incoming: AbstractIncomingMessage) -> None:
        if session.ended.is_set():
            return  # the broker delivers it again; its effect is stored
        try:
            with AsTransportErrors():
                await incoming.ack()
        except (*TRANSPORT_ERRORS, RowmillError) as error:
            log.info("acknowledge_lost", error=repr(error))
