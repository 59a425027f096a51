"""Questions: how they are asked, who waits for which reply, what it takes to ask again. Knows no connection; the bus publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog

from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import Message, UndecodableMessage, encode

log = structlog.get_logger()

ReplyT = TypeVar("ReplyT", bound=Message)

PARTED_AFTER: Final = 3
"""Tries of a page of several items that ended in a dead letter, or in an error that nobody foresaw, after which they are asked for one by one."""
GIVEN_UP_AFTER: Final = 10
"""The same of a single item, after which nobody is taken to survive it: it must not hold up what comes after it for ever."""


def tries_of(page: Sized) -> int:
    """How often a page is tried that ends in such errors."""
    return PARTED_AFTER if len(page) > 1 else GIVEN_UP_AFTER


class AskBus(Protocol):
    """The bus, as far as it asks questions (`rowmill.runtime.bus.Bus.ask`)."""

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT: ...


@dataclass(frozen=True)
class Ask:
    """One open question. ``request_id`` is its message id and the correlation id of its reply, however often it is asked."""

    request_id: str
    answered: asyncio.Future[Message]
    body: bytes
    message_type: str
    key: str


class Asks:
    """All open questions of a process, and the callbacks for replies that nobody waits for by their id."""

    def __init__(self) -> None:
        self._open: dict[str, Ask] = {}
        self._callbacks: dict[str, Callable[[Message], None]] = {}

    @contextmanager
    def open(self, request_id: str, message: Message, key: str) -> Iterator[Ask]:
        """A question that stays open for the block."""
        ask = self._open[request_id] = Ask(request_id, asyncio.get_running_loop().create_future(), encode(message), message.message_type, key)
        try:
            yield ask
        finally:
            del self._open[request_id]

    def unanswered(self) -> list[Ask]:
        return [ask for ask in self._open.values() if not ask.answered.done()]

    def on_reply(self, message: type[ReplyT], callback: Callable[[ReplyT], None]) -> None:
        self._callbacks[message.message_type] = callback  # type: ignore[assignment]

    def received(self, wire_type: str | None, body: bytes, correlation_id: str) -> None:
        """A reply came in. One that nobody waits for any more is dropped."""
        try:
            message = decode(wire_type, body)
        except UndecodableMessage as error:
            log.warning("reply_undecodable", error=str(error))
            return
        ask = self._open.get(correlation_id)
        if ask is not None:
            if not ask.answered.done():
                ask.answered.set_result(message)
        elif (callback := self._callbacks.get(message.message_type)) is not None:
            callback(message)
