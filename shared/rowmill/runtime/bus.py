"""The bus: publish until confirmed, ask and be answered, consume with acknowledgement after the handler's work is stored.

Owns asking, acknowledging, retrying in place, dead-lettering and trace context, so that handlers hold none of it; sessions with the broker are
made by `rowmill.runtime.sessions`. Knows nothing of what the messages mean. What it guarantees: `publish` returns only after the broker's confirm
(and publishes again under the same message id while the outcome is unknown); a message is acknowledged only after its handler returned; a handler
may see any message again, also while it still works on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.errors import AskDied, AskTimeout, MalformedMessage, RowmillError, UnavailableError
from rowmill.runtime.asking import Ask, Asks, ReplyT
from rowmill.runtime.clock import Clock, SystemClock, new_id
from rowmill.runtime.deadlines import HELD
from rowmill.runtime.deliveries import Delivery, traceparent
from rowmill.runtime.envelopes import envelope_of
from rowmill.runtime.handling import Handler, Handling, Undecodable
from rowmill.runtime.in_hand import MessagesInHand
from rowmill.runtime.outages import Outages
from rowmill.runtime.publishing import Publisher
from rowmill.runtime.session import Session, Subscription
from rowmill.runtime.sessions import Sessions
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.suspects import Suspects
from rowmill.runtime.transport import CLOSE_SECONDS, TRANSPORT_ERRORS, redacted
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import Message, UndecodableMessage, encode
from rowmill_contracts.in_hand import AskInHand
from rowmill_contracts.topology import CONTROL, EXCHANGE, WORK_QUEUES, suspect

log = structlog.get_logger()

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
        self.outages = Outages(self._clock)
        self._sessions = Sessions(
            settings,
            self._clock,
            service=service,
            prepare=self._hear_replies,
            began=self._session_began,
            refuses=self.outages.noting("the broker's taking messages"),
        )
        self._asks = Asks()
        self._reconnected: list[Callable[[], None]] = []
        self._last_words: list[Callable[[], Awaitable[None]]] = []
        self._handling: set[asyncio.Task[Any]] = set()
        self._asking_again: set[asyncio.Task[None]] = set()
        self._in_hand = MessagesInHand(service, self.process_id, self._clock, self.outages)
        self._shows_hand = False
        self._handling_of = Handling(self, self._clock, self._in_hand)
        self._suspects = Suspects(self, self._handling_of, alone=settings.suspect_alone, poll=settings.suspect_poll)
        self._publisher = Publisher(self._sessions.live, settings.time_scale, self._clock, service)

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
        self._sessions.start()
        self._suspects.start()
        try:
            async with asyncio.timeout(wait):
                await self._sessions.live()
        except TimeoutError as error:
            await self.stop()
            raise UnavailableError(
                f"no broker answered at {redacted(self._settings.broker_url)} within {wait:g} s; where it is to be a project's own, "
                "`rowmill up` starts servers and services there, `rowmill dev up` the servers alone"
            ) from error

    async def stop(self) -> None:
        """Stop consuming, let handlers finish (to ``drain_timeout``), close. What was not finished is delivered again to others."""
        self._sessions.begin_end()
        if self.connected:
            await self._sessions.detach()
            leaving = asyncio.create_task(self._suspects.stop(self._settings.drain_timeout))
            if self._handling:
                await asyncio.wait(set(self._handling), timeout=self._settings.drain_timeout)
            await leaving
        else:
            await self._suspects.stop(0.0)
        for task in self._handling | self._asking_again:
            task.cancel()
        if self._last_words and self._handling:
            await asyncio.wait(set(self._handling), timeout=CLOSE_SECONDS)
        for say in self._last_words:
            await say()
        await self._sessions.close()

    def before_close(self, say: Callable[[], Awaitable[None]]) -> None:
        """When the bus stops: do this once nothing is handled any more, before the connection goes, if there is one. It has to end by itself."""
        self._last_words.append(say)

    @property
    def connected(self) -> bool:
        """There is a session, as far as is known."""
        return self._sessions.current is not None

    @property
    def ready(self) -> bool:
        """A session is up, with every consumer attached, and the broker takes what we publish."""
        session = self._sessions.current
        return session is not None and not session.blocked

    async def live_session(self) -> Session:
        """The session that is up, as soon as one is."""
        return await self._sessions.live()

    async def _hear_replies(self, session: Session) -> None:
        await session.consume_replies(self.reply_to, REPLY_QUEUE_EXPIRES_MS, self._received_reply)

    def _session_began(self) -> None:
        """With a new session the reply queue is new too: what was answered into the old one is lost, and asked for again."""
        for ask in self._asks.unanswered():
            task = asyncio.create_task(self._publish_ask(ask))
            self._asking_again.add(task)
            task.add_done_callback(self._asking_again.discard)
        self._suspects.look_now()
        for callback in self._reconnected:
            try:
                callback()
            except Exception:
                log.exception("reconnect_callback_failed")

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

    async def ask(
        self,
        message: Message,
        key: str,
        answer: type[ReplyT],
        *,
        timeout: float | None = None,
        again: float | None = None,
        request_id: str | None = None,
    ) -> ReplyT:
        """Publish a request and wait for its answer; asked again after a silence of ``again`` seconds, each twice as long as the one before
        (default: the setting ``ask_again``, each time), as requests are idempotent by contract. ``request_id``: of a question that was asked before.

        Raises:
            AskTimeout: no answer within ``timeout`` seconds (default: the setting ``ask_timeout``); whether it was carried out is unknown.
            AskDied: the request was dead-lettered; asking again will not help.
            MalformedMessage: the answer is of another type.

        """
        limit = self._settings.ask_timeout if timeout is None else timeout
        silence = self._settings.ask_again if again is None else again
        with self._asks.open(request_id or new_id(), message, key) as ask:
            try:
                async with asyncio.timeout(limit):
                    while not ask.answered.done():
                        await self._publish_ask(ask)
                        await asyncio.wait([ask.answered], timeout=silence)
                        silence *= 1 if again is None else 2
            except TimeoutError as error:
                self.outages.silent(f"answers on {key}", min(limit, self._settings.ask_timeout))
                raise AskTimeout(f"no answer to {message.message_type} on {key} within {limit:g} s") from error
            reply = ask.answered.result()
        self.outages.back(f"answers on {key}")
        if isinstance(reply, RequestDied):
            raise AskDied(reply.error.message)
        if not isinstance(reply, answer):
            raise MalformedMessage(f"{message.message_type} on {key} was answered by {reply.message_type}, not {answer.message_type}")
        return reply

    async def _publish_ask(self, ask: Ask) -> None:
        await self.publish_body(ask.body, ask.message_type, ask.key, correlation_id=ask.request_id, reply_to=self.reply_to, message_id=ask.request_id)

    async def reply(self, delivery: Delivery, message: Message) -> None:
        """Answer a request. Unconfirmed: who misses the answer asks again. Without ``reply_to`` nobody wants one."""
        if delivery.reply_to:
            await self.send_reply(delivery.reply_to, message, correlation_id=delivery.correlation_id)

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        """Send to a reply queue that was named earlier (answers in parts). Lost without an error while the broker is away."""
        session = self._sessions.current
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

    async def _show_hand(self, session: Session, incoming: AbstractIncomingMessage) -> None:
        """Answer whoever asks on the control exchange what this process has in hand; nothing else that travels there is read."""
        if incoming.type == AskInHand.message_type and incoming.reply_to:
            await self.send_reply(incoming.reply_to, self._in_hand.shown(), correlation_id=incoming.correlation_id or "")
        if not session.ended.is_set():
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await incoming.ack()

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
        await self._sessions.subscribe(Subscription(name, on_message, 500, tuple((exchange, key) for key in keys)))

    async def declare(self) -> None:
        """Declare what is missing at the broker."""
        await (await self._sessions.live()).declare(self._settings.time_scale)

    def look_for_suspects(self) -> None:
        self._suspects.look_now()

    async def depths(self, queues: list[str]) -> dict[str, tuple[int, int]]:
        """(messages ready, consumers) of each queue, now."""
        return await (await self._sessions.live()).depths(queues)

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        prefetch: int = 50,
        broadcast: tuple[str, str] | None = None,
        undecodable: Undecodable = "bury",
        may_take_suspects: Callable[[], bool] = lambda: True,
        watched: bool = False,
        gate: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Consume ``queue`` from now on and after every reconnect, handling up to ``prefetch`` messages at once.

        ``broadcast``: (exchange, key): `listen` there instead. ``undecodable``: messages that cannot be decoded are dead-lettered, or (for a
        queue of dead letters, which has no dead letters of its own) handed over as `Undecoded`. Suspects of the queue are handled, too (see
        `rowmill.runtime.suspects`), one at a time, whenever ``may_take_suspects``. ``watched``: the handler says when author code of a suspect is at
        work (`Delivery.rest`), and only deaths at which it was are held against it; else all are. ``gate``: queues that name the same one keep their
        handlers waiting for a suspect of any of them, since what one queue brings may end the process under another's suspect (None: the queue is by
        itself). ``deadline``: seconds for which a message may be in hand (see `rowmill.runtime.deadlines`; None: 5 minutes at full size); one that is
        for longer is what a person is told of who asks.
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

        deadline = HELD * self._settings.time_scale if deadline is None else deadline
        if not self._shows_hand:
            self._shows_hand = True
            name = f"listen.{self.service}.in-hand"
            await self._sessions.subscribe(Subscription(name, self._show_hand, 50, ((CONTROL, ""),), to_the_end=True))
        self._in_hand.serve(queue, deadline)
        if gate is not None:
            self._handling_of.share_gate(queue, gate)
        await self._sessions.subscribe(Subscription(queue, on_message, prefetch))
        if queue in WORK_NAMES:
            self._in_hand.serve(suspect(queue), deadline, consumed=False)
            self._suspects.serve(queue, handler, undecodable, may_take_suspects, watched=watched)

    async def step_back(self, queue: str) -> None:
        """Go on consuming a queue that serves one consumer at a time, behind all others who do; what was delivered is still handled."""
        await self._sessions.step_back(queue)

    async def stop_consuming(self, queue: str) -> None:
        """Detach from one queue; what was delivered is still handled."""
        self._suspects.leave(queue)
        self._in_hand.leave(queue)
        await self._sessions.unsubscribe(queue)
