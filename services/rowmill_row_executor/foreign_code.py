"""Messages for code that this process does not have: passed on until an executor with that code takes them, or for too long."""

from __future__ import annotations

import structlog

from rowmill.errors import UnknownName
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill.runtime.deliveries import REPLAYED, Delivery
from rowmill_row_executor.code import PlayCode

log = structlog.get_logger()

FOREIGN_SINCE = "x-rowmill-foreign-since"
"""Header of a message that is passed on: when an executor first met it and had other code, milliseconds since the epoch (AMQP's floats are
too short for a time)."""

_DELAY = "rowmill.delay.5s"


class ForeignCode:
    """Knows whether this process has a play's code, and passes on what it has not."""

    def __init__(self, code: PlayCode, bus: Bus, clock: Clock, *, patience: float) -> None:
        self._code = code
        self._bus = bus
        self._clock = clock
        self._patience = patience

    def is_ours(self, play: str, code_digest: str) -> bool:
        """Whether this process has that play with that digest."""
        try:
            return self._code.digest(play) == code_digest
        except UnknownName:
            return False

    async def pass_on(self, delivery: Delivery, key: str) -> bool:
        """Send the message round again in 5 s, unchanged; False if that was done for long enough."""
        now = int(self._clock.now() * 1000)
        since = delivery.headers.get(FOREIGN_SINCE)
        if not isinstance(since, int):
            since = now
            log.warning(
                "waits_for_other_code",
                message_type=delivery.message.message_type,
                run_id=getattr(delivery.message, "run_id", None),
                play=getattr(delivery.message, "play", None),
                seconds=self._patience,
                hint="the run began with other code than this executor has: run an executor with that code, or stop the run",
            )
        if now - since >= self._patience * 1000:
            return False
        await self._bus.publish_body(
            delivery.body,
            delivery.message.message_type,
            key,
            exchange=_DELAY,
            correlation_id=delivery.correlation_id or None,
            reply_to=delivery.reply_to,
            headers={FOREIGN_SINCE: since} | {name: value for name, value in delivery.headers.items() if name == REPLAYED},
        )
        return True
