"""The bus: publish until confirmed, ask and be answered, consume with acknowledgement after the handler's work is stored.

Owns reconnecting, acknowledging, retrying in place, dead-lettering and trace context, so that handlers hold none of it. Knows nothing of what the
messages mean. What it guarantees: `publish` returns only after the broker's confirm (and publishes again under the same message id while the outcome
is unknown); a message is acknowledged only after its handler returned; a handler may see any message again, also while it still works on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, Self, TypeVar

import aio_pika
import structlog
from aio_pika.abc import AbstractIncomingMessage
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, PublishError

from rowmill.errors import AskTimeout, MalformedMessage, RowmillError, UnavailableError
from rowmill.runtime.clock import Clock, SystemClock, backoff, new_id
from rowmill.runtime.deliveries import Delivery, Rejected, Undecoded, death_headers, subject_headers
from rowmill.runtime.session import Session, Subscription
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import Message, UndecodableMessage, decode, encode
from rowmill_contracts.topology import CONTROL, EVENTS, EXCHANGE, dead

log = structlog.get_logger()

ReplyT = TypeVar("ReplyT", bound=Message)
Handler = Callable[[Delivery], Awaitable[None]]

TRANSPORT_ERRORS = (AMQPError, ChannelInvalidStateError, ConnectionError, OSError, TimeoutError)
"""What a publish or a connection attempt can raise; each means that the outcome is unknown."""

CONFIRM_TIMEOUT = 30.0
"""Seconds after which a missing confirm counts as unknown and the message is published again."""

HANDLER_ATTEMPTS = 3
"""Tries of a handler that raises something unexpected, before the message is dead-lettered."""

NON_MANDATORY = frozenset({EVENTS, CONTROL})
"""Exchanges on which a message that reaches nobody is no error."""

REPLY_QUEUE_EXPIRES_MS = 120_000

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)


class Bus:
    """One process's connection to the broker. Use ``async with Bus(settings, service="admission") as bus``."""

    def __init__(self, settings: ServiceSettings, *, service: str, clock: Clock | None = None) -> None:
        self.service = service
        self.process_id = new_id()
        self.reply_to = f"replies.{service}.{self.process_id}"
        self._settings = settings
        self._clock = clock or SystemClock()
        self._session: Session | None = None
        self._session_up = asyncio.Event()
        self._subscriptions: dict[str, Subscription] = {}
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._reply_callbacks: dict[str, Callable[[Message], None]] = {}
        self._reconnected: list[Callable[[], None]] = []
        self._handling: set[asyncio.Task[Any]] = set()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False

    # ---- life -------------------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, *, wait: float | None = None) -> None:
        """Connect in the background and wait for the first session (for ``wait`` seconds at most; None: as long as it takes).

        Raises:
            UnavailableError: no broker answered within ``wait``.

        """
        self._runner = asyncio.create_task(self._run(), name="bus")
        try:
            async with asyncio.timeout(wait):
                await self._session_up.wait()
        except TimeoutError as error:
            await self.stop()
            raise UnavailableError(f"no broker answered at {redacted(self._settings.broker_url)} within {wait} s") from error

    async def stop(self) -> None:
        """Stop consuming, let handlers finish (to ``drain_timeout``), close. What was not finished is delivered again to others."""
        self._closing = True
        session = self._session
        if session is not None and not session.ended.is_set():
            for queue in list(self._subscriptions):
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await session.cancel(queue)
            if self._handling:
                await asyncio.wait(set(self._handling), timeout=self._settings.drain_timeout)
        for task in self._handling:
            task.cancel()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        if session is not None:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await session.close()

    @property
    def ready(self) -> bool:
        """A session is up, with every consumer attached."""
        return self._session_up.is_set()

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                session = await Session.open(
                    self._settings.broker_url,
                    name=f"rowmill {self.service}",
                    heartbeat=self._settings.heartbeat_seconds,
                    delay_scale=self._settings.time_scale,
                    timeout=10.0,
                )
                await session.consume_replies(self.reply_to, REPLY_QUEUE_EXPIRES_MS, self._received_reply)
                for subscription in self._subscriptions.values():
                    await session.consume(subscription)
            except TRANSPORT_ERRORS as error:
                failures += 1
                log.warning("broker_unreachable", broker=redacted(self._settings.broker_url), error=str(error), failures=failures)
                await self._clock.sleep(backoff(failures, first=0.2, limit=5.0))
                continue
            failures = 0
            self._session = session
            self._session_up.set()
            for callback in self._reconnected:
                callback()
            await session.ended.wait()
            self._session_up.clear()
            self._session = None
            if not self._closing:
                log.warning("broker_session_lost", error=str(session.reason))
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await session.close()

    async def _live(self) -> Session:
        while True:
            await self._session_up.wait()
            session = self._session
            if session is not None and not session.ended.is_set():
                return session
            await asyncio.sleep(0.01)

    # ---- publishing -------------------------------------------------------------------------------------------------------------------

    async def publish(
        self,
        message: Message,
        key: str,
        *,
        exchange: str = EXCHANGE,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        message_id: str | None = None,
    ) -> None:
        """Publish and return after the confirm. Waits through outages; an unknown outcome is published again under the same id.

        ``correlation_id`` defaults to the message's run. Events and hints go non-mandatory: nobody listening is no error.
        """
        await self.publish_body(
            encode(message),
            message.message_type,
            key,
            exchange=exchange,
            correlation_id=correlation_id or getattr(message, "run_id", None) or None,
            reply_to=reply_to,
            message_id=message_id,
        )

    async def publish_body(
        self,
        body: bytes,
        message_type: str | None,
        key: str,
        *,
        exchange: str = EXCHANGE,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        message_id: str | None = None,
        headers: dict[str, Any] | None = None,
    ) -> None:
        """As `publish`, for a body that is encoded already."""
        envelope = self._envelope(body, message_type, correlation_id, reply_to, message_id or new_id(), headers)
        failures = 0
        while True:
            session = await self._live()
            try:
                await session.publish(exchange, key, envelope, mandatory=exchange not in NON_MANDATORY, timeout=CONFIRM_TIMEOUT)
            except PublishError:
                failures += 1
                log.warning("publish_unroutable", exchange=exchange, key=key, failures=failures)
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await session.declare(self._settings.time_scale)
            except TRANSPORT_ERRORS as error:
                failures += 1
                log.info("publish_unconfirmed", exchange=exchange, key=key, error=repr(error), failures=failures)
            else:
                return
            await self._clock.sleep(backoff(failures, first=0.05, limit=2.0))

    def _envelope(
        self,
        body: bytes,
        message_type: str | None,
        correlation_id: str | None,
        reply_to: str | None,
        message_id: str,
        headers: dict[str, Any] | None = None,
    ) -> aio_pika.Message:
        trace = traceparent.get() or f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
        return aio_pika.Message(
            body,
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            type=message_type,
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
            timestamp=datetime.fromtimestamp(self._clock.now(), UTC),
            headers={"traceparent": trace, **(headers or {})},
        )

    # ---- asking and answering ---------------------------------------------------------------------------------------------------------

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        """Publish a request and wait for its answer; asked again after a silence (requests are idempotent by contract).

        Raises:
            AskTimeout: no answer within ``timeout`` seconds (default: the setting ``ask_timeout``); whether it was carried out is unknown.
            MalformedMessage: the answer is of another type.

        """
        request_id = new_id()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        limit = self._settings.ask_timeout if timeout is None else timeout
        body = encode(message)
        try:
            async with asyncio.timeout(limit):
                while not future.done():
                    await self.publish_body(body, message.message_type, key, correlation_id=request_id, reply_to=self.reply_to, message_id=request_id)
                    await asyncio.wait([future], timeout=self._settings.ask_again)
        except TimeoutError as error:
            raise AskTimeout(f"no answer to {message.message_type} on {key} within {limit:g} s") from error
        finally:
            self._waiting.pop(request_id, None)
        reply = future.result()
        if not isinstance(reply, answer):
            raise MalformedMessage(f"{message.message_type} on {key} was answered by {reply.message_type}, not {answer.message_type}")
        return reply

    async def reply(self, delivery: Delivery, message: Message) -> None:
        """Answer a request. Unconfirmed: who misses the answer asks again. Without ``reply_to`` nobody wants one."""
        if delivery.reply_to:
            await self.send_reply(delivery.reply_to, message, correlation_id=delivery.correlation_id)

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        """Send to a reply queue that was named earlier (answers in parts). Lost without an error while the broker is away."""
        session = self._session
        if session is None:
            log.info("reply_dropped", reply_to=reply_to, message_type=message.message_type)
            return
        envelope = self._envelope(encode(message), message.message_type, correlation_id or None, None, new_id())
        try:
            await session.reply(reply_to, envelope)
        except TRANSPORT_ERRORS as error:
            log.info("reply_dropped", reply_to=reply_to, message_type=message.message_type, error=repr(error))

    def on_reply(self, message: type[ReplyT], callback: Callable[[ReplyT], None]) -> None:
        """Hand replies of this type to ``callback`` (for requests that are answered in parts, outside `ask`)."""
        self._reply_callbacks[message.message_type] = callback  # type: ignore[assignment]

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call after each new session, the first included: the time to ask again whatever was asked and not answered."""
        self._reconnected.append(callback)

    async def _received_reply(self, _session: Session, incoming: AbstractIncomingMessage) -> None:
        try:
            message = decode(incoming.type, incoming.body)
        except UndecodableMessage as error:
            log.warning("reply_undecodable", error=str(error))
            return
        future = self._waiting.get(incoming.correlation_id or "")
        if future is not None:
            if not future.done():
                future.set_result(message)
            return
        callback = self._reply_callbacks.get(message.message_type)
        if callback is not None:
            callback(message)

    # ---- consuming --------------------------------------------------------------------------------------------------------------------

    async def listen(self, exchange: str, keys: list[str], handler: Handler) -> None:
        """Hear messages of ``exchange`` under ``keys`` on a queue of this process's own.

        They are hints: lost while the process is away, and the oldest are lost to a slow listener. A handler that fails is logged, no more.
        """

        async def on_message(_session: Session, incoming: AbstractIncomingMessage) -> None:
            try:
                message = decode(incoming.type, incoming.body)
                await handler(Delivery(message=message, body=incoming.body, queue="", message_id=incoming.message_id or ""))
            except (UndecodableMessage, RowmillError) as error:
                log.warning("listener_failed", error=str(error), message_type=incoming.type)
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await incoming.ack()

        name = f"listen.{self.service}.{new_id()}"
        await self._subscribe(Subscription(name, on_message, 500, tuple((exchange, key) for key in keys)))

    async def depths(self, queues: list[str]) -> dict[str, tuple[int, int]]:
        """(messages ready, consumers) of each queue, now."""
        session = await self._live()
        return await session.depths(queues)

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        prefetch: int = 50,
        broadcast: tuple[str, str] | None = None,
        undecodable: Literal["bury", "hand over"] = "bury",
    ) -> None:
        """Consume ``queue`` from now on and after every reconnect, handling up to ``prefetch`` messages at once.

        ``broadcast``: (exchange, key): `listen` there instead. ``undecodable``: messages that cannot be decoded are dead-lettered, or (for a
        queue of dead letters, which has no dead letters of its own) handed over as `Undecoded`.
        """
        if broadcast is not None:
            await self.listen(broadcast[0], [broadcast[1]], handler)
            return

        async def on_message(session: Session, incoming: AbstractIncomingMessage) -> None:
            self._track()
            await self._handle(session, queue, handler, incoming, undecodable)

        await self._subscribe(Subscription(queue, on_message, prefetch))

    async def handle(
        self, incoming: AbstractIncomingMessage, queue: str, handler: Handler, *, undecodable: Literal["bury", "hand over"] = "bury"
    ) -> None:
        """Handle a message that another client received, by the same rules as those of `consume`; acknowledged on the channel it came by."""
        self._track()
        await self._handle(None, queue, handler, incoming, undecodable)

    def _track(self) -> None:
        """Have `stop` wait for the task that runs now."""
        task = asyncio.current_task()
        if task is not None:
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

    async def _subscribe(self, subscription: Subscription) -> None:
        self._subscriptions[subscription.queue] = subscription
        session = self._session
        if session is not None and not session.ended.is_set():
            try:
                await session.consume(subscription)
            except TRANSPORT_ERRORS as error:
                log.info("consume_postponed", queue=subscription.queue, error=repr(error))
                await session.close()  # the next session attaches every subscription

    async def stop_consuming(self, queue: str) -> None:
        """Detach from one queue; what was delivered is still handled."""
        self._subscriptions.pop(queue, None)
        if self._session is not None:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await self._session.cancel(queue)

    async def _handle(
        self,
        session: Session | None,
        queue: str,
        handler: Handler,
        incoming: AbstractIncomingMessage,
        undecodable: Literal["bury", "hand over"],
    ) -> None:
        headers = dict(incoming.headers or {})
        trace = headers.get("traceparent")
        traceparent.set(trace if isinstance(trace, str) else None)
        first_failure = self._clock.now()
        message: Message
        try:
            message = decode(incoming.type, incoming.body)
        except UndecodableMessage as error:
            message = Undecoded(wire_type=incoming.type or "", reason=str(error))
        if isinstance(message, Undecoded) and undecodable == "bury":
            await self._bury(queue, incoming, MalformedMessage(message.reason), attempts=1, first_failure=first_failure, subject={})
            await self._acknowledge(session, incoming)
            return
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
                break
            except Exception as error:
                failures += 1
                log.exception("handler_failed", queue=queue, failures=failures)
                if failures >= HANDLER_ATTEMPTS:
                    await self._bury(queue, incoming, error, attempts=failures, first_failure=first_failure, subject=subject_headers(message))
                    break
                await self._clock.sleep(backoff(failures, first=0.1, limit=2.0))
            else:
                break
        await self._acknowledge(session, incoming)

    async def _bury(
        self,
        queue: str,
        incoming: AbstractIncomingMessage,
        error: Exception,
        *,
        attempts: int,
        first_failure: float,
        subject: dict[str, Any],
    ) -> None:
        """Publish to the dead-letter queue, untouched, with the reason; returns after the confirm, so that only then it is acknowledged."""
        log.error("message_dead", queue=queue, error=str(error), message_type=incoming.type)
        headers = death_headers(
            error,
            service=self.service,
            queue=queue,
            exchange=incoming.exchange or "",
            key=incoming.routing_key or "",
            attempts=attempts,
            first_failure=first_failure,
            last_failure=self._clock.now(),
        )
        await self.publish_body(
            incoming.body,
            incoming.type,
            dead(queue),
            correlation_id=incoming.correlation_id,
            reply_to=incoming.reply_to,
            message_id=incoming.message_id,
            headers={**headers, **subject},
        )

    async def _acknowledge(self, session: Session | None, incoming: AbstractIncomingMessage) -> None:
        if session is not None and session.ended.is_set():
            return  # the broker delivers it again; its effect is stored
        try:
            await incoming.ack()
        except (*TRANSPORT_ERRORS, RowmillError) as error:
            log.info("acknowledge_lost", error=repr(error))


def redacted(url: str) -> str:
    """A server's URL without its password."""
    scheme, found, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not found or not at:
        return url
    return f"{scheme}://{credentials.partition(':')[0]}:***@{host}"
