"""One session after another: connecting, attaching every subscription, watching, and beginning anew when a session ends.

Owns which session is alive and which queues are subscribed. What is published, asked or handled on it is the bus's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rowmill.runtime import metrics
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.publishing import DELETION_SECONDS
from rowmill.runtime.session import Session, Subscription
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.transport import TRANSPORT_ERRORS, redacted

log = structlog.get_logger()

SETTLED_SECONDS: Final = 5.0
"""A session that lasts less counts as a failure: the next one is not tried at once."""

CLOSE_SECONDS: Final = 5.0
"""How long the end waits for sessions that are still closing."""


class Sessions:
    """``prepare``: attaches what is not a subscription to a new session. ``began``: told of each session once it is up.
    ``refuses``: told whether the broker takes no messages (an alarm), whenever that was looked at.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        clock: Clock,
        *,
        service: str,
        prepare: Callable[[Session], Awaitable[None]],
        began: Callable[[], None],
        refuses: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._service = service
        self._prepare = prepare
        self._began = began
        self._refuses = refuses
        self._session: Session | None = None
        self._up = asyncio.Event()
        self._subscriptions: dict[str, Subscription] = {}
        self._stepping_back = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._closings: set[asyncio.Task[None]] = set()
        self._ending = False
        self._is_up = metrics.SESSION_UP.labels(service)
        self._blocked = metrics.BLOCKED.labels(service)

    @property
    def current(self) -> Session | None:
        """The session that is up, as far as is known."""
        session = self._session
        return session if session is not None and self._up.is_set() and not session.ended.is_set() else None

    async def live(self) -> Session:
        """The session that is up, as soon as one is."""
        while True:
            await self._up.wait()
            if (session := self.current) is not None:
                return session
            await asyncio.sleep(0.01)

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="bus")

    def begin_end(self) -> None:
        """From now on a session that ends is the last one."""
        self._ending = True

    async def detach(self) -> None:
        """Stop consuming every subscription but those that go on to the end; what was delivered is still handled."""
        if (session := self.current) is not None:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                ending = [queue for queue, subscription in self._subscriptions.items() if not subscription.to_the_end]
                await asyncio.gather(*(session.cancel(queue) for queue in ending))

    async def close(self) -> None:
        """End the session and the work of making new ones."""
        session = self._session
        if session is not None:
            session.end("closed by us")  # ends the watch also where the library swallows the cancellation (`asyncio.wait_for` before 3.12)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        if session is not None:
            await session.close()
        if self._closings:
            await asyncio.wait(set(self._closings), timeout=CLOSE_SECONDS)
        self._session = None
        self._up.clear()

    # ---- what is consumed -------------------------------------------------------------------------------------------------------------

    async def subscribe(self, subscription: Subscription) -> None:
        """Consume from now on and in every session to come."""
        self._subscriptions[subscription.queue] = subscription
        session = self._session
        if session is not None and not session.ended.is_set():
            await self._attach(session, subscription)

    async def step_back(self, queue: str) -> None:
        """Consume a queue that serves one consumer at a time behind all who wait at it; what was delivered is still handled. One after the other: of
        two at once each would attach a consumer, and only one of these would be known.
        """
        async with self._stepping_back:
            subscription, session = self._subscriptions.get(queue), self._session
            if subscription is None or session is None or session.ended.is_set():
                return  # the next session comes last anyway
            await self._attach(session, subscription, again=True)
            if self._subscriptions.get(queue) is not subscription:
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await session.cancel(queue)

    async def _attach(self, session: Session, subscription: Subscription, *, again: bool = False) -> None:
        try:
            if again:
                await session.cancel(subscription.queue)
            await session.consume(subscription)
        except Exception as error:  # whatever a dying connection makes of it: a service that is about to start must not end of it
            expected = isinstance(error, TRANSPORT_ERRORS)
            log.warning("consume_postponed", queue=subscription.queue, error=repr(error), exc_info=None if expected else error)
            session.end(error)  # the next session attaches every subscription

    async def unsubscribe(self, queue: str) -> None:
        """Detach from one queue; what was delivered is still handled."""
        self._subscriptions.pop(queue, None)
        if self._session is not None:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                await self._session.cancel(queue)

    # ---- one after another ------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while not self._ending:
            try:
                session = await self._new()
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
            await self._live_through(session)
            if not self._ending:
                log.warning("broker_session_lost", error=str(session.reason))
                failures = failures + 1 if self._clock.monotonic() - started < SETTLED_SECONDS else 0
                pause = DELETION_SECONDS if session.cancelled else 0.0
                await self._clock.sleep(max(pause, backoff(failures, first=0.1, limit=5.0) if failures else 0.0))

    async def _new(self) -> Session:
        """A session with everything attached that is subscribed by then."""
        session = await Session.open(
            self._settings.broker_url,
            name=f"rowmill {self._service}",
            heartbeat=self._settings.heartbeat_seconds,
            delay_scale=self._settings.time_scale,
            clock=self._clock,
        )
        try:
            await self._prepare(session)
            prepared = set(session.attached)
            while missing := [subscription for queue, subscription in self._subscriptions.items() if queue not in session.attached]:
                for subscription in missing:
                    await session.consume(subscription)
            for queue in session.attached - self._subscriptions.keys() - prepared:
                await session.cancel(queue)
        except BaseException:
            self._close_soon(session)
            raise
        return session

    async def _live_through(self, session: Session) -> None:
        """Return when the session has ended; look meanwhile whether it still does what it is for, and end it if not."""
        self._session = session
        self._up.set()
        self._is_up.set(1)
        metrics.SESSIONS.labels(self._service).inc()
        try:
            self._began()
            while not session.ended.is_set():
                try:
                    async with asyncio.timeout(self._settings.watch_interval):
                        await session.ended.wait()
                except TimeoutError:
                    wrong = await session.look()
                    self._blocked.set(int(session.blocked))
                    self._refuses(session.blocked)
                    if wrong is not None:
                        session.end(wrong)
        finally:
            self._up.clear()
            self._session = None
            self._is_up.set(0)
            self._blocked.set(0)
            self._refuses(False)
            self._close_soon(session)

    def _close_soon(self, session: Session) -> None:
        task = asyncio.create_task(session.close())
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)
