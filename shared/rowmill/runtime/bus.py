"""The bus: publish until confirmed, ask and be answered, consume with acknowledgement after the handler's work is stored.

Owns reconnecting, acknowledging, retrying in place, dead-lettering and trace context, so that handlers hold none of it. Knows nothing of what the
messages mean. What it guarantees: `publish` returns only after the broker's confirm (and publishes again under the same message id while the outcome
is unknown); a message is acknowledged only after its handler returned; a handler may see any message again, also while it still works on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.errors import AskDied, AskTimeout, MalformedMessage, RowmillError, UnavailableError
from rowmill.runtime import metrics
from rowmill.runtime.asking import Ask, Asks, ReplyT
from rowmill.runtime.clock import Clock, SystemClock, backoff, new_id
from rowmill.runtime.deliveries import Delivery, traceparent
from rowmill.runtime.envelopes import envelope_of
from rowmill.runtime.handling import Handler, Handling, Undecodable
from rowmill.runtime.publishing import DELETION_SECONDS, Publisher
from rowmill.runtime.session import Session, Subscription
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.suspects import Suspects
from rowmill.runtime.transport import TRANSPORT_ERRORS, redacted
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.envelope import Message, UndecodableMessage, decode, encode
from rowmill_contracts.topology import EXCHANGE, WORK_QUEUES

log = structlog.get_logger()

SETTLED_SECONDS: Final = 5.0
"""A session that lasts less counts as a failure: the next one is not tried at once."""

REPLY_QUEUE_EXPIRES_MS: Final = 120_000

WORK_NAMES: Final = frozenset(queue.name for queue in WORK_QUEUES)


__all__ = ["TRANSPORT_ERRORS", "Bus", "Handler", "redacted", "traceparent"]


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
        self._asks = Asks()
        self._reconnected: list[Callable[[], None]] = []
        self._handling: set[asyncio.Task[Any]] = set()
        self._runner: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._handling_of = Handling(self, self._clock)
        self._suspects = Suspects(self, self._handling_of, alone=settings.suspect_alone, poll=settings.suspect_poll)
        self._publisher = Publisher(self._live, settings.time_scale, self._clock, service)
        self._up = metrics.SESSION_UP.labels(service)
        self._blocked = metrics.BLOCKED.labels(service)

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
        self._suspects.start()
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
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await asyncio.gather(*(session.cancel(queue) for queue in list(self._subscriptions)))
            leaving = asyncio.create_task(self._suspects.stop(self._settings.drain_timeout))
            if self._handling:
                await asyncio.wait(set(self._handling), timeout=self._settings.drain_timeout)
            await leaving
        else:
            await self._suspects.stop(0.0)
        for task in self._handling:
            task.cancel()
        if session is not None:
            session.end("closed by us")  # ends the watch also where the library swallows the cancellation (`asyncio.wait_for` before 3.12)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        if session is not None:
            await session.close()
        if self._background:
            await asyncio.wait(set(self._background), timeout=5.0)
        self._session = None
        self._session_up.clear()

    @property
    def connected(self) -> bool:
        """There is a session, as far as is known."""
        return self._session is not None and self._session_up.is_set() and not self._session.ended.is_set()

    @property
    def ready(self) -> bool:
        """A session is up, with every consumer attached, and the broker takes what we publish."""
        return self.connected and self._session is not None and not self._session.blocked

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                session = await self._new_session()
            except Exception as error:  # nothing may end this loop: the process would stay up, deaf and mute
                failures += 1
                expected = isinstance(error, TRANSPORT_ERRORS)
                log.warning(
                    "broker_unreachable",
                    broker=redacted(self._settings.broker_url),
                    error=str(error) or repr(error),
                    failures=failures,
                    exc_info=None if expected else error,
                )
                await self._clock.sleep(backoff(failures, first=0.2, limit=2.0))
                continue
            started = self._clock.monotonic()
            self._session = session
            self._session_up.set()
            self._up.set(1)
            metrics.SESSIONS.labels(self.service).inc()
            self._ask_again()
            self._suspects.look_now()
            for callback in self._reconnected:
                try:
                    callback()
                except Exception:
                    log.exception("reconnect_callback_failed")
            try:
                await self._watch(session)
            finally:
                self._session_up.clear()
                self._session = None
                self._up.set(0)
                self._blocked.set(0)
                self._spawn(session.close())
            if not self._closing:
                log.warning("broker_session_lost", error=str(session.reason))
                failures = failures + 1 if self._clock.monotonic() - started < SETTLED_SECONDS else 0
                pause = DELETION_SECONDS if session.cancelled else 0.0
                await self._clock.sleep(max(pause, backoff(failures, first=0.1, limit=5.0) if failures else 0.0))

    async def _new_session(self) -> Session:
        """A session with everything attached that is subscribed by then."""
        session = await Session.open(
            self._settings.broker_url,
            name=f"rowmill {self.service}",
            heartbeat=self._settings.heartbeat_seconds,
            delay_scale=self._settings.time_scale,
            clock=self._clock,
        )
        try:
            await session.consume_replies(self.reply_to, REPLY_QUEUE_EXPIRES_MS, self._received_reply)
            while missing := [subscription for queue, subscription in self._subscriptions.items() if queue not in session.attached]:
                for subscription in missing:
                    await session.consume(subscription)
            for queue in session.attached - self._subscriptions.keys() - {self.reply_to}:
                await session.cancel(queue)
        except BaseException:
            self._spawn(session.close())
            raise
        return session

    async def _watch(self, session: Session) -> None:
        """Return when the session has ended; look meanwhile whether it still does what it is for, and end it if not."""
        while not session.ended.is_set():
            try:
                async with asyncio.timeout(self._settings.watch_interval):
                    await session.ended.wait()
            except TimeoutError:
                wrong = await session.look()
                self._blocked.set(int(session.blocked))
                if wrong is not None:
                    session.end(wrong)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

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
        envelope = envelope_of(
            body,
            message_type,
            at=self._clock.now(),
            message_id=message_id or new_id(),
            correlation_id=correlation_id,
            reply_to=reply_to,
            headers=headers,
        )
        await self._publisher.publish(envelope, exchange, key)

    # ---- asking and answering ---------------------------------------------------------------------------------------------------------

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        """Publish a request and wait for its answer; asked again after a silence (requests are idempotent by contract).

        Raises:
            AskTimeout: no answer within ``timeout`` seconds (default: the setting ``ask_timeout``); whether it was carried out is unknown.
            AskDied: the request was dead-lettered; asking again will not help.
            MalformedMessage: the answer is of another type.

        """
        limit = self._settings.ask_timeout if timeout is None else timeout
        with self._asks.open(new_id(), message, key) as ask:
            try:
                async with asyncio.timeout(limit):
                    while not ask.answered.done():
                        await self._publish_ask(ask)
                        await asyncio.wait([ask.answered], timeout=self._settings.ask_again)
            except TimeoutError as error:
                raise AskTimeout(f"no answer to {message.message_type} on {key} within {limit:g} s") from error
            reply = ask.answered.result()
        if isinstance(reply, RequestDied):
            raise AskDied(reply.error.message)
        if not isinstance(reply, answer):
            raise MalformedMessage(f"{message.message_type} on {key} was answered by {reply.message_type}, not {answer.message_type}")
        return reply

    async def _publish_ask(self, ask: Ask) -> None:
        await self.publish_body(ask.body, ask.message_type, ask.key, correlation_id=ask.request_id, reply_to=self.reply_to, message_id=ask.request_id)

    def _ask_again(self) -> None:
        """With a new session the reply queue is new too: what was answered into the old one is lost."""
        for ask in self._asks.unanswered():
            self._spawn(self._publish_ask(ask))

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
        envelope = envelope_of(
            encode(message), message.message_type, at=self._clock.now(), message_id=new_id(), correlation_id=correlation_id or None
        )
        try:
            await session.reply(reply_to, envelope)
        except TRANSPORT_ERRORS as error:
            log.info("reply_dropped", reply_to=reply_to, message_type=message.message_type, error=repr(error))

    def on_reply(self, message: type[ReplyT], callback: Callable[[ReplyT], None]) -> None:
        """Hand replies of this type to ``callback`` (for requests that are answered in parts, outside `ask`)."""
        self._asks.on_reply(message, callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call after each new session, the first included: the time to ask again whatever was asked and not answered."""
        self._reconnected.append(callback)

    async def _received_reply(self, _session: Session, incoming: AbstractIncomingMessage) -> None:
        self._asks.received(incoming.type, incoming.body, incoming.correlation_id or "")

    # ---- consuming --------------------------------------------------------------------------------------------------------------------

    async def listen(self, exchange: str, keys: list[str], handler: Handler) -> None:
        """Hear messages of ``exchange`` under ``keys`` on a queue of this process's own.

        They are hints: lost while the process is away, and the oldest are lost to a slow listener. A handler that fails is logged, no more.
        """

        async def on_message(_session: Session, incoming: AbstractIncomingMessage) -> None:
            try:
                message = decode(incoming.type, incoming.body)
                delivery = Delivery(
                    message=message, body=incoming.body, queue="", message_id=incoming.message_id or "", reply_to=incoming.reply_to or None
                )
                await handler(delivery)
            except (UndecodableMessage, RowmillError) as error:
                log.warning("listener_failed", error=str(error), message_type=incoming.type)
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await incoming.ack()

        name = f"listen.{self.service}.{new_id()}"
        await self._subscribe(Subscription(name, on_message, 500, tuple((exchange, key) for key in keys)))

    async def live_session(self) -> Session:
        """The session that is up, as soon as one is."""
        return await self._live()

    async def declare(self) -> None:
        """Declare what is missing at the broker."""
        await (await self._live()).declare(self._settings.time_scale)

    def look_for_suspects(self) -> None:
        self._suspects.look_now()

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
        undecodable: Undecodable = "bury",
        may_take_suspects: Callable[[], bool] = lambda: True,
    ) -> None:
        """Consume ``queue`` from now on and after every reconnect, handling up to ``prefetch`` messages at once.

        ``broadcast``: (exchange, key): `listen` there instead. ``undecodable``: messages that cannot be decoded are dead-lettered, or (for a
        queue of dead letters, which has no dead letters of its own) handed over as `Undecoded`. Suspects of the queue are handled, too (see
        `rowmill.runtime.suspects`), one at a time, whenever ``may_take_suspects``.
        """
        if broadcast is not None:
            await self.listen(broadcast[0], [broadcast[1]], handler)
            return

        async def on_message(session: Session, incoming: AbstractIncomingMessage) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)
            await self._handling_of.handle(session, queue, handler, incoming, undecodable)

        await self._subscribe(Subscription(queue, on_message, prefetch))
        if queue in WORK_NAMES:
            self._suspects.serve(queue, handler, undecodable, may_take_suspects)

    async def _subscribe(self, subscription: Subscription) -> None:
        self._subscriptions[subscription.queue] = subscription
        session = self._session
        if session is not None and not session.ended.is_set():
            try:
                await session.consume(subscription)
            except Exception as error:  # whatever a dying connection makes of it: a service that is about to start must not end of it
                expected = isinstance(error, TRANSPORT_ERRORS)
                log.warning("consume_postponed", queue=subscription.queue, error=repr(error), exc_info=None if expected else error)
                session.end(error)  # the next session attaches every subscription

    async def stop_consuming(self, queue: str) -> None:
        """Detach from one queue; what was delivered is still handled."""
        self._subscriptions.pop(queue, None)
        self._suspects.leave(queue)
        if self._session is not None:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await self._session.cancel(queue)
