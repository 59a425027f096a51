"""Where deaths of a suspect at work are on record: in a queue of its own at the broker, a message for each since the last death at rest.

The broker has the suspect itself, so it is there whenever that is in hand. A suspect that nobody died of, and whose author code never
ran, has no queue.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractQueue

from rowmill.runtime.session import Session
from rowmill.runtime.transport import TRANSPORT_ERRORS, answer_awaited

KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""How long a queue stays that nobody uses any more: one whose suspect ended in the same moment as its process."""


def record_name(queue: str, message_id: str) -> str:
    """The queue of one suspect's record. ``queue``: whose suspect it is."""
    return f"works.{queue}.{hashlib.sha256(message_id.encode()).hexdigest()[:32]}"


class BrokerWorkRecord:
    """The record of one suspect that is in hand. While it is at work there is one message more than there were such deaths, and none while it is at
    rest: either way what a death leaves behind is right. Methods raise what the transport raises, unless they say otherwise.
    """

    def __init__(self, session: Session, queue: str, message_id: str) -> None:
        self._name = record_name(queue, message_id)
        self._session = session
        self._deaths = 0
        self._marks = 0
        self._channel: AbstractChannel | None = None
        self._queue: AbstractQueue | None = None

    async def deaths(self) -> int:
        """How many there were. To be asked before anything is recorded, of a suspect that somebody died of."""
        async with answer_awaited():
            self._deaths = self._marks = (await self._declared()).declaration_result.message_count or 0
        return self._deaths

    async def works(self) -> None:
        async with answer_awaited():
            await self._declared()
            exchange = (await self._opened()).default_exchange
            while self._marks <= self._deaths:
                await exchange.publish(aio_pika.Message(b"", delivery_mode=aio_pika.DeliveryMode.PERSISTENT), self._name)
                self._marks += 1

    async def rests(self) -> None:
        async with answer_awaited():
            await (await self._declared()).purge()
        self._marks = 0

    async def forget(self) -> None:
        """Delete what there may be: the suspect has ended, or goes back as one that nobody died of. Does what it can, and raises nothing."""
        if not self._session.ended.is_set():
            with suppress(*TRANSPORT_ERRORS):
                async with answer_awaited():
                    await (await self._opened()).queue_delete(self._name)
        self._queue = None

    async def close(self) -> None:
        """Let go of the channel, which else goes with its connection. Raises nothing."""
        channel, self._channel, self._queue = self._channel, None, None
        if channel is not None and not self._session.ended.is_set():
            with suppress(*TRANSPORT_ERRORS):
                async with answer_awaited():
                    await channel.close()

    async def _opened(self) -> AbstractChannel:
        if self._channel is None or self._channel.is_closed:  # the broker closes it with whatever it refuses
            self._queue = None
            self._channel = await self._session.connection.channel(publisher_confirms=True, on_return_raises=True)
        return self._channel

    async def _declared(self) -> AbstractQueue:
        channel = await self._opened()
        if self._queue is None:
            arguments: dict[str, Any] = {"x-expires": KEPT_MS}
            self._queue = await channel.declare_queue(self._name, durable=True, arguments=arguments)
        return self._queue


__all__ = ["BrokerWorkRecord", "record_name"]
