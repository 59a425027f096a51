"""Errors that nobody foresaw while pages go to the receipt-store or answers come back: whoever has a call in them is answered, nothing stays shut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.tool_gateway.conftest import Rig, answering, find_tool

from rowmill import Batch
from rowmill.errors import AskDied
from rowmill.runtime import asking
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.receipts import Claim, ClaimReceipts, Complete, Confirm, Fail, LeaseRef, Release
from rowmill_contracts.tools import CallOutcome

pytestmark = pytest.mark.leaping


class Fragile:
    """Makes asking for a type of message end in an error: so many times, or whenever ``bad`` says so of the message."""

    def __init__(
        self,
        rig: Rig,
        kind: type[Message],
        *,
        times: int | None = None,
        bad: Callable[[Message], bool] = lambda _: True,
        error: type[Exception] = KeyError,
    ) -> None:
        self._error = error
        self._ask = rig.bus.ask
        self._kind = kind
        self._left = times
        self._bad = bad
        self.failed = 0
        rig.bus.ask = self.ask  # type: ignore[method-assign]

    async def ask(self, message: Message, key: str, answer: Any, **options: Any) -> Any:
        if isinstance(message, self._kind) and self._bad(message) and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            self.failed += 1
            raise self._error("a mistake of ours")
        return await self._ask(message, key, answer, **options)


def untroubled(rig: Rig) -> None:
    """Nothing is left in hand, counted as claimed, or kept shut."""
    assert not rig.engine.hand.flights
    assert not rig.engine.hand.pages
    assert rig.engine._receipts.storing
    for lane in rig.engine.dispatcher.lanes:
        assert (lane.in_flight, lane.claimed) == (0, 0)


async def asked(rig: Rig, count: int, **options: Any) -> list[CallOutcome]:
    find = find_tool(**options)
    async with asyncio.timeout(30):
        outcomes = await rig.ask([rig.item(find, {"domain": f"d{number}.example"}, row=f"leads/{number}") for number in range(count)])
        while rig.engine.hand.pages:
            await asyncio.sleep(0.001)
    return outcomes


async def test_claims_that_end_in_such_an_error_are_answered_and_made_again(rig: Rig) -> None:
    fragile = Fragile(rig, ClaimReceipts, times=1)
    outcomes = await asked(rig, 20)
    assert {outcome.outcome for outcome in outcomes} <= {"deferred", "completed"}
    assert fragile.failed
    untroubled(rig)
    assert {outcome.outcome for outcome in await asked(rig, 20)} == {"completed"}


async def test_a_claim_that_no_store_survives_fails_alone(rig: Rig) -> None:
    Fragile(rig, ClaimReceipts, bad=lambda message: b'leads/7"' in encode(message), error=AskDied)
    outcomes = await asked(rig, 20)
    assert {number: outcome.failure.code for number, outcome in enumerate(outcomes) if outcome.failure is not None} == {7: "dead_lettered"}
    untroubled(rig)


async def test_a_call_whose_confirmation_no_store_survives_fails_alone_and_unsent(rig: Rig) -> None:
    find = find_tool(effect="non_idempotent", batch=Batch(20, path="/v2/bulk", items="items", results="items"))
    items = [rig.item(find, {"domain": f"d{number}.example"}, row=f"leads/{number}") for number in range(20)]
    bad = Fragile(rig, Confirm, bad=lambda message: items[7].receipt_key.encode() in encode(message), error=AskDied)
    rig.port.script = answering(lambda body: {"items": body["items"]})
    async with asyncio.timeout(30):
        outcomes = await rig.ask(items)
    assert {number: outcome.failure.code for number, outcome in enumerate(outcomes) if outcome.failure is not None} == {7: "dead_lettered"}
    assert bad.failed <= 2
    async with asyncio.timeout(30):
        while rig.engine.hand.pages or rig.store.receipts[items[7].receipt_key].state != "released":
            await asyncio.sleep(0.001)
    untroubled(rig)


async def test_a_release_that_no_store_survives_keeps_no_other_back(rig: Rig) -> None:
    find = find_tool(concurrency=1)
    items = [rig.item(find, {"domain": f"d{number}.example"}, row=f"leads/{number}") for number in range(5)]
    Fragile(rig, Release, bad=lambda message: items[3].receipt_key.encode() in encode(message), error=AskDied)
    leases = [LeaseRef(key=item.receipt_key, lease_id=f"lease-{item.call_id}", run_id="run-1") for item in items]
    claims = [
        Claim(key=lease.key, lease_id=lease.lease_id, run_id="run-1", tool="hunter.find", effect="read", started_at=rig.clock.now())
        for lease in leases
    ]
    rig.store.answer(ClaimReceipts(holder="me", claims=claims))
    assert await rig.engine._receipts._heard(leases), "it is given up"
    assert [rig.store.receipts[lease.key].state for lease in leases] == ["released"] * 3 + ["queued", "released"]


@pytest.mark.parametrize("kind", [Complete, Fail])
async def test_outcomes_are_stored_once_the_error_is_over(rig: Rig, kind: type[Message]) -> None:
    fragile = Fragile(rig, kind, times=2)
    rig.port.script = answering({"email": "a@example"}, status=200 if kind is Complete else 404)
    outcomes = await asked(rig, 20)
    assert {outcome.outcome for outcome in outcomes} == {"completed" if kind is Complete else "failed"}
    assert fragile.failed == 2
    assert {receipt.state for receipt in rig.store.receipts.values()} == {"completed" if kind is Complete else "failed"}
    untroubled(rig)


@pytest.mark.parametrize("error", [KeyError, AskDied])
async def test_an_outcome_that_always_ends_in_such_an_error_holds_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(asking, "GIVEN_UP_AFTER", 2)
    Fragile(rig, Complete, bad=lambda message: b"d7.example" in encode(message), error=error)
    rig.port.script = answering(lambda body: {"email": f"a@{body['domain']}"})
    outcomes = await asked(rig, 20)
    assert [number for number, outcome in enumerate(outcomes) if outcome.outcome != "completed"] == [7]
    assert outcomes[7].failure is not None
    assert outcomes[7].failure.code == "not_storable"
    assert sorted(receipt.state for receipt in rig.store.receipts.values()) == ["completed"] * 19 + ["running"]
    untroubled(rig)
    assert (await asked(rig, 1))[0].outcome == "completed"


async def test_a_failure_that_always_ends_in_such_an_error_is_answered_all_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PARTED_AFTER", 1)
    monkeypatch.setattr(asking, "GIVEN_UP_AFTER", 2)
    Fragile(rig, Fail)
    rig.port.script = answering({}, status=404)
    assert {outcome.outcome for outcome in await asked(rig, 5)} == {"failed"}
    untroubled(rig)


async def test_releases_that_end_in_such_an_error_let_their_calls_go_and_are_made_again(rig: Rig) -> None:
    fragile = Fragile(rig, Release, times=1)
    rig.port.connect = _never
    await asked(rig, 3, concurrency=1)
    assert fragile.failed == 1
    async with asyncio.timeout(30):
        while not any(isinstance(request, Release) for request in rig.bus.asked):
            await asyncio.sleep(0.001)


async def _never() -> None:
    await asyncio.sleep(0.5)


async def test_answers_that_end_in_such_an_error_hold_no_page(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    send, failing = rig.bus.send_reply, [True]

    async def fragile(*given: Any, **named: Any) -> None:
        if failing:
            failing.pop()
            raise KeyError("a mistake of ours")
        await send(*given, **named)

    monkeypatch.setattr(rig.bus, "send_reply", fragile)
    item = rig.item(find_tool(), {"domain": "a.example"})
    started = rig.clock.now()
    rig.hand_in([item], started_at=started)
    async with asyncio.timeout(20):
        while rig.engine.hand.pages:
            await asyncio.sleep(0.001)
        [again] = await rig.ask([item], started_at=started)
    assert again.outcome == "completed"
    assert len(rig.port.requests) == 1
