"""Many idle lanes are spoken of a few at a time, and how that is told."""

from __future__ import annotations

import asyncio

from tests.unit.tool_gateway.idle_world import HAND, SETTINGS, STEP

from rowmill.errors import UnavailableError
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.runs import ProviderServes
from rowmill_tool_gateway.calling_back import AT_A_TIME, CallBack
from rowmill_tool_gateway.idling import EACH_LOOK, Idling
from rowmill_tool_gateway.lanes import Lane, ProbePolicy


class Many:
    """Lanes of one provider, with nothing in hand."""

    def __init__(self, count: int) -> None:
        probes = ProbePolicy(5, SETTINGS.probe_first, SETTINGS.probe_limit)
        self.lanes = [Lane(f"org{number}", "hunter", number % 16, concurrency=2, pace=None, probes=probes) for number in range(count)]
        self.told: list[str] = []
        self.idling = Idling(lambda: self.lanes, self, SETTINGS, self._sooner)
        self.now = 1000.0
        for lane in self.lanes:
            self.call(lane)

    def call(self, lane: Lane, waited: float = 0.0) -> None:
        lane.called(self.now, waited, 1.0, HAND, SETTINGS.away_wait)

    def holds(self, shard: int) -> bool:
        return True

    def lapsed(self, shard: int) -> bool:
        return False

    def may_send(self, lane: Lane) -> bool:
        return True

    def backlog(self, lane: Lane) -> int:
        return 0

    def _sooner(self, message: ProviderServes) -> bool:
        self.told.append(message.org)
        return True

    def looks(self, seconds: float) -> list[int]:
        """How often each look of so many seconds said it."""
        said: list[int] = []
        for _ in range(int(seconds / STEP)):
            self.now += STEP
            before = len(self.told)
            self.idling.look(self.now)
            said.append(len(self.told) - before)
        return said


def test_of_many_lanes_that_are_idle_at_once_few_are_spoken_of_at_a_time_and_those_first_for_which_somebody_waits() -> None:
    many = Many(100)
    waited_for = many.lanes[55:60]
    for lane in waited_for:
        many.call(lane, waited=100.0)
    assert max(many.looks(HAND)) == EACH_LOOK
    assert sorted(many.told[: len(waited_for)]) == [lane.org for lane in waited_for]
    assert set(many.told) == {lane.org for lane in many.lanes}
    assert len(many.told) == len(many.lanes), "each once"


def test_of_lanes_of_which_nobody_has_heard_for_as_long_as_a_call_may_wait_nothing_is_said_when_they_change_hands() -> None:
    many = Many(20)
    many.looks(HAND)
    many.now += SETTINGS.away_wait
    many.call(many.lanes[3])
    for lane in many.lanes:
        lane.taken_over(many.now)
    many.told.clear()
    many.looks(2 * HAND)
    assert many.told == [many.lanes[3].org]


async def test_that_a_lane_is_idle_is_told_once_and_not_while_its_rows_are_called_back_anyway() -> None:
    told: list[ProviderServes] = []
    confirmed = asyncio.Event()

    async def publish(message: ProviderServes) -> None:
        told.append(message)
        await confirmed.wait()

    idle, serves = (ProviderServes(org="acme", provider="there", per_second=1.0, sooner=sooner) for sooner in (True, False))
    call_back = CallBack(publish, every=3600.0, for_long=3600.0, clock=SystemClock())
    assert [call_back.sooner(idle), call_back.sooner(idle)] == [True, False]
    await asyncio.sleep(0)
    confirmed.set()
    while call_back._telling:
        await asyncio.sleep(0)
    assert told == [idle]
    call_back.sooner(idle)
    while call_back._telling:
        await asyncio.sleep(0)
    assert told == [idle, idle]
    call_back.serves("acme", "there", lambda: serves)
    assert not call_back.sooner(idle)
    while len(told) < 3:
        await asyncio.sleep(0)
    await call_back.stop()
    assert told == [idle, idle, serves]


async def test_a_broker_that_is_away_ends_no_telling_and_few_are_under_way_at_a_time() -> None:
    under_way = most = 0
    told: list[str] = []

    async def publish(message: ProviderServes) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        told.append(message.org)
        raise UnavailableError("no broker") if len(told) % 2 else RuntimeError("who knows")

    call_back = CallBack(publish, every=0.001, for_long=3600.0, clock=SystemClock())
    for number in range(20):
        assert call_back.sooner(ProviderServes(org=f"org{number}", provider="there", per_second=1.0, sooner=True))
    tasks = list(call_back._telling.values())
    while call_back._telling:
        await asyncio.sleep(0)
    assert [task.exception() for task in tasks] == [None] * 20
    assert (len(told), most) == (20, AT_A_TIME)
    call_back.serves("acme", "there", lambda: ProviderServes(org="acme", provider="there", per_second=1.0))
    async with asyncio.timeout(20):
        while told.count("acme") < 3:
            await asyncio.sleep(0.001)
    await call_back.stop()
