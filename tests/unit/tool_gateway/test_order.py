"""In which order a lane sends what waits for it: runs in turn, of each run what was asked for first, whatever came first to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from tests.unit.tool_gateway.conftest import Rig, answering

from rowmill import HttpTool, Provider
from rowmill_contracts.digests import shard_of
from rowmill_contracts.shards import LeaseShard
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_tool_gateway.flights import Call, Flight
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.leaping


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


def tool(**options: Any) -> type[HttpTool[FindIn, FindOut]]:
    provider = Provider("there", base_url="http://127.0.0.1:1", concurrency=1, **options)

    @provider.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        pass

    return Find


def requested(rig: Rig) -> list[str]:
    return [msgspec.json.decode(request.body or b"null")["domain"] for request in rig.port.requests]


@pytest.fixture
async def patient() -> AsyncIterator[Rig]:
    """A gateway at full size, which claims nothing before its turn, so that the order of turns is the order of requests."""
    made = Rig(ToolGatewaySettings(hand=3.0, claim_ahead=0.0))
    yield made
    await made.stop()


async def test_what_waited_for_the_provider_is_sent_in_turn_by_run_and_of_each_run_the_oldest_first(patient: Rig) -> None:
    find = tool()
    patient.port.script = answering({}, status=429, Retry_After="0.3")
    await patient.ask([patient.item(find, {"domain": "first"})], run="first")
    patient.port.requests.clear()
    patient.port.script = answering({"email": "a@example"})
    now = patient.clock.now()
    items = []
    for number in (3, 0, 4, 1, 2):  # as they come back, which is by pages
        for run, age in (("a", 100), ("b", 500), ("c", 300)):
            items.append(patient.item(find, {"domain": f"{run}{number}"}, asked=now - age + number))
            patient.hand_in(items[-1:], run=run)
    for item in items:
        assert (await patient.bus.outcome(item.call_id)).outcome == "completed"
    assert requested(patient) == [f"{run}{number}" for number in range(5) for run in "bca"]


async def full_of_young_calls(rig: Rig, find: Any, count: int) -> list[CallItem]:
    """Return when so many calls of the run ``young`` stand in the lane's queue, one of which was sent."""
    now = rig.clock.now()
    young = [rig.item(find, {"domain": f"young{number}"}, asked=now + number / 100) for number in range(count)]
    rig.hand_in(young, run="young")
    await rig.bus.outcome(young[0].call_id)
    return young


async def test_a_call_that_is_older_than_those_that_fill_the_hand_is_taken_in_and_sent_next(patient: Rig) -> None:
    """If who comes last were sent away, a call that was deferred once would be deferred again for each younger one."""
    find = tool(rate="4/s")
    await full_of_young_calls(patient, find, 20)
    now = patient.clock.now()
    old, younger = patient.item(find, {"domain": "old"}, asked=now - 100), patient.item(find, {"domain": "younger"}, asked=now + 100)
    patient.hand_in([old, younger], run="young")
    assert (await patient.bus.outcome(old.call_id)).outcome == "completed"
    assert requested(patient).index("old") <= 2, "at most one had its permit already"
    assert (await patient.bus.outcome(younger.call_id)).outcome == "deferred"


async def test_who_waits_elsewhere_is_to_be_back_in_time_for_its_turn_and_not_before(patient: Rig) -> None:
    """An appointment before that would only have it come and go."""
    find = tool(rate="4/s")
    await full_of_young_calls(patient, find, 20)
    now = patient.clock.now()
    late = await patient.ask([patient.item(find, {"domain": f"late{number}"}, asked=now + 100 + number) for number in range(20)], run="young")
    assert {(outcome.outcome, outcome.away) for outcome in late} == {("deferred", False)}
    waits = [outcome.wait_ms / 1000 for outcome in late]
    assert min(waits) >= patient.settings.hand - patient.settings.lead, "it would not have been sent while it is in hand"
    assert waits == sorted(waits)
    assert waits[-1] - waits[0] >= 19 / 4 - 0.5, "one after the other, at the rate"


def asked_at_once(rig: Rig, find: Any, count: int) -> list[CallItem]:
    """Calls as the rows of a page have them: nobody can tell by the time which came first."""
    now = rig.clock.now()
    return [rig.item(find, {"domain": f"d{number}"}, asked=now) for number in range(count)]


