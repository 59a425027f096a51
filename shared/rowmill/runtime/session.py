"""One connection's life: topology declared, channels opened, consumers attached, until anything of it breaks.

A session is never repaired: when its connection or one of its channels closes, the broker cancels a consumer, or a consumer gets nothing, the whole
session ends and the bus builds a new one. That leaves one path to test, and no half-restored state (a lost qos, a consumer that does not consume).
Every wait for the broker is bounded: a queue without a leader never answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import aio_pika
import structlog
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage
from aiormq import spec

from rowmill.runtime.clock import Clock, new_id
from rowmill.runtime.declaring import declare
from rowmill.runtime.transport import ANSWER_SECONDS, AsTransportErrors, BrokerConnection, answer_awaited, broker_version, close, connect
from rowmill.runtime.watching import ConsumerWatch
from rowmill_contracts.topology import topology

log = structlog.get_logger()

LISTENER_LENGTH: Final = 50_000
"""Messages that a listener's own queue keeps; a slow listener loses the oldest and stops nobody."""

OnMessage = Callable[["Session", AbstractIncomingMessage], Awaitable[None]]


@dataclass(frozen=True)
class Subscription:
    """A queue to consume, at most ``prefetch`` messages unacknowledged.

    ``listen``: (exchange, routing key) pairs to bind a queue of this session's own to, bounded by dropping its oldest messages. ``to_the_end``: also
    while messages in hand are finished, when no other subscription brings new ones.
    """

    queue: str
    on_message: OnMessage
    prefetch: int
    listen: tuple[tuple[str, str], ...] = ()
    to_the_end: bool = False


@dataclass
class _Attached:
    """A consumer of ours. ``queue``: its name at the broker."""

    queue: str
    channel: AbstractChannel
    tag: str
    watch: ConsumerWatch


