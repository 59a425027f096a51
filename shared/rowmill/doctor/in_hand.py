"""What is in hand: every service is asked, and what is found is in hand for too long, or in nobody's hand (docs/adr/0027)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage

from rowmill.doctor.findings import Finding
from rowmill.runtime.clock import new_id
from rowmill.runtime.transport import AsTransportErrors, BrokerConnection, answer_awaited
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import UndecodableMessage, encode
from rowmill_contracts.in_hand import AskInHand, InHandShown, LateMessage, QueueInHand
from rowmill_contracts.topology import CONTROL, WORK_QUEUES, suspect

ANSWER_SECONDS: Final = 0.7
"""How long who consumes is waited for. Nobody else is: as soon as there are as many answers as consumers, no more are to come."""

APART_SECONDS: Final = 1.1
"""Seconds between two looks: our brokers note every second what is unacknowledged, so each look is at another count. Until then answers still
count that come late.
"""

AGAIN_SECONDS: Final = 0.4
"""How long who has not answered by then is waited for in each further look."""

ASTRAY_SECONDS: Final = 8.0
"""For how long something is looked for that nobody seems to have: author code that blocks for a moment holds up its process, which is silent until
then, and well. Whoever is silent for longer the broker soon takes for gone, by its heartbeats, and delivers again what it had.
"""

Listed = Mapping[str, tuple[int, int]]
"""(messages, unacknowledged ones among them) of every queue, as the broker noted them last."""

_NAMES: Final = tuple(name for work in WORK_QUEUES for name in (work.name, suspect(work.name)))
_BLOCKED: Final = "The broker takes no messages at present; until it does, what is in hand stays there, and nobody can be asked for it."
_OUTAGE: Final = (
    "See to what is away. Nothing is lost, and what waits for that goes on when it is back. Whether anything hangs besides cannot be told before: "
    "what then stays in hand does, and is found."
)
_AGAIN: Final = "what was in its hand is delivered again, and has one effect."


@dataclass
class InHandLooked:
    """Who answered, what is wrong, and how the broker counted last; None: it was not asked."""

    answers: list[InHandShown] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    listed: Listed | None = None


async def look(connection: AbstractConnection, consumers: Mapping[str, int], count: Callable[[], Awaitable[Listed]] | None = None) -> InHandLooked:
    """Ask all and judge. ``consumers``: of each work queue, as the broker says. ``count``: has the broker count. Raises what the transport raises.

    Takes as long as they take to answer, `ANSWER_SECONDS` where one of them does not; and where the broker counts more than they have, further looks,
    until one shows that somebody has it or `ASTRAY_SECONDS` are over. What is found is what all of them showed.
    """
    time = asyncio.get_running_loop().time
    over_at = time() + ASTRAY_SECONDS
    listed = None if count is None else await count()
    again_at = time() + APART_SECONDS
    async with _Asking(connection, consumers) as asking:
        answers = await asking.ask(ANSWER_SECONDS)
        astray = unaccounted(listed or {}, answers)
        while astray and count is not None:
            await asyncio.sleep(again_at - time())
            listed = await count()
            again_at = time() + APART_SECONDS
            answers = await asking.ask(AGAIN_SECONDS)
            again = unaccounted(listed, answers)
            astray = {queue: min(messages, again[queue]) for queue, messages in astray.items() if queue in again}
            if time() >= over_at:
                break
    if isinstance(connection, BrokerConnection) and await connection.is_blocked():
        return InHandLooked(answers, [Finding("outage", _BLOCKED, "Free memory or disk on its machine; its log says which is short.")], listed)
    return InHandLooked(answers, [*late(answers), *lost(astray, consumers, answers)], listed)


class _Asking:
    """A channel of our own that answers come by."""

    def __init__(self, connection: AbstractConnection, consumers: Mapping[str, int]) -> None:
        self._connection = connection
        self._consumers = consumers
        self._answers: dict[str, InHandShown] = {}
        self._question = ""
        self._answered: set[str] = set()
        self._heard = asyncio.Event()
        self._channel: AbstractChannel | None = None
        self._exchange: AbstractExchange | None = None
        self._reply_to = f"replies.doctor.{new_id()}"

    async def __aenter__(self) -> Self:
        if any(self._consumers.values()):
            async with answer_awaited():
                self._channel = await self._connection.channel(publisher_confirms=False)
                replies = await self._channel.declare_queue(self._reply_to, exclusive=True, auto_delete=True)
                await replies.consume(self._collect, no_ack=True)
                self._exchange = await self._channel.get_exchange(CONTROL, ensure=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            async with answer_awaited():
                await self._channel.close()

    async def _collect(self, incoming: AbstractIncomingMessage) -> None:
        try:
            shown = decode(incoming.type, incoming.body)
        except UndecodableMessage:
            return  # of another version, and so as good as silent
        if isinstance(shown, InHandShown):
            self._answers[shown.process] = shown
            if incoming.correlation_id == self._question:
                self._answered.add(shown.process)
            self._heard.set()

    async def ask(self, patience: float) -> list[InHandShown]:
        """The newest answer of everybody who ever gave one, after ``patience`` seconds at most."""
        if self._exchange is None:
            return []
        self._question = new_id()
        self._answered.clear()
        question = aio_pika.Message(
            encode(AskInHand()),
            type=AskInHand.message_type,
            content_type="application/json",
            message_id=self._question,
            correlation_id=self._question,
            reply_to=self._reply_to,
        )
        try:
            async with asyncio.timeout(patience):
                with AsTransportErrors():
                    await self._exchange.publish(question, "", mandatory=False)
                while not all_answer(self._consumers, [self._answers[process] for process in self._answered]):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            pass
        return list(self._answers.values())


# ---- judging --------------------------------------------------------------------------------------------------------------------------


def answering(queue: str, answers: Collection[InHandShown]) -> int:
    """How many of those who answered count as consumers of that queue at the broker: who takes no more does until its hand is empty, too."""
    return sum(each.queue == queue and (each.consumed or each.messages > 0) for shown in answers for each in shown.queues)


def all_answer(consumers: Mapping[str, int], answers: Collection[InHandShown]) -> bool:
    return all(answering(queue, answers) >= expected for queue, expected in consumers.items() if expected)


def unaccounted(listed: Listed, answers: Collection[InHandShown]) -> dict[str, int]:
    """Messages that the broker counts as unacknowledged and that nobody who answers had in hand in the last seconds, by queue."""
    had: dict[str, int] = {}
    for shown in answers:
        for each in shown.queues:
            had[each.queue] = had.get(each.queue, 0) + each.peak
    surplus = {queue: listed.get(queue, (0, 0))[1] - had.get(queue, 0) for queue in _NAMES}
    return {queue: messages for queue, messages in surplus.items() if messages > 0}


def late(answers: Collection[InHandShown]) -> list[Finding]:
    """What is in hand past its deadline, and what would be, if something were not away."""
    return [finding for shown in answers for each in shown.queues for finding in _late(shown, each)]


def _late(shown: InHandShown, each: QueueInHand) -> list[Finding]:
    who, right = f"{shown.service} (process {shown.process}, {shown.place})", _seconds(each.deadline)
    found = []
    if each.overdue:
        what, oldest = _what(each.overdue, each.queue, [message for message in each.late if not message.kept])
        problem = f"{what} been in hand of {who} for {oldest}; at most {right} is right."
        found.append(Finding("in hand", problem, f"Look into its log what it does with that. If it lasts, restart that process: {_AGAIN}"))
    if each.kept:
        what, oldest = _what(each.kept, each.queue, [message for message in each.late if message.kept])
        away = "; ".join(f"{missing.what}, for {_seconds(missing.seconds)}" for missing in shown.away) or "what its handlers need"
        problem = f"{what} been in hand of {who} for {oldest}, where {right} would be right, while it is without {away}."
        found.append(Finding("outage", problem, _OUTAGE))
    return found


def _what(messages: int, queue: str, named: Sequence[LateMessage]) -> tuple[str, str]:
    """The messages as the beginning of a sentence, and the age of the oldest."""
    oldest = _seconds(named[0].seconds) if named else "long"
    if messages == 1 and named:
        return f"A message of {queue}, {_named(named[0])}, has", oldest
    return f"{_counted(messages)} of {queue}, the oldest {', '.join(_named(message) for message in named)}, have", oldest


def _named(message: LateMessage) -> str:
    run = f", run {message.run_id}" if message.run_id else ""
    return f"{message.message_type or 'a message without a type'} (id {message.message_id or 'none'}{run})"


def _counted(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def lost(astray: Mapping[str, int], consumers: Mapping[str, int], answers: Collection[InHandShown]) -> list[Finding]:
    """What is in the hand of nobody who answers. ``astray``: see `unaccounted`."""
    found = []
    for queue, messages in astray.items():
        work = queue.removesuffix(".suspect")
        there = consumers.get(work, 0)
        silent = there - answering(work, answers)
        are, them = ("is", "it") if messages == 1 else ("are", "them")
        problem = f"{_counted(messages)} of {queue} {are} unacknowledged, and nobody who answers has {them} in hand."
        if silent > 0:
            advice = f"{silent} of the {there} who consume {work} do not answer: frozen, held up by author code, or not of rowmill. "
            advice += f"If that lasts, restart who it is: {_AGAIN}"
        else:
            advice = f"Held by a program that is not of rowmill, or by one that is gone. If that lasts, close its connection to the broker: {_AGAIN}"
        found.append(Finding("in hand", problem, advice))
    return found
