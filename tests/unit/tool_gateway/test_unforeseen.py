"""Errors that nobody foresaw: the gateway goes on keeping time and leases, and whoever waits is answered."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from pydantic import field_validator
from tests.unit.tool_gateway.conftest import FindIn, Rig, answering, find_tool

from rowmill import Batch, Provider, ToolCall, ToolError
from rowmill_contracts.receipts import ClaimAnswer, HaltRun, Release
from rowmill_tool_gateway.flights import Stage
from rowmill_tool_gateway.http_tools import HttpCarrier

pytestmark = pytest.mark.leaping


class Guarded(FindIn):
    @field_validator("domain")
    @classmethod
    def guard(cls, domain: str) -> str:
        raise BaseException("panic")  # noqa: TRY002 - as code in another language raises it


@pytest.mark.parametrize(("part", "step"), [("hand", "sweep"), ("sender", "renew"), ("shards", "_renew")])
async def test_a_clock_whose_turn_failed_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch, part: str, step: str) -> None:
    owner = getattr(rig.engine, part)
    fine = getattr(owner, step)
    turns = 0
    again = asyncio.Event()

    def fragile(*given: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns <= 2:
            raise KeyError("a mistake of ours")
        again.set()
        return fine(*given)

    monkeypatch.setattr(owner, step, fragile)
    async with asyncio.timeout(20):
        await again.wait()
    for loop in rig.engine._loops:
        loop.cancel()
    await asyncio.gather(*rig.engine._loops, return_exceptions=True)
    assert all(loop.cancelled() for loop in rig.engine._loops)


@pytest.mark.parametrize(("effect", "outcome"), [("read", "failed"), ("idempotent", "failed"), ("non_idempotent", "unknown")])
async def test_a_request_whose_ending_cannot_be_settled_is_answered_and_charged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, effect: str, outcome: str
) -> None:
    async def one_too_few(_: HttpCarrier, inputs: Sequence[bytes], keys: Sequence[str], timeout: float, may_send: Any) -> Sequence[Any]:
        assert may_send()
        return []

    monkeypatch.setattr(HttpCarrier, "carry", one_too_few)
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))
    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(find_tool(effect=effect), {"domain": "a.example"})])
    assert answered.outcome == outcome
    assert answered.failure is not None
    assert (answered.failure.code, answered.failure.origin) == ("gateway", "gateway")
    assert rig.store.runs["run-1"].charged() == Decimal("0.01")
    assert not rig.engine.hand.flights


async def test_a_request_that_fails_before_it_is_sent_is_answered_and_leaves_nothing_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fragile(*_: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(rig.engine._receipts, "confirm", fragile)
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))
    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})])
        while not any(isinstance(request, Release) for request in rig.bus.asked):
            await asyncio.sleep(0.001)
    assert answered.outcome == "failed"
    assert rig.port.requests == []
    assert rig.store.runs["run-1"].charged() == 0
    assert not rig.engine.hand.flights
    [lane] = rig.engine.dispatcher.lanes
    assert lane.in_flight == 0


@pytest.mark.parametrize("state", ["granted", "completed", "failed", "unknown", "halted", "over_budget", "held", "refused", None])
async def test_a_claim_that_is_answered_when_its_flight_is_over_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    claimed: list[Any] = []
    monkeypatch.setattr(rig.engine._receipts, "claim", lambda _shard, _claim, flight, told, **_: claimed.append((flight, told)))
    item = rig.item(find_tool(), {"domain": "a.example"})
    rig.hand_in([item])
    async with asyncio.timeout(20):
        while not claimed:
            await asyncio.sleep(0.001)
    [(flight, told)] = claimed
    rig.engine.hand.defer(flight, list(flight.calls), 1.0, reason="in flight")
    told(flight, None if state is None else ClaimAnswer(state=state, dispatch=1, wait_ms=1))
    assert flight.stage is Stage.OVER
    assert flight.timer is None
    assert rig.engine.hand._of_shard[flight.lane.shard] == 0
    assert flight.lane.claimed == 0
    async with asyncio.timeout(20):
        while state == "granted" and not any(isinstance(request, Release) for request in rig.bus.asked):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("ending", [BaseException("panic"), SystemExit(3), GeneratorExit(), MemoryError(), asyncio.CancelledError()])
@pytest.mark.parametrize(("effect", "blocking"), [("read", False), ("read", True), ("non_idempotent", False)])
async def test_whatever_a_function_raises_ends_its_call_and_leaves_no_lease_behind(
    rig: Rig, ending: BaseException, effect: Any, blocking: bool
) -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    if blocking:

        @provider.tool("order", effect=effect, blocking=True)
        def order(given: FindIn, call: ToolCall) -> str:
            raise ending
    else:

        @provider.tool("order", effect=effect)
        async def order(given: FindIn, call: ToolCall) -> str:
            raise ending

    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(order, {"domain": "a.example"})])
    assert answered.outcome == ("unknown" if effect == "non_idempotent" else "failed")
    assert answered.failure is not None
    assert type(ending).__name__ in answered.failure.message
    assert [receipt.state for receipt in rig.store.receipts.values()] == ["outcome_unknown" if effect == "non_idempotent" else "failed"]
    assert not rig.engine.hand.flights


async def test_whatever_a_validator_raises_ends_its_call(rig: Rig) -> None:
    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect="read")
    async def order(given: Guarded, call: ToolCall) -> str:
        return "done"

    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(order, {"domain": "a.example"})])
    assert answered.outcome == "failed"
    assert not rig.engine.hand.flights


@pytest.mark.parametrize("before", [False, True])
async def test_whatever_a_cost_function_raises_ends_its_call(rig: Rig, before: bool) -> None:
    def panics(_: Any) -> Decimal:
        raise BaseException("panic")  # noqa: TRY002 - likewise

    provider = Provider("crm", base_url="http://127.0.0.1:1")

    @provider.tool("order", effect="read", cost=panics if before else Decimal(1), actual_cost=None if before else panics)
    async def order(given: FindIn, call: ToolCall) -> str:
        return "done"

    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(order, {"domain": "a.example"})])
    assert answered.outcome == "failed"
    assert not rig.engine.hand.flights


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


LONE = "\udc80 and \x00"
SPOKEN: list[tuple[BaseException, str]] = [
    (ValueError(LONE), "ValueError: \\udc80 and \\x00"),
    (Unspeakable(), "its str() raised LookupError"),
    (ToolError(LONE, failure_code=LONE, category=LONE), "\\udc80 and \\x00"),
    (ToolError(Unspeakable()), "its str() raised LookupError"),  # type: ignore[arg-type]
    (ToolError("no", status="404", retry_after="soon", failure_code=7), "no"),  # type: ignore[arg-type]
    (ToolError("no", status=math.inf, retry_after=Decimal(3), category=object()), "no"),  # type: ignore[arg-type]
    (ToolError("x" * 3_000_000), "xxx"),
    (ToolError.__new__(ToolError), "ToolError, of which nothing can be read"),
]


@pytest.mark.parametrize(("error", "said"), SPOKEN, ids=range(len(SPOKEN)))
@pytest.mark.parametrize("returned", [False, True])
async def test_whatever_an_error_says_can_be_stored_and_is_paid_once(rig: Rig, error: BaseException, said: str, returned: bool) -> None:
    """Errors are raised for a whole batch, or returned for one of its items, which spoils no other."""
    provider = Provider("crm", base_url="http://127.0.0.1:1")
    called = 0

    @provider.tool("order", effect="read", batch=Batch(max=2))
    async def order(given: list[FindIn], call: ToolCall) -> list[Any]:
        nonlocal called
        called += len(given)
        if returned:
            return [error if each.domain == "a.example" else "done" for each in given]
        raise error

    async with asyncio.timeout(20):
        answered, other = await rig.ask([rig.item(order, {"domain": "a.example"}), rig.item(order, {"domain": "b.example"})])
    assert answered.outcome == "failed"
    assert answered.failure is not None
    assert said in answered.failure.message
    assert len(answered.failure.message) <= 2000
    assert other.outcome == ("completed" if returned else "failed")
    assert called == 2


async def test_what_a_provider_names_a_request_can_be_stored(rig: Rig) -> None:
    rig.port.script = answering({}, 404, X_Request_Id=LONE)
    async with asyncio.timeout(20):
        [answered] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert answered.failure is not None
    assert answered.failure.request_id == "\\udc80 and \\x00"
