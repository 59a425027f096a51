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
    assert all(outcome.away for outcome in outcomes)


async def test_who_finds_out_is_not_kept_behind_the_appointments_of_all_who_wait(patient: Rig) -> None:
    """Else a provider would be found to serve again the later the more rows wait for it."""
    find = away_tool(rate="1/s")
    await away_for_long(patient, find)
    first = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(30)])
    scout = min(outcome.wait_ms for outcome in first) / 1000
    assert max(outcome.wait_ms for outcome in first) > 325_000, "one appointment a second"
    await patient.clock.sleep(scout)
    [next_scout] = await patient.ask([patient.item(find, {"domain": "next.example"}, asked=patient.clock.now())])
    assert next_scout.wait_ms < 2_000


async def test_a_short_refusal_makes_nobody_wait_for_long(patient: Rig) -> None:
    patient.port.script = answering({}, status=429, Retry_After="0.5")
    find = away_tool()
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(8)])
    assert all(outcome.outcome == "deferred" and outcome.wait_ms < 3_000 for outcome in outcomes)


async def test_calls_that_wait_for_their_turn_at_a_provider_that_serves_are_not_said_to_wait_for_one_that_is_away(patient: Rig) -> None:
    find = away_tool(rate="5/s")
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(4)])
    assert [outcome.outcome for outcome in outcomes].count("deferred") >= 2
    assert not any(outcome.away for outcome in outcomes)


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
    assert 0 < told.per_second <= 50.0
    assert told.at_once == round(told.per_second * patient.settings.lead), "as many as are sent until those are there that come next"


async def test_that_a_provider_serves_is_told_again_as_it_is_then_and_not_while_it_does_not() -> None:
    """For rows that were still on their way to where they wait, and since a rate shows only in time."""
    told: list[ProviderServes] = []

    async def publish(message: ProviderServes) -> None:
        told.append(message)

    serves = [ProviderServes(org="acme", provider="away", per_second=rate) for rate in (1.0, 2.0, 3.0)]
    now: list[ProviderServes | None] = [serves[0], None, serves[1], serves[2]]
    call_back = CallBack(publish, again_after=0.01, for_long=0.1, clock=SystemClock())
    call_back.serves("acme", "away", lambda: now.pop(0))
    while now:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert told == serves, "after 0.01, 0.03 and 0.07 s; another time would be too late"

    call_back.serves("acme", "away", lambda: serves[0])
    call_back.serves("acme", "away", lambda: serves[1])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await call_back.stop()
    assert serves[0] not in told[3:], "what is newer stands alone"
    before = len(told)
    await asyncio.sleep(0.03)
    assert len(told) == before, "told after its stop"


async def test_that_nobody_waited_elsewhere_is_not_told(rig: Rig) -> None:
    rig.port.script = in_turn(refusing, answering({"email": "a@example"}))
    [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert not rig.serving
