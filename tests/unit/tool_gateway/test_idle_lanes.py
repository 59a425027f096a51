"""A lane that has nothing to send while calls wait for it elsewhere has them come, whatever became of their appointments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.unit.tool_gateway.conftest import Rig
from tests.unit.tool_gateway.idle_world import BOUND, HAND, STEP, Row, World

from rowmill import HttpTool, Provider
from rowmill_contracts.tools import CallItem
from rowmill_tool_gateway.flights import Flight
from rowmill_tool_gateway.idling import PATIENCE
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.leaping

EVENTS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, 80)),
    st.tuples(st.just("run"), st.sampled_from([0.5, 3.0, 20.0])),
    st.tuples(st.just("stand_still"), st.sampled_from([1.0, 8.0])),
    st.tuples(st.just("copies"), st.integers(1, 100)),
    st.tuples(st.just("stop"), st.integers(1, 100)),
    st.tuples(st.just("refuse"), st.sampled_from([0.5, 10.0, 60.0])),
    st.tuples(st.sampled_from(["kill", "hand_over"])),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([None, "10/3s", "2/s", "30/60s"]), st.integers(1, 4), st.lists(EVENTS, min_size=1, max_size=10))
@example("10/3s", 2, [("come", 60), ("run", 1.0), ("stand_still", 8.0), ("come", 20), ("run", 3.0)])
@example(None, 1, [("come", 20), ("copies", 100), ("come", 20)])
@example(None, 2, [("come", 50), ("stop", 30)])
@example("2/s", 4, [("come", 20), ("copies", 60), ("come", 20), ("kill",)])
@example("2/s", 4, [("come", 1), ("kill",), ("run", 200.0), ("come", 80), ("copies", 60), ("come", 20), ("stop", 70)])
@example("2/s", 4, [("come", 20), ("stop", 5), ("hand_over",)])
@example(None, 1, [("refuse", 60.0), ("come", 1), ("kill",), ("come", 1)])
def test_a_lane_is_not_idle_for_long_while_rows_wait_for_it(rate: str | None, concurrency: int, events: list[tuple[str, float]]) -> None:
    world = World(rate, concurrency)
    for name, *given_ in events:
        getattr(world, name)(*given_)
    world.run(400.0)


def test_an_idle_lane_for_which_nobody_is_known_to_wait_says_nothing_more() -> None:
    world = World("10/s", 4)
    for _ in range(20):
        world.come(3)
        world.run(20.0)
    assert world.told == 1, "at first, when others may have had it before"


def test_a_lane_whose_rows_keep_their_appointments_says_nothing() -> None:
    world = World("10/s", 20)
    world.come(200)
    world.run(60.0)
    assert not world.waiting
    assert world.told <= 2, "at its end"


def test_it_is_said_ever_more_seldom_while_nobody_comes() -> None:
    """Of a call that comes from another gateway's appointment nobody knows whether others have any."""
    world = World("10/s", 4)
    world._take(Row(asked=world.now - 100.0))
    world.run(1000.0)
    assert 4 <= world.told <= 7


def test_who_is_sent_away_once_those_who_wait_were_called_comes_after_them_and_not_after_all_appointments() -> None:
    world = World("2/s", 4)
    world.come(10)
    world.copies(200)
    world.come(1)
    world.run(10.0)
    assert world.told
    world.come(20)
    assert max(row.due for row in world.waiting) < world.now + 30.0


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_who_gives_a_lane_up_has_one_come_that_waits_so_that_the_next_holder_hears_of_them(seconds: float) -> None:
    world = World("2/s", 4)
    world.come(80)
    world.run(seconds)
    waited, before = len(world.waiting), world.told
    world.ours = False
    world.idling.look(world.now)
    world.idling.look(world.now)
    assert world.told - before == (1 if waited else 0)


def test_a_lane_whose_lease_lapses_and_is_renewed_is_not_given_up_and_forgets_nobody() -> None:
    world = World("2/s", 4)
    world.come(80)
    world.copies(200)
    world.run(1.0)
    before = world.told
    world.away = True
    for _ in range(10):
        world.now += STEP
        world.idling.look(world.now)
    assert world.told == before
    world.away = False
    assert world.waiting
    world.run(400.0)


def test_what_cannot_be_told_of_an_idle_lane_is_told_as_soon_as_it_can() -> None:
    world = World("2/s", 4)
    world.come(20)
    world.stop(20)
    world.deaf = True
    until = world.now + 60.0
    while world.now < until:
        world.now += STEP
        world.in_hand.clear()
        world.idling.look(world.now)
    world.deaf, world.idle_since = False, None
    world.waiting.append(Row(asked=world.now, due=world.now + 200.0))
    world.run(30.0)
    assert not world.waiting


def called_once(world: World) -> float:
    """When it is said of a lane with nothing in hand that somebody may wait for it."""
    world._take(Row(asked=world.now - 100.0))
    world.in_hand.clear()
    while not world.told:
        world.now += STEP
        world.idling.look(world.now)
        assert world.now < 1000.0 + BOUND
    return world.now