class Session:
    """Open with `Session.open`; wait for its end with `ended`."""

    def __init__(self, connection: BrokerConnection, clock: Clock) -> None:
        self.connection = connection
        self.ended: asyncio.Event = asyncio.Event()
        self.reason: BaseException | str | None = None
        self.blocked = False
        self.cancelled = False
        """Whether the broker took a consumer away: a queue of ours was deleted."""
        self._clock = clock
        self._publishing: AbstractChannel | None = None
        self._replying: AbstractChannel | None = None
        self._fetching: AbstractChannel | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._single_active: set[str] = set()
        self._attached: dict[str, _Attached] = {}
        self._cancelled: list[_Attached] = []
        self._declaring: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        connection.close_callbacks.add(self._connection_closed)

    @classmethod
    async def open(cls, url: str, *, name: str, heartbeat: int, delay_scale: float, clock: Clock) -> Session:
        """Connect, declare the topology, open the publishing channels.

        Raises one of `rowmill.runtime.transport.TRANSPORT_ERRORS`; the caller tries again.
        """
        session = cls(await connect(url, name=name, heartbeat=heartbeat, timeout=ANSWER_SECONDS), clock)
        try:
            session._publishing = await session._channel(publisher_confirms=True)
            session._replying = await session._channel(publisher_confirms=False)
            await session._declare(delay_scale)
        except BaseException:
            await session.close()
            raise
        return session

    async def _channel(self, *, publisher_confirms: bool) -> AbstractChannel:
        async with answer_awaited():
            channel = await self.connection.channel(publisher_confirms=publisher_confirms, on_return_raises=publisher_confirms)
            channel.close_callbacks.add(self._channel_closed)
            underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(self._consumer_cancelled)
        return channel

    # ---- topology ---------------------------------------------------------------------------------------------------------------------

    async def declare(self, delay_scale: float) -> None:
        """Declare everything of the topology; what stands already is left as it is. Who asks meanwhile waits for the same declaration."""
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.create_task(self._declare(delay_scale))
            self._declaring.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._declaring)

    async def _declare(self, delay_scale: float) -> None:
        exchanges, queues = topology(delay_scale)
        await declare(self.connection, exchanges, queues, broker_version(self.connection))
        with AsTransportErrors():
            for exchange in exchanges:
                self._exchanges[exchange.name] = await self._publisher.get_exchange(exchange.name, ensure=False)
        self._single_active = {queue.name for queue in queues if queue.arguments.get("x-single-active-consumer")}

    @property
    def _publisher(self) -> AbstractChannel:
        if self._publishing is None:
            raise ConnectionError("session is not open")
        return self._publishing

    # ---- publishing -------------------------------------------------------------------------------------------------------------------

    async def publish(self, exchange: str, key: str, message: aio_pika.Message, *, mandatory: bool, timeout: float) -> None:
        """Publish and await the broker's confirm. Any error means that the outcome is unknown."""
        with AsTransportErrors():
            await self._exchanges[exchange].publish(message, key, mandatory=mandatory, timeout=timeout)

    async def reply(self, queue: str, message: aio_pika.Message) -> None:
        """Publish to a reply queue, unconfirmed: who misses a reply asks again."""
        if self._replying is None:
            raise ConnectionError("session is not open")
        with AsTransportErrors():
            await self._replying.default_exchange.publish(message, queue, mandatory=False)

    # ---- consuming --------------------------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> frozenset[str]:
        """The subscriptions that are consumed, by the queue that they name."""
        return frozenset(self._attached)

    async def consume(self, subscription: Subscription) -> None:
        """Attach a consumer on a channel of its own."""
        channel = await self._channel(publisher_confirms=False)
        name = f"{subscription.queue}.{new_id()}" if subscription.listen else subscription.queue
        watch = ConsumerWatch(subscription.queue, subscription.prefetch, single_active=name in self._single_active)

        async def received(message: AbstractIncomingMessage) -> None:
            watch.began()
            try:
                await subscription.on_message(self, message)
            finally:
                watch.ended()

        with AsTransportErrors():
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await channel.set_qos(prefetch_count=subscription.prefetch)
                    if subscription.listen:
                        bounded: dict[str, Any] = {"x-max-length": LISTENER_LENGTH, "x-overflow": "drop-head"}
                        queue = await channel.declare_queue(name, exclusive=True, auto_delete=True, durable=False, arguments=bounded)
                        for exchange, key in subscription.listen:
                            await queue.bind(exchange, key)
                    else:
                        queue = await channel.get_queue(name, ensure=False)
                    tag = await queue.consume(received)
            except TimeoutError as error:
                raise TimeoutError(f"queue {name} could not be consumed within {ANSWER_SECONDS:g} s") from error
        self._attached[subscription.queue] = _Attached(name, channel, tag, watch)

    async def consume_replies(self, queue_name: str, expires_ms: int, on_reply: OnMessage) -> None:
        """Declare this process's reply queue and consume it.

        A queue of that name is deleted first: a former session of ours, which the broker may not know to be dead, would take a part of the replies.
        """
        channel = await self._channel(publisher_confirms=False)
        watch = ConsumerWatch(queue_name, 1)

        async def received(message: AbstractIncomingMessage) -> None:
            watch.delivered += 1
            await on_reply(self, message)

        async with answer_awaited():
            await channel.set_qos(prefetch_count=0)
            await channel.queue_delete(queue_name)
            queue = await channel.declare_queue(queue_name, durable=False, arguments={"x-expires": expires_ms})
            tag = await queue.consume(received, no_ack=True)
        self._attached[queue_name] = _Attached(queue_name, channel, tag, watch)

    async def get(self, queue: str) -> AbstractIncomingMessage | None:
        """Fetch one message of a queue that is not consumed; None where there is none."""
        async with answer_awaited():
            if self._fetching is None:
                self._fetching = await self._channel(publisher_confirms=False)
            found = await self._fetching.get_queue(queue, ensure=False)
            return await found.get(fail=False, timeout=None)

    async def cancel(self, queue: str) -> None:
        """Stop the deliveries of one queue; what was delivered stays ours to acknowledge."""
        attached = self._attached.pop(queue, None)
        if attached is None:
            return
        async with answer_awaited():
            underlay = await attached.channel.get_underlay_channel()
            await underlay.basic_cancel(attached.tag)
        self._cancelled.append(attached)

    async def _close_idle_channels(self) -> None:
        """Those of cancelled consumers, once all that they were delivered is done; what was sent to them too late goes back to its queue."""
        idle = [attached for attached in self._cancelled if not attached.watch.in_hand]
        self._cancelled = [attached for attached in self._cancelled if attached.watch.in_hand]
        for attached in idle:
            attached.channel.close_callbacks.discard(self._channel_closed)
            await attached.channel.close()

    # ---- watching ---------------------------------------------------------------------------------------------------------------------

    async def depths(self, queues: list[str]) -> dict[str, tuple[int, int]]:
        """(messages ready, consumers) of each queue, asked on a channel of its own.

        A robust channel would answer from its cache; this one asks the broker.
        """
        found: dict[str, tuple[int, int]] = {}
        async with answer_awaited():
            channel = await self.connection.channel(publisher_confirms=False)
            for name in queues:
                queue = await channel.declare_queue(name, passive=True)
                result = queue.declaration_result
                found[name] = (result.message_count or 0, result.consumer_count or 0)
            await channel.close()
        return found

    async def look(self) -> str | None:
        """Ask the broker about every queue that we consume; what is wrong, if anything. A blocked connection is not wrong: it waits."""
        self.blocked = await self.connection.is_blocked()
        if self.blocked:
            return None
        looked_at = list(self._attached.values())
        asked = self._clock.monotonic()
        try:
            await self._close_idle_channels()
            found = await self.depths([attached.queue for attached in looked_at])
        except Exception as error:  # whatever it was, a session that cannot answer this is of no use
            self.blocked = await self.connection.is_blocked()
            we_stood_still = isinstance(error, TimeoutError) and self._clock.monotonic() - asked > 1.2 * ANSWER_SECONDS
            return None if self.blocked or we_stood_still else f"the broker did not say how our queues are: {error!r}"
        for attached in looked_at:
            ready, consumers = found[attached.queue]
            wrong = attached.watch.look(ready=ready, consumers=consumers)
            if wrong is not None and self._attached.get(attached.watch.queue) is attached:
                return wrong
        return None

    # ---- the end ----------------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session, and the connection within a few seconds, whatever the broker does.

        Whoever closes waits for the same goodbye: the library answers a second close at once, and to abort then would cut the first one off, with
        acknowledgements that the broker has not read yet.
        """
        self.end("closed by us")
        if self._closing is None:
            self._closing = asyncio.create_task(close(self.connection), name="session closing")
        await asyncio.shield(self._closing)

    def end(self, reason: BaseException | str | None) -> None:
        """Declare the session over; the first reason stays."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    def _connection_closed(self, _connection: object, error: BaseException | None) -> None:
        self.end(error)

    def _channel_closed(self, _channel: object, error: BaseException | None) -> None:
        self.end(error)

    def _consumer_cancelled(self, frame: spec.Basic.Cancel) -> None:
        self.cancelled = True
        self.end(f"the broker cancelled consumer {frame.consumer_tag}")
