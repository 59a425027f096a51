"""Getting dead letters from where they lie: looked at, replayed, purged.

Everything that is got and not acknowledged goes back when the connection closes, so nothing is lost however a command ends. A look is bounded by how
many letters lay in a queue when it began: what dies meanwhile is left for the next. A letter may lie there more than once
(docs/adr/0021-copies-of-dead-letters.md): its copies are looked at, replayed and purged as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity, DeliveryError

from rowmill.client.dead_letters import DeadLetter, Filter, letter_of
from rowmill.client.replaying import refusal, replayed
from rowmill.errors import ReplayStopped, UnavailableError
from rowmill.runtime.clock import Clock, SystemClock, new_id
from rowmill.runtime.deliveries import REPLAYED
from rowmill.runtime.transport import TRANSPORT_ERRORS, AsTransportErrors, close, connect, redacted
from rowmill_contracts.topology import dead

ANSWER_SECONDS: Final = 30.0
"""How long the broker may take for one step (connect, get, confirm)."""

HEARTBEAT_SECONDS: Final = 10

Report = Callable[["Replay"], None]
"""Told after each letter that was looked at."""


@dataclass
class Replay:
    """How a replay went so far. ``found``: letters in the queues when it began, less the copies that were met by now. ``refused``: letters left where
    they lie, by the reason why.
    """

    found: int = 0
    looked_at: int = 0
    replayed: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, letter: DeadLetter, reason: str) -> None:
        line = f"{letter.message_type or 'a message without type'}: {reason}"
        self.refused[line] = self.refused.get(line, 0) + 1


@dataclass(frozen=True)
class Got:
    """A letter in our hands: ours until it is acknowledged or the connection closes."""

    letter: DeadLetter
    message: AbstractIncomingMessage


class LetterBox:
    """The ``.dead`` queues over one connection. Use `letter_box`."""

    def __init__(self, channel: AbstractChannel, clock: Clock, broker: str) -> None:
        self.copies = 0
        """Messages that were got and are copies of a letter that was got before."""
        self._channel = channel
        self._clock = clock
        self._broker = broker
        self._replay = new_id()
        self._in_hand: dict[str, list[Callable[[], Awaitable[object]]]] = {}
        self._yielded: set[str] = set()
        self._taken: set[str] = set()

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        """One step of the broker's, bounded."""
        try:
            with AsTransportErrors():
                async with asyncio.timeout(ANSWER_SECONDS):
                    yield
        except (ChannelNotFoundEntity, DeliveryError):
            raise
        except TRANSPORT_ERRORS as error:
            raise UnavailableError(f"the broker at {self._broker} went away: {error or error!r}; letters in hand lie where they lay") from error

    async def depth(self, chosen: Filter) -> int:
        """Messages that lie in the queues in question, copies of letters among them."""
        return sum([count for _, count in await self._depths(chosen)])

    async def _depths(self, chosen: Filter) -> list[tuple[str, int]]:
        found = []
        for name in chosen.queues():
            try:
                async with self._step():
                    queue = await self._channel.declare_queue(dead(name), passive=True)
            except ChannelNotFoundEntity as error:
                raise UnavailableError(
                    f"there is no queue {dead(name)} on this broker: no rowmill service has run here yet (`rowmill up` starts them)"
                ) from error
            found.append((name, queue.declaration_result.message_count or 0))
        return found

    async def letters(self, chosen: Filter, on_look: Callable[[], None] = lambda: None) -> AsyncIterator[Got]:
        """The letters that are meant, oldest first in each queue, each once. ``on_look``: called after each that was looked at, meant or not.

        To be iterated once: what was yielded is in our hands.
        """
        for name, lying in await self._depths(chosen):
            queue = await self._channel.get_queue(dead(name), ensure=False)
            for _ in range(lying):
                async with self._step():
                    message = await queue.get(fail=False)
                if message is None:
                    break
                if (message.headers or {}).get(REPLAYED) == self._replay:
                    continue  # a letter that we replayed has died again meanwhile; only its new copy says so, so it stays
                letter = letter_of(name, message)
                known = letter.identity in self._in_hand or letter.identity in self._taken
                self.copies += known
                tag = message.delivery_tag or 0
                self._in_hand.setdefault(letter.identity, []).append(partial(message.channel.basic_ack, tag))  # without the message: it may be large
                if letter.identity in self._taken:
                    await self.take([letter.identity])
                elif letter.identity not in self._yielded and chosen.fits(letter, self._clock.now()):
                    self._yielded.add(letter.identity)
                    yield Got(letter, message)
                on_look()

    async def take(self, identities: Iterable[str]) -> None:
        """Remove letters that were got from their queues for good, with all their copies: those got before, and those yet to come."""
        for identity in identities:
            self._taken.add(identity)
            for acknowledge in self._in_hand.pop(identity, []):
                async with self._step():
                    await acknowledge()

    async def finish(self) -> None:
        """Return when the broker has seen all that was taken."""
        async with self._step():
            await self._channel.close()

    async def replay(self, chosen: Filter, *, per_second: float | None = None, dry_run: bool = False, report: Report = lambda _: None) -> Replay:
        """Publish each letter that is meant to where it had been published, and only after the confirm take it from its queue.

        Ended half-way, what is published and still lies there will be published again at the next replay, under the same id: all handlers may see
        a message twice. ``per_second``: at most so many. With ``dry_run`` nothing is published.

        Raises:
            ReplayStopped: the broker did not take a letter; it and those after it still lie where they lay.

        """
        lying, got_so_far = await self.depth(chosen), 0
        replay = Replay(found=lying)
        interval = 1 / per_second if per_second else 0.0
        due = self._clock.monotonic()

        def looked() -> None:
            nonlocal got_so_far
            got_so_far += 1
            replay.found, replay.looked_at = lying - self.copies, got_so_far - self.copies
            report(replay)

        async for got in self.letters(chosen, looked):
            reason = refusal(got.letter)
            if reason is not None:
                replay.refuse(got.letter, reason)
                continue
            if not dry_run:
                await self._clock.sleep(max(0.0, due - self._clock.monotonic()))
                due = max(due, self._clock.monotonic() - interval) + interval
                await self._publish(got, replay)
                await self.take([got.letter.identity])
            replay.replayed += 1
        return replay

    async def _publish(self, got: Got, replay: Replay) -> None:
        letter = got.letter
        try:
            exchange = await self._channel.get_exchange(letter.exchange, ensure=False)
            async with self._step():
                await exchange.publish(replayed(got.message, self._replay), letter.key, mandatory=True)
        except (DeliveryError, UnavailableError) as error:
            why = f"nothing is bound to key {letter.key!r}, or its queue is full" if isinstance(error, DeliveryError) else str(error)
            raise ReplayStopped(
                f"letter {letter.message_id} of {dead(letter.queue)} was not taken: {why}. {replay.replayed} were replayed before it; "
                "it and the others still lie where they lay, so replay again"
            ) from error


