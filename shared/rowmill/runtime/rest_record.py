"""Where the deaths of a suspect at rest are on record: in a queue of its own at the broker, as many messages as there were such deaths.

The broker has the suspect itself, so it is there whenever that is in hand. A suspect that never came to rest has no queue.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractQueue

from rowmill.runtime.session import ANSWER_SECONDS, Session
from rowmill.runtime.transport import TRANSPORT_ERRORS, AsTransportErrors

KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""How long a queue stays that nobody uses any more: one whose suspect ended in the same moment as its process."""


def record_name(queue: str, message_id: str) -> str:
    """The queue of one suspect's record. ``queue``: whose suspect it is."""
    return f"rests.{queue}.{hashlib.sha256(message_id.encode()).hexdigest()[:32]}"


class BrokerRestRecord:
    """The record of one suspect. Its methods raise what the transport raises."""

    def __init__(self, session: Session, queue: str, message_id: str) -> None:
        self.name = record_name(queue, message_id)
        self._session = session
        self._channel: AbstractChannel | None = None
        self._queue: AbstractQueue | None = None

    async def deaths(self) -> int:
        """How many there were."""
        with AsTransportErrors():
            async with asyncio.timeout(ANSWER_SECONDS):
                return (await self._declared()).declaration_result.message_count or 0

    async def set(self) -> None:
        with AsTransportErrors():
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._declared()
                mark = aio_pika.Message(b"", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await (await self._opened()).default_exchange.publish(mark, self.name)

    async def clear(self) -> None:
        with AsTransportErrors():
            async with asyncio.timeout(ANSWER_SECONDS):
                await (await self._declared()).get(no_ack=True, fail=False, timeout=None)

    async def forget(self) -> None:
        """Delete what there may be: the suspect has ended, or goes back as one that nobody died of. Nothing where its session is over."""
        if not self._session.ended.is_set():
            with suppress(*TRANSPORT_ERRORS), AsTransportErrors():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await (await self._opened()).queue_delete(self.name)
        self._queue = None

    async def close(self) -> None:
        """Let go of the channel, which else goes with its connection."""
        channel, self._channel, self._queue = self._channel, None, None
        if channel is not None and not self._session.ended.is_set():
            with suppress(*TRANSPORT_ERRORS), AsTransportErrors():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await channel.close()

    async def _opened(self) -> AbstractChannel:
        if self._channel is None:
            self._channel = await self._session.connection.channel(publisher_confirms=True, on_return_raises=True)
        return self._channel

    async def _declared(self) -> AbstractQueue:
        if self._queue is None:
            arguments: dict[str, Any] = {"x-expires": KEPT_MS}
            self._queue = await (await self._opened()).declare_queue(self.name, durable=True, arguments=arguments)
        return self._queue


__all__ = ["BrokerRestRecord", "record_name"]
