"""Which messages a process has in hand, and since when: from their delivery until they are acknowledged, or their session ended.

A session that ended gives its messages back to the broker: they are in hand no more, though a handler may still run for one. Here is what happens for
each message: an insertion into a dict and a removal. All else is worked out when somebody asks (`MessagesInHand.shown`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from aio_pika.abc import AbstractIncomingMessage

from rowmill.runtime.clock import Clock
from rowmill.runtime.outages import Outages
from rowmill.runtime.session import Session
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import UndecodableMessage
from rowmill_contracts.in_hand import Away, InHandShown, LateMessage, QueueInHand

NAMED: Final = 5
"""Late messages of a queue that are named at most, of those that are overdue and of those that are kept."""

TOLD: Final = 200
"""Characters of a type, an id or a run that are told at most: strangers may have written them."""

READ_BYTES: Final = 64 * 1024
"""Bodies up to this size are read for their run."""

PEAK_SECONDS: Final = 3.0
"""For how long at least a peak is remembered, at most for twice that: the broker's counts are up to a second old, and fetching them takes time."""


class Held:
    """A message in hand. ``came``: on the clock's monotonic time. ``excused``: seconds that its handler waited for what was away, as far as it said
    so, which never count. ``waits_until``: when it must have said so again, or it works.
    """

    __slots__ = ("came", "excused", "incoming", "waits_until")

    def __init__(self, incoming: AbstractIncomingMessage, came: float) -> None:
        self.incoming = incoming
        self.came = came
        self.excused = 0.0
        self.waits_until = came

    def waits(self, tried: float, pause: float, now: float) -> None:
        """Its handler tried for ``tried`` seconds, said that something is away, and tries again after ``pause`` seconds. If that takes longer than it
        took the last time, it has got what it waited for.
        """
        self.excused += tried + pause
        self.waits_until = now + pause + tried


class HeldMessages:
    """Messages of one queue that came by one session, in the order in which they came. ``ended``: that session's end, all that is kept of it."""

    __slots__ = ("_former_peak", "_held", "_peak", "_peak_until", "ended")

    def __init__(self, ended: asyncio.Event) -> None:
        self.ended = ended
        self._held: dict[Held, None] = {}
        self._peak = self._former_peak = 0
        self._peak_until = 0.0

    def take(self, incoming: AbstractIncomingMessage, now: float) -> Held:
        held = Held(incoming, now)
        self._held[held] = None
        if now >= self._peak_until:
            self._turn(now)
        elif len(self._held) > self._peak:
            self._peak = len(self._held)
        return held

    def leave(self, held: Held) -> None:
        """It is acknowledged, or as good as."""
        del self._held[held]

    def _turn(self, now: float) -> None:
        """Count the peak anew, and forget the one before the last."""
        self._former_peak = self._peak if now < self._peak_until + PEAK_SECONDS else len(self._held)
        self._peak, self._peak_until = len(self._held), now + PEAK_SECONDS

    def shown(self, queue: str, deadline: float, now: float, outages: Outages, *, consumed: bool) -> QueueInHand:
        if now >= self._peak_until:
            self._turn(now)
        if self.ended.is_set():
            return QueueInHand(queue=queue, deadline=deadline, consumed=consumed)
        overdue = kept = 0
        oldest: float | None = None
        late: list[LateMessage] = []
        away = bool(outages.away())
        for held in self._held:
            age = now - held.came
            if oldest is None:
                oldest = round(age, 1)
            if age <= deadline:
                break  # those after it came later
            if age - max(held.excused, outages.within(held.came)) > deadline:
                overdue += 1
                if overdue <= NAMED:
                    late.append(_named(held.incoming, age, kept=False))
            elif away or now < held.waits_until:
                kept += 1
                if kept <= NAMED:
                    late.append(_named(held.incoming, age, kept=True))
        return QueueInHand(
            queue=queue,
            deadline=deadline,
            consumed=consumed,
            messages=len(self._held),
            peak=max(self._peak, self._former_peak),
            oldest=oldest,
            overdue=overdue,
            kept=kept,
            late=late,
        )


class MessagesInHand:
    """All that one service has in hand in this process."""

    def __init__(self, service: str, process: str, clock: Clock, outages: Outages) -> None:
        self._service = service
        self._process = process
        self._clock = clock
        self._outages = outages
        self._deadlines: dict[str, float] = {}
        self._consumed: dict[str, None] = {}
        self._by_queue: dict[str, HeldMessages] = {}

    def serve(self, queue: str, deadline: float, *, consumed: bool = True) -> None:
        """Messages of that queue may be in hand for so long. ``consumed``: it has a consumer of ours at the broker."""
        self._deadlines[queue] = deadline
        if consumed:
            self._consumed[queue] = None

    def leave(self, queue: str) -> None:
        """No more of that queue come."""
        self._consumed.pop(queue, None)

    def of(self, session: Session, queue: str) -> HeldMessages:
        """Where messages of that queue are kept that come by that session."""
        hand = self._by_queue.get(queue)
        if hand is not None and hand.ended is session.ended:
            return hand
        new = HeldMessages(session.ended)
        if hand is None or not session.ended.is_set():  # one that comes late by a session before is in nobody's hand
            self._by_queue[queue] = new
        return new

    def shown(self) -> InHandShown:
        """What is in hand now."""
        now = self._clock.monotonic()
        queues = []
        for queue, deadline in self._deadlines.items():
            consumed, hand = queue in self._consumed, self._by_queue.get(queue)
            if hand is not None:
                shown = hand.shown(queue, deadline, now, self._outages, consumed=consumed)
            else:
                shown = QueueInHand(queue=queue, deadline=deadline, consumed=consumed)
            if consumed or shown.peak:
                queues.append(shown)
        return InHandShown(
            service=self._service,
            process=self._process,
            place=f"{socket.gethostname()}:{os.getpid()}",
            queues=queues,
            away=[Away(what=what, seconds=round(seconds, 1)) for what, seconds in self._outages.away().items()],
        )


def _named(incoming: AbstractIncomingMessage, age: float, *, kept: bool) -> LateMessage:
    return LateMessage(
        message_type=_told(incoming.type or ""),
        message_id=_told(incoming.message_id or ""),
        seconds=round(age, 1),
        run_id=_run_of(incoming),
        kept=kept,
    )


def _run_of(incoming: AbstractIncomingMessage) -> str | None:
    if len(incoming.body) > READ_BYTES:
        said = incoming.correlation_id  # of a page this is its run
        return _told(said) if said and said != incoming.message_id else None
    try:
        run_id = getattr(decode(incoming.type, incoming.body), "run_id", None)
    except UndecodableMessage:
        return None
    return _told(run_id) if isinstance(run_id, str) and run_id else None


def _told(text: str) -> str:
    """What others wrote, as it may be shown anywhere."""
    printable = "".join(character if character.isprintable() else "?" for character in text[:TOLD])
    return printable if len(text) <= TOLD else f"{printable}…"