@asynccontextmanager
async def letter_box(broker_url: str, *, clock: Clock | None = None) -> AsyncIterator[LetterBox]:
    """Dead letters of the broker at that URL, for a block.

    Raises:
        UnavailableError: no broker answers, or it went away.

    """
    try:
        connection = await connect(broker_url, name="rowmill dlq", heartbeat=HEARTBEAT_SECONDS, timeout=ANSWER_SECONDS)
    except TRANSPORT_ERRORS as error:
        raise UnavailableError(f"no broker answers at {redacted(broker_url)}: {error or error!r}") from error
    try:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        box = LetterBox(channel, clock or SystemClock(), redacted(broker_url))
        yield box
        await box.finish()
    finally:
        await close(connection)


async def dead_letters(broker_url: str, chosen: Filter | None = None, *, limit: int | None = None) -> list[DeadLetter]:
    """Dead letters that are meant (all of them), oldest first in each queue, ``limit`` at most. They go back where they lay.

    Raises:
        UnavailableError: no broker answers, or no service has run on it yet. UnknownName: there is no such queue.

    """
    found: list[DeadLetter] = []
    async with letter_box(broker_url) as box:
        async for got in box.letters(chosen or Filter()):
            found.append(got.letter)
            if limit is not None and len(found) >= limit:
                break
    return found
