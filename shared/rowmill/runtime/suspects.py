"""Handling suspects: messages that may have crashed their consumers, one at a time with nothing else of their queue running in this process.

A suspect is fetched, not consumed: only once this process is idle on its queue, and on those that share its gate, so that a crash is its own and no
bystander's. What becomes of it is decided in `rowmill.runtime.suspicion` and carried out by `rowmill.runtime.handling`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.errors import RowmillError
from rowmill.runtime.gates import Gate
from rowmill.runtime.handling import Handler, Handling, Undecodable
from rowmill.runtime.session import Session
from rowmill.runtime.transport import TRANSPORT_ERRORS
from rowmill_contracts.topology import suspect

log = structlog.get_logger()

HAND_BACK_SECONDS = 5.0

CANCEL_SECONDS = 1.0
"""How long what is cancelled may take to its end before its suspect is put back beside it."""

LOOK_SECONDS = 2.0
"""How long a question to the broker that is under way may take to its end when we stop."""


class Sessions(Protocol):
    """The part of the bus that suspects come by."""

    async def live_session(self) -> Session:
        """The session that is up, as soon as one is."""

    async def declare(self) -> None:
        """Declare what is missing at the broker."""


@dataclass(frozen=True)
class _Served:
    """A work queue whose suspects this process handles, whenever ``may_take`` says so."""

    queue: str
    handler: Handler
    undecodable: Undecodable
    may_take: Callable[[], bool]
    watched: bool


@dataclass(frozen=True)
class _InHand:
    session: Session
    incoming: AbstractIncomingMessage
    handling: asyncio.Task[None]


class Suspects:
    """``poll``: seconds between looks. ``alone``: seconds that others at the gate wait at most for a suspect to begin, then for others of its queue
    that are handled before and after it, and then for the last one's end.
    """

    def __init__(self, sessions: Sessions, handling: Handling, *, alone: float, poll: float) -> None:
        self._sessions = sessions
        self._handling = handling
        self._alone = alone
        self._poll = poll
        self._served: dict[str, _Served] = {}
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._in_hand: dict[str, _InHand] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        self._loop = asyncio.create_task(self._look_for_ever(), name="suspects")

    def serve(self, queue: str, handler: Handler, undecodable: Undecodable, may_take: Callable[[], bool], *, watched: bool) -> None:
        """Handle the suspects of this queue, too."""
        self._served[queue] = _Served(queue, handler, undecodable, may_take, watched)
        self.look_now()

    def leave(self, queue: str) -> None:
        """Take no more suspects of this queue; one in hand is still handled."""
        self._served.pop(queue, None)

    def look_now(self) -> None:
        self._wake.set()

    async def stop(self, timeout: float) -> None:
        """Take no more, let those in hand end; what is not over by ``timeout`` seconds is handed back, as no crash."""
        self._stopping = True
        self._wake.set()
        asking = [*([self._loop] if self._loop is not None else []), *(task for queue, task in self._taking.items() if queue not in self._in_hand)]
        if asking:  # a question to the broker that is broken off costs the connection, and with it what others have in hand
            await asyncio.wait(asking, timeout=min(timeout, LOOK_SECONDS))
        await _end([task for task in asking if task not in {self._taking.get(queue) for queue in self._in_hand}])
        if self._in_hand:
            await asyncio.wait([held.handling for held in self._in_hand.values()], timeout=timeout)
        left = [(queue, held) for queue, held in self._in_hand.items() if not held.handling.done()]
        for _, held in left:
            held.handling.cancel()
        if left:
            await asyncio.wait([held.handling for _, held in left], timeout=CANCEL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await asyncio.gather(*(self._hand_back(queue, held) for queue, held in left if not held.session.ended.is_set()))
        await _end(list(self._taking.values()))

    async def _hand_back(self, queue: str, held: _InHand) -> None:
        await self._handling.hand_back(held.session, queue, held.incoming)

    # ---- looking ----------------------------------------------------------------------------------------------------------------------

    async def _look_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll):
                    await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            try:
                await self._look()
                continue
            except (*TRANSPORT_ERRORS, RowmillError) as error:
                log.info("suspects_not_looked_for", error=repr(error))
            except Exception:  # nothing may end this loop: suspects would lie for ever
                log.exception("suspects_not_looked_for")
                continue
            if not self._stopping:  # outside of the handler: its error would keep the session that is over for as long as this one waits
                with contextlib.suppress(*TRANSPORT_ERRORS):
                    await self._sessions.declare()

    async def _look(self) -> None:
        free = {suspect(queue): served for queue, served in self._served.items() if queue not in self._taking and served.may_take()}
        if not free:
            return
        session = await self._sessions.live_session()
        for name, (ready, _) in (await session.depths(list(free))).items():
            if ready:
                self._begin(free[name])

    def _begin(self, served: _Served) -> None:
        taking = self._taking[served.queue] = asyncio.create_task(self._take(served), name=f"suspect of {served.queue}")

        def over(done: asyncio.Task[None]) -> None:
            del self._taking[served.queue]
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                log.warning("suspect_not_taken", queue=served.queue, error=repr(error))
            elif not self._stopping:
                self.look_now()

        taking.add_done_callback(over)

    async def _take(self, served: _Served) -> None:
        """Handle suspects of a queue, one after the other, for as long as others may be kept waiting; the last of them to its end."""
        loop, gate, held = asyncio.get_running_loop(), self._handling.gate(served.queue), None
        try:
            async with gate.closed():
                if not await self._is_alone(gate, served):
                    return
                until = loop.time() + self._alone
                while loop.time() < until and (held := await self._fetched(served, gate)) is not None:
                    await asyncio.wait([held.handling], timeout=self._alone)
                    if not held.handling.done():
                        break
                    self._leave(served.queue, held)
            if held is not None and self._in_hand.get(served.queue) is held:
                await asyncio.wait([held.handling])
                self._leave(served.queue, held)
        finally:
            self._in_hand.pop(served.queue, None)

    async def _is_alone(self, gate: Gate, served: _Served) -> bool:
        """Whether to take a suspect now: all others are out, or were waited for long enough. Not where somebody else has taken it meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._alone
        while (left := until - loop.time()) > 0 and not await gate.idle(min(left, self._poll, LOOK_SECONDS / 2)):
            session = await self._sessions.live_session()
            if self._stopping or not (await session.depths([suspect(served.queue)]))[suspect(served.queue)][0]:
                return False
        return True

    async def _fetched(self, served: _Served, gate: Gate) -> _InHand | None:
        """The queue's next suspect, whose handling has begun, behind the gate; None where there is none, or it is not for us."""
        if self._stopping or self._served.get(served.queue) is not served or not served.may_take():
            return None
        session = await self._sessions.live_session()
        incoming = await session.get(suspect(served.queue))
        if incoming is None or self._stopping:
            return None
        handling = asyncio.create_task(
            self._handling.handle_suspect(session, served.queue, served.handler, incoming, served.undecodable, watched=served.watched)
        )
        gate.let_in()
        handling.add_done_callback(lambda _: gate.leave())
        held = self._in_hand[served.queue] = _InHand(session, incoming, handling)
        return held

    def _leave(self, queue: str, held: _InHand) -> None:
        """Its handling has ended. Raises what that raised."""
        del self._in_hand[queue]
        if not held.handling.cancelled() and (error := held.handling.exception()) is not None:
            held.session.end(error)  # nobody has it in hand now, and nobody else is given it before the session ends
        held.handling.result()


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel until each has ended: the broker's client may swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)
