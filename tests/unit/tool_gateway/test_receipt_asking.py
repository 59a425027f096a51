"""What the gateway asks of the receipt-store, and whom it tells, while answers fail, go astray or fit no question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from rowmill.errors import AskDied, AskTimeout
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.envelope import Message
from rowmill_contracts.receipts import (
    Claim,
    ClaimAnswer,
    ClaimReceipts,
    Complete,
    Completed,
    Completion,
    Confirm,
    ConfirmAnswer,
    Confirmed,
    LeaseRef,
    ReceiptsClaimed,
    Release,
    Released,
    StoreAnswer,
)
from rowmill_tool_gateway.flights import Flight
from rowmill_tool_gateway.receipts import Receipts

Answering = Callable[[Any], Message]
FLIGHT = cast("Flight", object())
"""Handed through."""


class Asked:
    """A receipt-store that answers what it is told to; requests are kept."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.requests: list[Message] = []

    async def ask(self, message: Message, key: str, answer: Any, *, timeout: float | None = None) -> Any:
        del key, timeout
        self.requests.append(message)
        await asyncio.sleep(0)
        reply = self.answering(message)
        assert isinstance(reply, answer)
        return reply


def away(_: Message) -> Message:
    raise AskTimeout("nobody answers")


def receipts(asked: Asked, *, storing_again: Callable[[], None] = lambda: None, term: int | None = 1) -> Receipts:
    return Receipts(
        asked,
        holder="gateway",
        clock=SystemClock(),
        term_of=lambda _: term,
        connected=lambda: True,
        storing_again=storing_again,
        page=2,
        gather=0.001,
        timeout=0.01,
    )


def claim(key: str) -> Claim:
    return Claim(key=key, lease_id="l", run_id="r", tool="p.t", effect="read", started_at=0.0)


def completion(key: str) -> Completion:
    return Completion(key=key, lease_id="l", run_id="r", dispatch=1, output=msgspec.Raw(b"{}"))


async def test_who_waits_for_the_latch_is_told_when_the_last_outcome_is_stored() -> None:
    told: list[bool] = []
    asked = Asked(away)
    made = receipts(asked, storing_again=lambda: told.append(made.storing))
    stored: list[StoreAnswer] = []
    made.complete(completion("a"), FLIGHT, lambda _, answer: stored.append(answer))
    async with asyncio.timeout(20):
        while made.storing:
            await asyncio.sleep(0.001)
        assert told == []
        asked.answering = lambda message: Completed(answers=[StoreAnswer(state="stored")] * len(message.completions))
        await made.drain()
    assert told == [True], "it is open by then"
    assert [answer.state for answer in stored] == ["stored"]
    assert {type(request) for request in asked.requests} == {Complete}


async def test_releases_are_asked_for_again_until_they_are_heard_however_often_they_are_not() -> None:
    asked = Asked(away)
    made = receipts(asked)
    let_go: list[Flight] = []
    leases = [LeaseRef(key=f"{number}", lease_id="l", run_id="r") for number in range(5)]
    for lease in leases:
        made.release(lease, FLIGHT, let_go.append)
    async with asyncio.timeout(20):
        await made.drain()
        assert len(let_go) == 5, "their flights go on all the same"
        for _ in range(2):
            await made.release_again()
        heard: list[LeaseRef] = []

        def hears(message: Release) -> Message:
            heard.extend(message.leases)
            return Released(released=len(message.leases))

        asked.answering = hears
        await made.release_again()
        assert sorted(lease.key for lease in heard) == [lease.key for lease in leases]
        await made.release_again()
    assert len(heard) == 5, "once is enough"


async def test_each_request_hears_of_all_its_leases_however_they_are_confirmed_and_of_none_where_a_part_is_unanswered() -> None:
    def confirms(message: Confirm) -> Message:
        return Confirmed(answers=[ConfirmAnswer(state="confirmed", dispatch=int(lease.key)) for lease in message.leases])

    def confirms_all_but_the_last(message: Confirm) -> Message:
        return away(message) if message.leases[-1].key == "5" else confirms(message)

    asked = Asked(confirms)
    made = receipts(asked)
    many = [LeaseRef(key=f"{number}", lease_id="l", run_id="r") for number in range(1, 6)]
    async with asyncio.timeout(20):
        told = await asyncio.gather(*(made.confirm(3, leases) for leases in (many, many[:1])))
        assert [[answer.dispatch for answer in answers or [] if isinstance(answer, ConfirmAnswer)] for answers in told] == [[1, 2, 3, 4, 5], [1]]
        assert all(isinstance(request, Confirm) and len(request.leases) <= 2 for request in asked.requests)
        asked.answering = confirms_all_but_the_last
        assert await made.confirm(3, many) is None


async def test_a_lease_that_no_store_survives_to_confirm_is_found_and_those_beside_it_are_confirmed() -> None:
    def confirms(message: Confirm) -> Message:
        if any(lease.key == "2" for lease in message.leases):
            raise AskDied("nobody survives it")
        return Confirmed(answers=[ConfirmAnswer(state="confirmed", dispatch=int(lease.key)) for lease in message.leases])

    made = receipts(Asked(confirms))
    async with asyncio.timeout(20):
        one, died, three = await made.confirm(3, [LeaseRef(key=key, lease_id="l", run_id="r") for key in "123"]) or []
    assert isinstance(died, AskDied)
    assert [answer.dispatch for answer in (one, three) if isinstance(answer, ConfirmAnswer)] == [1, 3]


@pytest.mark.parametrize("answers", [0, 1, 3])
async def test_answers_that_are_not_as_many_as_the_claims_are_taken_for_none(answers: int) -> None:
    asked = Asked(lambda _: ReceiptsClaimed(answers=[ClaimAnswer(state="granted")] * answers))
    made = receipts(asked)
    told: dict[str, ClaimAnswer | None] = {}
    for key in "ab":
        made.claim(3, claim(key), FLIGHT, lambda _, answer, key=key: told.update({key: answer}), confirm=True)  # type: ignore[misc]
    async with asyncio.timeout(20):
        await made.drain()
    assert told == {"a": None, "b": None}, "the leases may be ours or not"


async def test_nothing_is_claimed_for_a_shard_that_is_not_held_and_what_is_stored_can_be_seen() -> None:
    asked = Asked(lambda message: ReceiptsClaimed(answers=[ClaimAnswer(state="absent")] * len(message.claims)))
    made = receipts(asked, term=None)
    told: list[ClaimAnswer | None] = []
    made.claim(3, claim("a"), FLIGHT, lambda _, answer: told.append(answer), confirm=True)
    async with asyncio.timeout(20):
        await made.drain()
        assert [answer.state for answer in told if answer is not None] == ["refused"]
        assert asked.requests == []
        made.look(3, claim("a"), FLIGHT, lambda _, answer: told.append(answer))
        await made.drain()
    [request] = asked.requests
    assert isinstance(request, ClaimReceipts)
    assert (request.only_cached, request.confirm, request.shard) == (True, False, None)
