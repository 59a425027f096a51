"""Open questions: who is answered, once, and what becomes of replies that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from rowmill.runtime.asking import GIVEN_UP_AFTER, PARTED_AFTER, Asks, tries_of
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.run_questions import GetRun, RunShown


def received(asks: Asks, reply: Message, correlation_id: str) -> None:
    asks.received(reply.message_type, encode(reply), correlation_id)


async def test_a_reply_is_given_to_the_question_of_its_id_and_the_first_one_stays() -> None:
    asks = Asks()
    with asks.open("one", GetRun(run_id="1"), "key") as one, asks.open("two", GetRun(run_id="2"), "key") as two:
        assert asks.unanswered() == [one, two]
        received(asks, RunShown(refused="first"), "two")
        received(asks, RunShown(refused="second"), "two")
        assert two.answered.result() == RunShown(refused="first")
        assert asks.unanswered() == [one]


async def test_a_question_that_is_over_is_asked_no_more_and_its_late_reply_is_dropped() -> None:
    asks = Asks()
    heard: list[Message] = []
    with pytest.raises(TimeoutError), asks.open("one", GetRun(run_id="1"), "key"):
        raise TimeoutError
    assert asks.unanswered() == []
    assert not asks._open, "or a process that asks for long fills up with what it has asked"
    received(asks, RunShown(), "one")
    asks.on_reply(RunShown, heard.append)
    received(asks, RunShown(refused="in parts"), "nobody's")
    assert heard == [RunShown(refused="in parts")]


async def test_what_is_no_message_answers_nobody() -> None:
    asks = Asks()
    with asks.open("one", GetRun(run_id="1"), "key") as one:
        asks.received("RunShown.v9", b"{}", "one")
        asks.received("RunShown.v1", b"no JSON", "one")
        await asyncio.sleep(0)
        assert asks.unanswered() == [one]


def test_a_page_is_parted_long_before_a_single_item_is_given_up() -> None:
    assert tries_of([1, 2]) == PARTED_AFTER < GIVEN_UP_AFTER == tries_of([1])
