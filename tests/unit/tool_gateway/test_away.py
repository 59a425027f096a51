"""A provider that does not serve: one call at a time finds out whether it does, the others wait until they are called back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.tool_gateway.conftest import Rig, answering, in_turn

from rowmill import HttpTool, Provider
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.events import AskLanes
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


async def test_one_call_after_the_other_finds_out_whether_the_provider_serves_and_the_rest_wait_to_be_called_back(patient: Rig) -> None:
    """After one another, since one whose run is stopped never comes back. They come past all appointments, of which there is one a second here:
    else a provider would be found to serve the later the more rows wait for it.
    """
    find = away_tool(rate="1/s")
    await away_for_long(patient, find)
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(50)])
    assert {(outcome.outcome, outcome.provider, outcome.away) for outcome in outcomes} == {("deferred", "away", True)}
    waits = [outcome.wait_ms / 1000 for outcome in outcomes]
    scouts = [wait for wait in waits if wait <= 300]
    assert scouts[0] < 2
    assert [round(after - before) for before, after in pairwise(scouts)] == [1, 2, 4, 8, 16, *[30] * 8]
    assert waits[: len(scouts)] == scouts, "the oldest find out"
    assert all(300 < wait < 450 for wait in waits[len(scouts) :])


async def test_who_found_out_that_it_does_not_comes_again_after_the_others(patient: Rig) -> None:
    find = away_tool()
    await away_for_long(patient, find)
    first = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(20)])
    again = (await patient.ask([patient.item(find, {"domain": "d0.example"}, asked=patient.clock.now())]))[0].wait_ms / 1000
    assert again > 300, f"as far as {sorted(outcome.wait_ms for outcome in first)} reach, there is one whenever it is to be found out"


@pytest.mark.leaping
async def test_where_all_are_gone_that_were_to_find_out_another_is_called_within_minutes(patient: Rig) -> None:
    """Their run was stopped. Who comes later has no part in finding out for as long as they would have had, and stood still for five minutes."""
    find = away_tool()
    await patient.ask([patient.item(find, {"domain": "before.example"})])
    while not patient.sooner:  # nobody waits from before
        await patient.clock.sleep(0.05)
    await away_for_long(patient, find)
    await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(20)], run="stopped")
    others = await patient.ask([patient.item(find, {"domain": f"e{n}.example"}, asked=patient.clock.now()) for n in range(5)], run="another")
    assert min(outcome.wait_ms for outcome in others) > 300_000
    told = len(patient.sooner)
    await patient.clock.sleep(2.5 * patient.settings.probe_limit)
    assert {message.at_once for message in patient.sooner[told:]} == {1}


async def test_a_short_refusal_makes_nobody_wait_for_long(patient: Rig) -> None:
    patient.port.script = answering({}, status=429, Retry_After="0.5")
    find = away_tool()
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(8)])
    assert all(outcome.outcome == "deferred" and outcome.wait_ms < 3_000 for outcome in outcomes)


async def test_calls_that_wait_for_their_turn_at_a_provider_that_serves_are_not_said_to_wait_for_one_that_is_away(patient: Rig) -> None:
    find = away_tool(rate="5/s")
    while (await patient.ask([patient.item(find, {"domain": "first.example"})]))[0].outcome == "deferred":
        await patient.clock.sleep(0.05)  # the shard is not held yet
    outcomes = await patient.ask([patient.item(find, {"domain": f"d{n}.example"}, asked=patient.clock.now()) for n in range(4)])
    deferred = [outcome for outcome in outcomes if outcome.outcome == "deferred"]
    assert len(deferred) >= 2
    assert {(outcome.provider, outcome.away) for outcome in deferred} == {("away", False)}


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


async def test_who_has_waited_for_as_long_as_it_may_is_told_why_the_provider_does_not_serve(patient: Rig) -> None:
    find = away_tool()
    await away_for_long(patient, find)
    [outcome] = await patient.ask([patient.item(find, {"domain": "old.example"}, asked=patient.clock.now() - 3_600)])
    assert outcome.failure is not None
    assert outcome.failure.code == "provider_unavailable"
    assert outcome.failure.message == "no turn at the provider in time; it does not serve (http_429)"


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
    assert told.at_once == round(told.per_second * patient.settings.lead / 2)


async def test_fewer_are_called_back_where_more_wait_at_the_lane_than_should(patient: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await patient.ask([patient.item(away_tool(rate="50/s"), {"domain": "a.example"})])
    told = []
    [lane] = patient.engine.dispatcher.lanes
    for waiting in (0, 2, 10):
        monkeypatch.setattr(patient.engine.dispatcher, "backlog", lambda _lane, waiting=waiting: waiting)
        message = patient.engine.settler.call_back(lane, 1.0)
        assert message is not None
        rate = message.per_second
        told.append(message.at_once)
    ahead = round(told[0] * 2)
    assert told == [round(ahead / 2), round((ahead - 2) / 2), round((ahead - 10) / 2)]

    await patient.clock.sleep(patient.settings.hand)
    lane.begun += 1
    slow = patient.engine.settler.call_back(lane, 1.0)
    assert slow is not None
    assert slow.per_second < rate, "it took one in all that time, and ten wait"
    await patient.clock.sleep(patient.settings.hand)
    monkeypatch.setattr(patient.engine.dispatcher, "backlog", lambda _lane: 0)
    dry = patient.engine.settler.call_back(lane, 1.0)
    assert dry is not None
    assert dry.per_second == rate

    lane.close(patient.clock.monotonic(), 1.0)
    assert patient.engine.settler.call_back(lane, 1.0) is None, "it does not serve"


async def test_that_a_provider_serves_is_told_again_as_it_is_then_and_not_while_it_does_not() -> None:
    """For rows that were still on their way to where they wait, and since a lane may be slower than it was said to be."""
    told: list[ProviderServes] = []

    async def publish(message: ProviderServes) -> None:
        told.append(message)

    serves = [ProviderServes(org="acme", provider="away", per_second=rate) for rate in (1.0, 2.0, 3.0)]
    now: list[ProviderServes | None] = [serves[0], None, serves[1], serves[2]]
    call_back = CallBack(publish, every=0.005, for_long=3600.0, clock=SystemClock())
    call_back.serves("acme", "away", lambda: now.pop(0) if now else None)
    while now:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    assert told == serves

    call_back.serves("acme", "away", lambda: serves[0])
    call_back.serves("acme", "away", lambda: serves[1])
    while len(told) < 5:
        await asyncio.sleep(0.005)
    assert serves[0] not in told[3:], "what is newer stands alone"
    await call_back.stop()
    before = len(told)
    await asyncio.sleep(0.03)
    assert len(told) == before, "told after its stop"


async def test_it_is_told_no_more_when_every_row_has_come_back_by_itself() -> None:
    told: list[ProviderServes] = []

    async def publish(message: ProviderServes) -> None:
        told.append(message)

    call_back = CallBack(publish, every=0.005, for_long=0.02, clock=SystemClock())
    call_back.serves("acme", "away", lambda: ProviderServes(org="acme", provider="away", per_second=1.0))
    while call_back._telling:
        await asyncio.sleep(0.005)
    assert 1 <= len(told) <= 4


async def test_that_nobody_waited_elsewhere_is_not_told(rig: Rig) -> None:
    rig.port.script = in_turn(refusing, answering({"email": "a@example"}))
    [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert not rig.serving


async def test_a_lane_says_why_its_provider_does_not_serve_until_it_serves(patient: Rig) -> None:
    find = away_tool()

    async def why_after(script: Any, word: str) -> str:
        patient.port.script = script
        await patient.ask([patient.item(find, {"domain": f"{word}.example"}, asked=patient.clock.now())])
        [lane] = patient.engine.show(AskLanes()).lanes
        return lane.why

    assert await why_after(answering({}, status=503, Retry_After="0.01"), "busy") == "http_503"
    await patient.clock.sleep(patient.settings.retry_first + 0.01)  # until the lane is open again
    assert await why_after(refusing, "down") == "connection_failed"
    await patient.clock.sleep(patient.settings.retry_first + 0.01)  # until the lane is open again
    assert await why_after(answering({"email": None}), "well") == ""
