"""Publishing until the broker confirms: over new sessions, deleted queues and blocked connections, under the same message id.

Owns when a message is published again. Which session is alive is the bus's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import aio_pika
import structlog
from aiormq.exceptions import PublishError

from rowmill.runtime import metrics
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.session import Session
from rowmill.runtime.transport import TRANSPORT_ERRORS
from rowmill_contracts.topology import CONTROL, EVENTS

log = structlog.get_logger()

CONFIRM_TIMEOUT: Final = 30.0
"""Seconds after which a missing confirm counts as unknown and the message is published again."""

DELETION_SECONDS: Final = 1.0
"""How long to wait before a queue that was deleted is declared again.

RabbitMQ 3.10 tells the queue's consumers a moment later. A queue that stands again by then takes them over as its own, and what it
delivers to them is dropped as a repetition of what the former queue delivered: held by a consumer that never saw it.
"""

NON_MANDATORY: Final = frozenset({EVENTS, CONTROL})
"""Exchanges on which a message that reaches nobody is no error."""


class Publisher:
    """``live``: waits for a session. ``time_scale``: as queues are declared with."""

    def __init__(self, live: Callable[[], Awaitable[Session]], time_scale: float, clock: Clock, service: str) -> None:
        self._live = live
        self._time_scale = time_scale
        self._clock = clock
        self._confirmed = metrics.CONFIRMED.labels(service)
        self._unconfirmed = metrics.UNCONFIRMED.labels(service)

    async def publish(self, envelope: aio_pika.Message, exchange: str, key: str) -> None:
        """Return after the confirm. An unknown outcome is published again: whoever takes the message knows it by its id."""
        failures = 0
        while True:
            session = await self._live()
            try:
                await session.publish(exchange, key, envelope, mandatory=exchange not in NON_MANDATORY, timeout=CONFIRM_TIMEOUT)
            except PublishError:
                failures += 1
                log.warning("publish_unroutable", exchange=exchange, key=key, failures=failures)
                await self._clock.sleep(DELETION_SECONDS)
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await session.declare(self._time_scale)
            except TRANSPORT_ERRORS as error:
                failures += 1
                log.info("publish_unconfirmed", exchange=exchange, key=key, error=repr(error), failures=failures)
                await self._while_blocked(session)
            else:
                self._confirmed.inc()
                return
            self._unconfirmed.inc()
            await self._clock.sleep(backoff(failures, first=0.05, limit=2.0))

    async def _while_blocked(self, session: Session) -> None:
        """Wait until the broker takes messages again: what we sent meanwhile waits in the socket, and more copies of it would too."""
        while not session.ended.is_set() and await session.connection.is_blocked():
            await self._clock.sleep(0.5)