@pytest.mark.parametrize(("seconds", "in_hand", "again"), [(HAND, 2, 1), (HAND / 2, 2, 0), (2 * HAND, 2, 0), (HAND, 10_000, 0)])
def test_where_fewer_came_than_are_to_be_in_hand_it_is_said_once_more(seconds: float, in_hand: int, again: int) -> None:
    """Some of those who were called may have had no call to make. Who is in hand may be sent, and is about to be."""
    world = World("10/s", 20)
    at = called_once(world)
    world.in_hand += [Row(asked=at)] * in_hand
    world.idling.look(at + seconds)
    assert world.told - 1 == again


def test_what_could_not_be_told_is_told_after_the_same_patience_again() -> None:
    world = World("10/s", 20)
    world.deaf = True
    world._take(Row(asked=world.now - 100.0))
    world.in_hand.clear()
    for _ in range(7):
        world.idling.look(world.now)
        world.now += STEP
    world.deaf = False
    before = world.now
    called_once(world)
    assert world.now - before <= HAND / PATIENCE + STEP


# ---- in a whole gateway ----


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


def tool(**limits: Any) -> type[HttpTool[FindIn, FindOut]]:
    provider = Provider("there", base_url="http://127.0.0.1:1", **limits)

    @provider.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        pass

    return Find


def asked_at_once(rig: Rig, find: Any, count: int) -> list[CallItem]:
    now = rig.clock.now()
    return [rig.item(find, {"domain": f"d{number}"}, asked=now) for number in range(count)]


async def test_a_gateway_says_so_of_a_lane_that_it_has_and_none_of_whose_calls_come_again() -> None:
    rig = Rig(ToolGatewaySettings(hand=0.4))
    find = tool(rate="10/s", concurrency=2)
    await rig.ask([rig.item(find, {"domain": "first"}, asked=rig.clock.now())])  # the lane is ours
    outcomes = await rig.ask(asked_at_once(rig, find, 40))
    assert {outcome.outcome for outcome in outcomes} == {"completed", "deferred"}
    async with asyncio.timeout(20):
        while not rig.sooner:
            await asyncio.sleep(0.01)
    await rig.stop()
    told = rig.sooner[0]
    assert (told.org, told.provider, told.sooner) == ("acme", "there", True)
    assert told.at_once >= 1


async def test_a_gateway_that_takes_a_lane_over_says_so_once_calls_come_that_had_waited_for_another() -> None:
    rig = Rig(ToolGatewaySettings(hand=0.4))
    [outcome] = await rig.ask([rig.item(tool(rate="10/s"), {"domain": "old"}, asked=rig.clock.now() - 10)])
    assert outcome.outcome == "completed"
    async with asyncio.timeout(20):
        while not rig.sooner:
            await asyncio.sleep(0.01)
    await rig.stop()


async def test_a_gateway_says_nothing_more_of_a_lane_whose_calls_all_were_sent(rig: Rig) -> None:
    outcomes = await rig.ask(asked_at_once(rig, tool(concurrency=2), 10))
    assert {outcome.outcome for outcome in outcomes} == {"completed"}
    await rig.clock.sleep(3 * rig.settings.hand)
    assert len(rig.sooner) == 1


async def test_a_gateway_says_nothing_of_its_lanes_when_their_lease_lapses_and_is_renewed() -> None:
    rig = Rig(ToolGatewaySettings(hand=0.4))
    item = rig.item(tool(), {"domain": "first"}, asked=rig.clock.now())
    await rig.ask([item])
    [lane] = rig.engine.dispatcher.lanes
    async with asyncio.timeout(20):
        while not rig.sooner:
            await asyncio.sleep(0.01)
        rig.engine.shards.refused(lane.shard)
        assert rig.engine.shards.lapsed(lane.shard)
        while not rig.engine.shards.holds(lane.shard):
            await asyncio.sleep(0.01)
    await rig.clock.sleep(2 * rig.settings.hand)
    await rig.stop()
    assert len(rig.sooner) == 1


async def test_a_row_whose_call_is_asked_for_twice_has_one_appointment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a new connection, when executors ask for everything again. Each would leave the lane idle for a turn."""
    rig = Rig(ToolGatewaySettings(hand=0.8, claim_ahead=0.0))

    def takes_all_in(flight: Flight) -> None:
        flight.looked = True
        rig.engine.dispatcher.resume(flight)

    monkeypatch.setattr(rig.engine.dispatcher, "admit", takes_all_in)
    find = tool(rate="10/s", concurrency=1)
    items = asked_at_once(rig, find, 50)
    rig.hand_in(items)
    await asyncio.sleep(rig.settings.hand / 4)
    outcomes = await rig.ask(asked_at_once(rig, find, 50))
    await rig.stop()
    sent_away = [outcome.wait_ms / 1000 for outcome in outcomes if outcome.outcome == "deferred"]
    assert len(sent_away) > 30
    assert max(sent_away) <= 50 / 10


async def test_a_burst_is_sent_by_which_the_hand_is_larger_than_the_rate() -> None:
    """Nobody waits for a turn that has come."""
    rig = Rig(ToolGatewaySettings(hand=0.4))
    outcomes = await rig.ask(asked_at_once(rig, tool(rate="30/60s", burst=30, concurrency=30), 40))
    await rig.stop()
    assert [outcome.outcome for outcome in outcomes] == ["completed"] * 30 + ["deferred"] * 10
    assert min(outcome.wait_ms for outcome in outcomes[30:]) > 50_000
