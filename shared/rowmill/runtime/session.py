"""One connection's life: topology declared, channels opened, consumers attached, until anything of it breaks.

A session is never repaired: when its connection or one of its channels closes, or the broker cancels a consumer, the whole session ends and the
bus builds a new one. That leaves one path to test, and no half-restored state (a lost qos, a consumer that does not consume).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aio_pika
import structlog
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractExchange,
    AbstractIncomingMessage,
)

from rowmill_contracts.topology import topology

log = structlog.get_logger()

LISTENER_LENGTH = 50_000
"""Messages that a listener's own queue keeps; a slow listener loses the oldest and stops nobody."""

OnMessage = Callable[["Session", AbstractIncomingMessage], Awaitable[None]]


@dataclass(frozen=True)
class Subscription:
    """A queue to consume, at most ``prefetch`` messages unacknowledged.

    ``listen``: (exchange, routing key) pairs to bind an exclusive queue of this process to, bounded by dropping its oldest messages.
    """

    queue: str
    on_message: OnMessage
    prefetch: int
    listen: tuple[tuple[str, str], ...] = ()


class Session:
    """Open with `Session.open`; wait for its end with `ended`."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.ended: asyncio.Event = asyncio.Event()
        self.reason: BaseException | str | None = None
        self._publishing: AbstractChannel | None = None
        self._replying: AbstractChannel | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._consuming: dict[str, tuple[AbstractChannel, str]] = {}
        connection.close_callbacks.add(self._connection_closed)

    @classmethod
    async def open(cls, url: str, *, name: str, heartbeat: int, delay_scale: float, timeout: float) -> Session:
        """Connect, declare the topology, open the publishing channels.

        Raises what aio-pika raises; the caller tries again.
        """
        separator = "&" if "?" in url else "?"
        connection = await aio_pika.connect(f"{url}{separator}heartbeat={heartbeat}", client_properties={"connection_name": name}, timeout=timeout)
        session = cls(connection)
        try:
            async with asyncio.timeout(timeout):
                session._publishing = await session._channel(publisher_confirms=True)
                session._replying = await session._channel(publisher_confirms=False)
                await session.declare(delay_scale)
        except BaseException:
            await session.close()
            raise
        return session

    async def _channel(self, *, publisher_confirms: bool) -> AbstractChannel:
        channel = await self.connection.channel(publisher_confirms=publisher_confirms, on_return_raises=publisher_confirms)
        channel.close_callbacks.add(self._channel_closed)
        return channel

    async def declare(self, delay_scale: float) -> None:
        """Declare everything of the topology; what stands already is left as it is."""
        exchanges, queues = topology(delay_scale)
        channel = await self.connection.channel(publisher_confirms=False)
        try:
            for exchange in exchanges:
                await channel.declare_exchange(exchange.name, exchange.kind, durable=True)
            declared = await asyncio.gather(*(channel.declare_queue(queue.name, durable=True, arguments=dict(queue.arguments)) for queue in queues))
            await asyncio.gather(
                *(
                    declared_queue.bind(exchange_name, key)
                    for queue, declared_queue in zip(queues, declared, strict=True)
                    for exchange_name, key in queue.bindings
                )
            )
        finally:
            await channel.close()
        for exchange in exchanges:
            self._exchanges[exchange.name] = await self._publisher.get_exchange(exchange.name, ensure=False)

    @property
    def _publisher(self) -> AbstractChannel:
        if self._publishing is None:
            raise ConnectionError("session is not open")
        return self._publishing

    async def publish(self, exchange: str, key: str, message: aio_pika.Message, *, mandatory: bool, timeout: float) -> None:
        """Publish and await the broker's confirm. Any error means that the outcome is unknown."""
        await self._exchanges[exchange].publish(message, key, mandatory=mandatory, timeout=timeout)

    async def reply(self, queue: str, message: aio_pika.Message) -> None:
        """Publish to a reply queue, unconfirmed: who misses a reply asks again."""
        if self._replying is None:
            raise ConnectionError("session is not open")
        await self._replying.default_exchange.publish(message, queue, mandatory=False)

    async def consume(self, subscription: Subscription) -> None:
        """Attach a consumer on a channel of its own."""
        channel = await self._channel(publisher_confirms=False)
        await channel.set_qos(prefetch_count=subscription.prefetch)
        if not subscription.listen:
            queue = await channel.get_queue(subscription.queue, ensure=False)
        else:
            bounded: dict[str, Any] = {"x-max-length": LISTENER_LENGTH, "x-overflow": "drop-head"}
            queue = await channel.declare_queue(subscription.queue, exclusive=True, auto_delete=True, durable=False, arguments=bounded)
            for exchange, key in subscription.listen:
                await queue.bind(exchange, key)

        async def received(message: AbstractIncomingMessage) -> None:
            await subscription.on_message(self, message)

        tag = await queue.consume(received)
        self._consuming[subscription.queue] = (channel, tag)

    async def consume_replies(self, queue_name: str, expires_ms: int, on_reply: OnMessage) -> None:
        """Declare this process's reply queue (kept over reconnects, gone when unused for ``expires_ms``) and consume it."""
        channel = await self._channel(publisher_confirms=False)
        await channel.set_qos(prefetch_count=0)
        queue = await channel.declare_queue(queue_name, durable=False, arguments={"x-expires": expires_ms})

        async def received(message: AbstractIncomingMessage) -> None:
            await on_reply(self, message)

        await queue.consume(received, no_ack=True)

    async def cancel(self, queue: str) -> None:
        """Stop the deliveries of one queue; what was delivered stays ours to acknowledge."""
        attached = self._consuming.pop(queue, None)
        if attached is None:
            return
        channel, tag = attached
        underlay = await channel.get_underlay_channel()
        await underlay.basic_cancel(tag)

    async def depths(self, queues: list[str]) -> dict[str, tuple[int, int]]:
        """(messages ready, consumers) of each queue, asked on a channel of its own.

        A robust channel would answer from its cache; this one asks the broker.
        """
        found: dict[str, tuple[int, int]] = {}
        channel = await self.connection.channel(publisher_confirms=False)
        try:
            for name in queues:
                queue = await channel.declare_queue(name, passive=True)
                result = queue.declaration_result
                found[name] = (result.message_count or 0, result.consumer_count or 0)
        finally:
            await channel.close()
        return found

    async def close(self) -> None:
        self._end("closed by us")
        await self.connection.close()

    def _end(self, reason: BaseException | str | None) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    def _connection_closed(self, _connection: object, error: BaseException | None) -> None:
        self._end(error)

    def _channel_closed(self, _channel: object, error: BaseException | None) -> None:
        self._end(error)
