"""Calls that fail in the gateway's hand because their provider keeps them waiting for too long: kept for their run, before they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import Rig, answering, find_tool

from rowmill_contracts.receipts import Fail
from rowmill_tool_gateway.settings import ToolGatewaySettings


@pytest.fixture
async def away() -> AsyncIterator[Rig]:
    """A gateway whose provider wants to be left alone for longer than any call waits."""
    made = Rig(ToolGatewaySettings(hand=0.05))
    made.port.script = answering({}, status=429, Retry_After="4000")
    yield made
    await made.stop()


async def test_a_call_whose_provider_is_away_for_too_long_is_not_made_again_in_its_run(away: Rig) -> None:
    find, started = find_tool(), away.clock.now()
    item = away.item(find, {"domain": "a.example"}, asked=started)
    [failed] = await away.ask([item], started_at=started)
    assert failed.failure is not None
    assert (failed.outcome, failed.failure.code) == ("failed", "provider_unavailable")

    away.engine.dispatcher.lanes[0].closed_until = 0.0  # a gateway that knows nothing of the provider
    away.port.script = answering({"email": "a@example"})
    [redelivered] = await away.ask([msgspec.structs.replace(item, call_id="again")], started_at=started)
    assert (redelivered.outcome, redelivered.failure) == ("failed", failed.failure)
    assert len(away.port.requests) == 1
    [of_another_run] = await away.ask([msgspec.structs.replace(item, call_id="another")], run="run-2")
    assert of_another_run.outcome == "completed"


async def test_a_call_that_was_never_claimed_is_kept_too(away: Rig) -> None:
    find = find_tool()
    await away.ask([away.item(find, {"domain": "first.example"}, asked=away.clock.now())])
    [failed] = await away.ask([item := away.item(find, {"domain": "a.example"}, asked=away.clock.now())])
    assert failed.failure is not None
    assert failed.failure.code == "provider_unavailable"
    assert away.store.receipts[item.receipt_key].state == "failed"
    assert (item.receipt_key, "run-1") in away.store.failures


async def test_it_is_answered_once_it_is_stored(away: Rig) -> None:
    find = find_tool()
    await away.ask([away.item(find, {"domain": "first.example"}, asked=away.clock.now())])
    away.bus.silent = {Fail}
    asked = [request for request in away.bus.asked if isinstance(request, Fail)]
    item = away.item(find, {"domain": "a.example"}, asked=away.clock.now())
    away.hand_in([item])
    async with asyncio.timeout(20):
        while [request for request in away.bus.asked if isinstance(request, Fail)] == asked:
            await asyncio.sleep(0.001)
    assert item.call_id not in away.bus.outcomes
    away.bus.silent = set()
    async with asyncio.timeout(20):
        assert (await away.bus.outcome(item.call_id)).outcome == "failed"


async def test_a_leg_that_gives_up_fails_no_call_of_its_run_that_waits_on(away: Rig) -> None:
    away.port.script = answering({}, status=429, Retry_After="30")
    find = find_tool()
    leg = away.item(find, {"domain": "a.example"}, asked=away.clock.now(), max_wait=10.0)
    patient = msgspec.structs.replace(leg, call_id="patient", row="leads/2", max_wait=None)
    gave_up, waits = await away.ask([leg, patient])
    assert gave_up.failure is not None
    assert (gave_up.failure.code, waits.outcome) == ("provider_unavailable", "deferred")
    assert not away.store.failures