async def test_who_is_sent_away_from_a_line_is_to_be_back_by_its_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all who stand behind the first of them were counted before it, the lane would have nothing to send until it is back."""
    rig = Rig(ToolGatewaySettings(hand=0.8, claim_ahead=0.0))

    def takes_all_in(flight: Flight) -> None:
        flight.looked = True
        rig.engine.dispatcher.resume(flight)

    monkeypatch.setattr(rig.engine.dispatcher, "admit", takes_all_in)  # more than can be sent in time
    outcomes = await rig.ask(asked_at_once(rig, tool(rate="10/s"), 40))
    await rig.stop()
    sent = [outcome.outcome for outcome in outcomes].index("deferred")
    waits = [outcome.wait_ms / 1000 for outcome in outcomes[sent:]]
    assert {outcome.outcome for outcome in outcomes[sent:]} == {"deferred"}
    assert waits == sorted(waits)
    assert waits[0] <= rig.settings.lead
    assert waits[-1] >= (len(waits) - 5) / 10


async def test_no_more_are_kept_in_hand_than_can_be_sent_in_time_however_many_come_at_once() -> None:
    """Also not while stored outputs are looked for, which all of them may be at the same time."""
    rig = Rig(ToolGatewaySettings(hand=0.8, look_after=0.05, claim_ahead=0.0))
    find = tool(rate="10/s")
    first = rig.item(find, {"domain": "first"})
    await rig.ask([first])  # the lane is ours
    items = asked_at_once(rig, find, 40)
    for start in range(0, len(items), 5):
        rig.hand_in(items[start : start + 5])
    outcomes = [(await rig.bus.outcome(item.call_id)).outcome for item in items]
    await rig.stop()
    kept = outcomes.count("completed")
    assert outcomes == ["completed"] * kept + ["deferred"] * (len(items) - kept)
    assert 7 <= kept <= 9, "eight in 0.8 s"


async def test_calls_that_wait_for_the_lane_itself_are_asked_for_again_soon_however_slow_it_is() -> None:
    """For how long another gateway has it is not known: an appointment by the lane's rate would leave it idle once it is ours."""
    rig = Rig(ToolGatewaySettings(hand=0.4))
    find = tool(rate="1/s")
    rig.store.answer(LeaseShard(holder="another", shards=[shard_of("acme", "there")]))
    outcomes = await rig.ask(asked_at_once(rig, find, 30))
    await rig.stop()
    assert {(outcome.outcome, outcome.reason, outcome.wait_ms) for outcome in outcomes} == {("deferred", "another gateway holds the lane", 400)}


async def test_a_lane_that_is_ours_anew_makes_nobody_wait_for_appointments_of_before() -> None:
    rig = Rig(ToolGatewaySettings(hand=0.4, shard_retry=0.05, shard_renewal=0.05))
    find = tool(rate="1/s")
    before = await rig.ask(asked_at_once(rig, find, 40))
    assert max(outcome.wait_ms for outcome in before) > 30_000
    shard = shard_of("acme", "there")
    held = rig.store.shards[shard]
    held.holder, held.term, held.expires = "another", held.term + 1, rig.clock.now() + 0.2
    async with asyncio.timeout(20):
        while rig.engine.shards.holds(shard):
            await asyncio.sleep(0.01)
        after: list[CallOutcome] = []
        while not any(outcome.reason == "provider there" for outcome in after):
            await asyncio.sleep(0.01)
            after = await rig.ask([rig.item(find, {"domain": f"after{number}"}, asked=rig.clock.now()) for number in range(4)])
    await rig.stop()
    assert max(outcome.wait_ms for outcome in after if outcome.reason == "provider there") < 10_000


@pytest.mark.parametrize(("until_its_turn", "outcome"), [(0.44, "completed"), (0.46, "deferred")])
async def test_a_call_whose_turn_is_near_when_its_time_in_hand_is_over_stays(
    until_its_turn: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near is half of the time in hand, which is 0.9 s here; the last of six calls is sent after a second."""
    rig = Rig(ToolGatewaySettings(hand=0.9, claim_ahead=0.0))
    monkeypatch.setattr(rig.engine.dispatcher, "_wait_behind", lambda _flight, _before: 0.0)
    items = [rig.item(find, {"domain": f"d{number}"}, asked=rig.clock.now() + number) for find in [tool(rate="5/s")] for number in range(6)]
    rig.hand_in(items)
    await rig.bus.outcome(items[0].call_id)
    monkeypatch.setattr(rig.engine.dispatcher, "_wait_behind", lambda _flight, _before: until_its_turn)
    assert [(await rig.bus.outcome(item.call_id)).outcome for item in items] == ["completed"] * 5 + [outcome]
    await rig.stop()


async def test_a_rate_of_less_than_one_request_in_the_time_that_a_call_waits_in_hand_is_used() -> None:
    rig = Rig(ToolGatewaySettings(hand=0.2))
    [outcome] = await rig.ask([rig.item(tool(rate="1/s"), {"domain": "a.example"}, asked=rig.clock.now())])
    await rig.stop()
    assert outcome.outcome == "completed"


async def test_one_call_that_cannot_be_let_go_keeps_no_other_in_hand(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    find = tool()
    rig.port.script = answering({}, status=429, Retry_After="60")
    await rig.ask([rig.item(find, {"domain": "first"})])
    expire = rig.engine.dispatcher.expire

    def fails_for_one(call: Call, flight: Flight) -> None:
        if b"bad" in bytes(flight.input):
            raise RuntimeError("nobody foresaw this")
        expire(call, flight)

    monkeypatch.setattr(rig.engine.dispatcher, "admit", rig.engine.dispatcher.resume)
    monkeypatch.setattr(rig.engine.dispatcher, "expire", fails_for_one)
    bad = rig.item(find, {"domain": "bad"})
    others = [rig.item(find, {"domain": f"d{number}"}) for number in range(3)]
    rig.hand_in([bad, others[0]])
    rig.hand_in(others[1:])
    outcomes = [await rig.bus.outcome(item.call_id) for item in [bad, *others]]
    assert {outcome.outcome for outcome in outcomes} == {"deferred"}
    assert outcomes[0].reason == "the gateway failed"
