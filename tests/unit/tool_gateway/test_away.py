"""A provider that does not serve: one call at a time finds out whether it does, the others wait until they are called back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.tool_gateway.conftest import Rig, answering, in_turn

from rowmill import HttpTool, Provider
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.runs import ProviderServes
from rowmill_tool_gateway.calling_back import CallBack
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.settling import CALLED_BACK


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


def away_tool(**options: Any) -> type[HttpTool[FindIn, FindOut]]:
    away = Provider("away", base_url="http://127.0.0.1:1", concurrency=4, **options)

    @away.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        pass

    return Find


async def refusing(request: HttpRequest) -> HttpResponse:
    raise NoResponse("never_opened", "connection refused")


async def away_for_long(rig: Rig, find: Any) -> None:
    """Return when the provider has refused for longer than a call waits in hand."""
    rig.port.script = answering({}, status=429, Retry_After="0.5")
    await rig.ask([rig.item(find, {"domain": "first.example"})])
    await rig.clock.sleep(rig.settings.hand + 0.01)


@pytest.fixture
async def patient() -> AsyncIterator[Rig]:
    """A gateway at full size, but for a hand that holds calls for a moment only."""
    made = Rig(ToolGatewaySettings(hand=0.05))
    yield made
    await made.stop()


async def test_one_call_finds_out_whether_the_provider_serves_and_the_others_wait_to_be_called_back(patient: Rig) -> None:
    find = away_tool()
    await away_for_long(patient, find)
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(8)])
    assert {(outcome.outcome, outcome.provider) for outcome in outcomes} == {("deferred", "away")}
    waits = sorted(outcome.wait_ms for outcome in outcomes)
    assert waits[0] < 2_000
    assert all(300_000 <= wait < 303_000 for wait in waits[1:]), waits


async def test_a_short_refusal_makes_nobody_wait_for_long(patient: Rig) -> None:
    patient.port.script = answering({}, status=429, Retry_After="0.5")
    find = away_tool()
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(8)])
    assert all(outcome.outcome == "deferred" and outcome.wait_ms < 3_000 for outcome in outcomes)


async def test_a_call_is_never_deferred_beyond_what_it_may_wait_in_all(patient: Rig) -> None:
    find = away_tool()
    await away_for_long(patient, find)
    now = patient.clock.now()
    scout = patient.item(find, {"domain": "scout.example"}, asked=now)
    old = patient.item(find, {"domain": "old.example"}, asked=now - 3_590)
    leg = patient.item(find, {"domain": "leg.example"}, asked=now, max_wait=3.0)
    _, old_waits, leg_waits = await patient.ask([scout, old, leg])
    assert old_waits.wait_ms <= 10_000
    assert leg_waits.wait_ms <= 3_000


async def test_that_a_provider_serves_again_is_told_once_with_its_rate(patient: Rig) -> None:
    find = away_tool(rate="50/s")
    await away_for_long(patient, find)
    waiting = [patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(3)]
    assert {outcome.outcome for outcome in await patient.ask(waiting)} == {"deferred"}
    assert not patient.serving
    patient.port.script = answering({"email": "a@example"})
    while (await patient.ask([patient.item(find, {"domain": "a.example"})]))[0].outcome == "deferred":
        await patient.clock.sleep(0.05)
    await patient.ask([patient.item(find, {"domain": "b.example"})])
    [told] = patient.serving
    assert (told.org, told.provider) == ("acme", "away")
    assert 0 < told.per_second <= CALLED_BACK * 50.0


async def test_rows_that_were_still_on_their_way_are_called_back_too() -> None:
    clock, told = SystemClock(), []
    published: list[float] = []

    async def publish(message: ProviderServes) -> None:
        told.append(message)
        published.append(clock.monotonic())

    call_back = CallBack(publish, again_after=0.05, clock=clock)
    message = ProviderServes(org="acme", provider="away", per_second=1.0)
    call_back.serves(message)
    while len(told) < 2:
        await asyncio.sleep(0.005)
    assert told == [message, message]
    assert published[1] - published[0] >= 0.05
    call_back.serves(message)
    await asyncio.sleep(0)
    await call_back.stop()
    await asyncio.sleep(0.06)
    assert len(told) <= 3, "told after its stop"


async def test_that_nobody_waited_elsewhere_is_not_told(rig: Rig) -> None:
    rig.port.script = in_turn(refusing, answering({"email": "a@example"}))
    [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert not rig.serving
