"""What is published again, and as what, while nobody says that it arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import aio_pika
import pytest
from aiormq import spec
from aiormq.exceptions import DeliveryError, PublishError
from tests.fakes.clocks import HurriedClock

from rowmill.runtime.envelopes import envelope_of
from rowmill.runtime.publishing import Publisher
from rowmill.runtime.session import Session
from rowmill_contracts.topology import CONTROL, EVENTS, EXCHANGE


class FakeSession:
    """Each publishing ends as the next of ``ends`` says; None: confirmed. ``blocked``: for how many more questions the broker takes nothing."""

    def __init__(self, ends: Sequence[Exception | None], *, blocked: int = 0) -> None:
        self.ended = asyncio.Event()
        self.connection = SimpleNamespace(is_blocked=self._is_blocked)
        self.published: list[tuple[str | None, bytes, bool]] = []
        self.declared = 0
        self.published_while_blocked = 0
        self._ends = list(ends)
        self._blocked = blocked

    async def publish(self, exchange: str, key: str, message: aio_pika.Message, *, mandatory: bool, timeout: float) -> None:
        del exchange, key, timeout
        self.published.append((message.message_id, message.body, mandatory))
        self.published_while_blocked += self._blocked > 0
        end = self._ends.pop(0)
        if end is not None:
            raise end

    async def declare(self, delay_scale: float) -> None:
        del delay_scale
        self.declared += 1

    async def _is_blocked(self) -> bool:
        self._blocked -= 1
        return self._blocked >= 0


async def published(session: FakeSession, exchange: str = EXCHANGE) -> None:
    async def live() -> Session:
        return cast("Session", session)

    envelope = envelope_of(b"{}", "AdvanceRun.v1", at=0.0, message_id="m1")
    async with asyncio.timeout(20):
        await Publisher(live, 1.0, HurriedClock(), "test").publish(envelope, exchange, "key")


def unroutable() -> PublishError:
    returned = spec.Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange=EXCHANGE, routing_key="key")
    return PublishError(cast("Any", SimpleNamespace(delivery=returned)), returned)


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError("gone"), DeliveryError(None, spec.Basic.Nack())], ids=["unheard", "gone", "full"])
async def test_what_may_not_have_arrived_is_published_again_as_the_same_message(error: Exception) -> None:
    session = FakeSession([error, error, None])
    await published(session)
    assert session.published == [("m1", b"{}", True)] * 3
    assert not session.declared


async def test_what_no_queue_takes_is_published_again_once_the_queues_are_declared() -> None:
    session = FakeSession([unroutable(), unroutable(), None])
    await published(session)
    assert session.published == [("m1", b"{}", True)] * 3
    assert session.declared == 2


@pytest.mark.parametrize(("exchange", "mandatory"), [(EXCHANGE, True), (EVENTS, False), (CONTROL, False)])
async def test_nobody_has_to_listen_to_events_and_hints_and_to_nothing_else(exchange: str, *, mandatory: bool) -> None:
    session = FakeSession([None])
    await published(session, exchange)
    assert [one[2] for one in session.published] == [mandatory]


async def test_while_the_broker_takes_nothing_no_more_copies_are_sent() -> None:
    session = FakeSession([TimeoutError(), None], blocked=5)
    await published(session)
    assert len(session.published) == 2
    assert session.published_while_blocked == 1, "the one before it was known"


@pytest.mark.parametrize(("identity", "fits"), [("r1", True), ("r" * 255, True), ("é" * 150, False), ("\U0001f33e" * 200, False)])
def test_an_id_of_more_bytes_than_a_property_takes_goes_by_its_digest(identity: str, *, fits: bool) -> None:
    one, again = (envelope_of(b"{}", "AdvanceRun.v1", at=0.0, message_id=identity, correlation_id=identity) for _ in range(2))
    assert one.message_id is not None
    assert len(one.message_id.encode()) <= 255
    assert one.message_id == one.correlation_id == again.message_id == again.correlation_id
    assert (one.message_id == identity) is fits
