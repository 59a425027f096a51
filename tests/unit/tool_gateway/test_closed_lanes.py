"""What a lane has learned of its provider goes with it: to whoever is handed it, takes it from the dead, or starts when all have gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts
from tests.unit.tool_gateway.conftest import Hold, Rig, answering, find_tool
from tests.unit.tool_gateway.test_handing_over import FIRST, LANE, SECOND, SHARD, holder, present, until

from rowmill.runtime.clock import SystemClock
from rowmill_contracts.digests import shard_of
from rowmill_contracts.events import AskLanes
from rowmill_contracts.shards import LaneStanding, LeaseShard
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.settings import ToolGatewaySettings

HOUR = 3600.0
OTHER_ORG = next(org for org in (f"org-{number}" for number in range(1000)) if shard_of(org, "hunter") == SHARD)


@pytest.fixture
def patient(settings: ToolGatewaySettings) -> ToolGatewaySettings:
    """Calls are held until something else lets them go, and claimed as soon as they come."""
    return settings.model_copy(update={"hand": 6.0, "claim_ahead": 60.0, "longest_closing": HOUR})


def closing(seconds: float) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
    return answering({}, status=429, Retry_After=str(seconds))


def lane_of(rig: Rig, org: str = "acme") -> Lane:
    return next(lane for lane in rig.engine.dispatcher.lanes if lane.org == org)


def told(rig: Rig) -> LaneStanding | None:
    """What the receipt-store would tell now."""
    known = rig.store.standings.get((SHARD, LANE))
    return None if known is None else known.standing(rig.clock.now())


def leases(rig: Rig, since: int = 0) -> list[LeaseShard]:
    """What it asked for its shards."""
    return [request for request in rig.bus.asked[since:] if isinstance(request, LeaseShard)]


async def closed_at(rig: Rig, find: Any, seconds: float) -> Lane:
    """The rig's lane after a call was told to come back so much later."""
    rig.port.script = closing(seconds)
    [outcome] = await rig.ask([rig.item(find, {"domain": "first.example"})])
    assert outcome.outcome in {"deferred", "failed"}
    return lane_of(rig)


def die(rig: Rig) -> None:
    """It is killed: nobody hears of it again."""
    for task in rig.engine._loops:
        task.cancel()


def lasting_store() -> MemoryReceipts:
    """No lease in it ends, and no gateway is taken for dead, while a test lasts."""
    return MemoryReceipts(SystemClock().now, queued=600.0, running=600.0, shard=600.0, held_poll=0.01)


def seldom_renewing(settings: ToolGatewaySettings) -> Rig:
    """It renews its leases, which last, so seldom that a test does not see it."""
    return Rig(settings.model_copy(update={"shard_renewal": 60.0}), lasting_store(), holder=FIRST)


async def handed_over(first: Rig) -> None:
    async with present(first, SECOND):
        await until(lambda: holder(first) == "")


async def killed(first: Rig) -> None:
    await until(lambda: told(first) is not None)
    die(first)


async def stopped(first: Rig) -> None:
    await first.stop()


@pytest.fixture
async def second() -> AsyncIterator[Callable[[Rig], Rig]]:
    made: list[Rig] = []

    def start(first: Rig) -> Rig:
        made.append(Rig(first.settings, first.store, holder=SECOND))
        return made[-1]

    yield start
    for rig in made:
        rig.engine.hand.put_down()
        await rig.stop()


GOING = [handed_over, killed, stopped]


@pytest.mark.parametrize("goes", GOING)
async def test_whoever_has_a_closed_lane_next_sends_nothing_until_it_opens(
    goes: Callable[[Rig], Awaitable[None]], patient: ToolGatewaySettings, second: Callable[[Rig], Rig]
) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool()
    opens = (await closed_at(first, find, 0.6)).closed_until
    await goes(first)
    next_one = second(first)
    sent: list[float] = []

    async def noted(request: HttpRequest) -> HttpResponse:
        sent.append(next_one.clock.monotonic())
        return await answering({"email": "a@example"})(request)

    next_one.port.script = noted
    item = next_one.item(find, {"domain": "next.example"})
    next_one.hand_in([item])
    assert (await next_one.bus.outcome(item.call_id)).outcome == "completed"
    assert sent[0] >= opens
    await until(lambda: told(first) is not None and told(first).away is None)  # type: ignore[union-attr]
    assert (told(first).closed, told(first).away) == (0.0, None), "it serves again, so nobody closes it by an old word"  # type: ignore[union-attr]
    die(first)


@pytest.mark.parametrize("goes", GOING)
async def test_a_lane_that_was_halved_goes_on_halved(
    goes: Callable[[Rig], Awaitable[None]], patient: ToolGatewaySettings, second: Callable[[Rig], Rig]
) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool(concurrency=8, rate="1000/s")
    await closed_at(first, find, HOUR)
    await goes(first)
    next_one = second(first)
    next_one.hand_in([next_one.item(find, {"domain": "next.example"})])
    await until(lambda: next_one.engine.shards.holds(SHARD))
    lane = lane_of(next_one)
    assert (lane.share, lane.allowed) == (0.5, 4)
    assert lane.pace is not None
    assert lane.pace.per_second == 500.0
    [shown] = next_one.engine.show(AskLanes()).lanes
    assert shown.held
    assert shown.closed_seconds is not None
    assert HOUR - 60 < shown.closed_seconds <= HOUR
    assert shown.unavailable_seconds is not None
    assert next_one.port.requests == []
    die(first)


async def test_a_lane_whose_provider_could_not_be_reached_goes_on_probing(patient: ToolGatewaySettings, second: Callable[[Rig], Rig]) -> None:
    patient = patient.model_copy(update={"probe_first": 60.0, "probe_limit": 60.0, "retry_first": 0.001, "retry_limit": 0.001})

    async def unreachable(request: HttpRequest) -> HttpResponse:
        raise NoResponse("never_opened", "no route")

    first = Rig(patient, holder=FIRST)
    first.port.script = unreachable
    find = find_tool(concurrency=8)
    first.hand_in([first.item(find, {"domain": f"{number}.example"}) for number in range(8)])
    await until(lambda: lane_of(first).probing)
    await handed_over(first)
    next_one = second(first)
    next_one.hand_in([next_one.item(find, {"domain": "next.example"})])
    await until(lambda: next_one.engine.shards.holds(SHARD))
    lane = lane_of(next_one)
    assert lane.probing
    assert lane.slots == 1
    assert lane.closed_until > next_one.clock.monotonic()
    assert lane.kept_waiting, "those whom its former holder told to wait are to be called back"
    assert next_one.port.requests == []
    await first.stop()


async def test_a_lane_that_has_its_first_call_long_after_its_shard_was_taken_is_closed_all_the_same(
    patient: ToolGatewaySettings, second: Callable[[Rig], Rig]
) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool()
    await closed_at(first, find, HOUR)
    await first.stop()
    next_one = second(first)
    await next_one.ask([next_one.item(find, {"domain": "a.example"}, org=OTHER_ORG)], org=OTHER_ORG)
    assert len(next_one.port.requests) == 1
    [outcome] = await next_one.ask([next_one.item(find, {"domain": "a.example"})])
    assert outcome.outcome != "completed"
    assert len(next_one.port.requests) == 1
    assert lane_of(next_one).closed_until - next_one.clock.monotonic() > HOUR - 60


async def test_a_long_closing_is_told_at_once_and_many_at_a_time_in_few_messages(patient: ToolGatewaySettings) -> None:
    first = seldom_renewing(patient)
    provider = Hold(first)
    find = find_tool(concurrency=50)
    first.hand_in([first.item(find, {"domain": f"{number}.example"}) for number in range(50)])
    await until(lambda: provider.open == 50)
    asked = len(first.bus.asked)

    async def refusing(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0.002 * len(first.bus.outcomes))
        return await closing(HOUR)(request)

    provider.then = refusing
    provider.answer()
    await until(lambda: len(first.bus.outcomes) == 50)
    await until(lambda: told(first) is not None)
    assert 1 <= len(leases(first, asked)) <= 2, "one, and one for what was learned while it was on its way"
    await first.stop()


async def test_a_shorter_closing_goes_with_the_last_words(patient: ToolGatewaySettings) -> None:
    first = seldom_renewing(patient)
    await closed_at(first, find_tool(), 30.0)
    assert told(first) is None, "it is told with the next renewal"
    await first.stop()
    known = told(first)
    assert known is not None
    assert known.closed > 20.0


async def test_a_closing_that_is_over_is_not_told(patient: ToolGatewaySettings) -> None:
    first = seldom_renewing(patient)
    find = find_tool()
    lane = await closed_at(first, find, 0.1)
    await until(lambda: first.clock.monotonic() > lane.closed_until)
    assert told(first) is None, "it was over before the next renewal"
    first.port.script = answering({"email": "a@example"})
    await first.ask([first.item(find, {"domain": "next.example"})])
    lane._throttle.share = 1.0
    await first.stop()
    assert told(first) is None, "it stands as a new one does"


async def test_what_is_not_stored_is_told_again(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool()
    await first.ask([first.item(find, {"domain": "a.example"})])
    first.bus.silent.add(LeaseShard)
    await closed_at(first, find, HOUR)
    asked = len(first.bus.asked)
    await until(lambda: sum(bool(request.standings) for request in leases(first, asked)) > 1)
    first.bus.silent.clear()
    await until(lambda: not leases(first)[-1].standings)
    known = len(first.bus.asked)
    await until(lambda: len(leases(first, known)) > 3)
    assert not any(request.standings for request in leases(first, known)), "once it is known it is not told any more"
    await first.stop()


@pytest.mark.parametrize("ends", [False, True], ids=["stays", "ends"])
async def test_an_answer_to_a_request_that_was_left_open_closes_the_lane_for_who_has_it_now(patient: ToolGatewaySettings, ends: bool) -> None:
    first = Rig(patient, lasting_store(), holder=FIRST)
    provider = Hold(first)
    provider.then = closing(HOUR)
    find = find_tool(concurrency=2)
    first.hand_in([first.item(find, {"domain": f"{number}.example"}) for number in range(2)])
    await until(lambda: provider.open == 2)
    next_one = Rig(patient, first.store, holder=SECOND)
    first.others.append(next_one)
    await until(lambda: {FIRST, SECOND} <= first.store.gateways.keys())
    for gateway in first.store.gateways.values():
        gateway.joined = 0.0  # for long enough to have a share
    leaving = asyncio.create_task(first.engine.stop(20.0)) if ends else None
    await until(lambda: holder(first) != FIRST)
    next_one.hand_in([next_one.item(find, {"domain": "10.example"})])
    await until(lambda: next_one.engine.shards.holds(SHARD))
    assert next_one.port.requests == []
    lane = lane_of(next_one)
    assert lane.slots == 0
    provider.answer()
    if leaving is not None:
        await leaving
        [said] = first.store.gateways[FIRST].open
        assert (said.lane, said.requests, said.closed > HOUR - 60) == (LANE, 0, True), "it stands for as long as the gateway would be taken for alive"
    await until(lambda: lane.slots == 2)
    assert lane.closed_until - next_one.clock.monotonic() > HOUR - 60
    assert next_one.port.requests == []
    await until(lambda: told(first) is not None)  # and for whoever has it after that one
    next_one.engine.hand.put_down()
    await next_one.stop()
    if leaving is None:
        await first.stop()


async def test_who_has_lost_a_shard_says_nothing_of_its_lanes(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool()
    lane = await closed_at(first, find, HOUR)
    first.hand_in([first.item(find, {"domain": "b.example"}, asked=first.clock.now())])
    shard = first.store.shards[SHARD]
    shard.ended_term, shard.term, shard.holder, shard.expires = shard.term, shard.term + 1, "another", first.clock.now() + 100
    await until(lambda: not first.engine.shards.holds(SHARD))
    asked = len(first.bus.asked)
    lane.close(first.clock.monotonic(), 2 * HOUR)
    first.engine.shards.closed(lane)
    await until(lambda: sum(SHARD in request.shards for request in leases(first, asked)) > 2)
    assert not any(request.standings for request in leases(first, asked))
    first.engine.hand.put_down()
    await first.stop()


async def test_who_gets_a_shard_back_learns_what_happened_meanwhile(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    find = find_tool()
    lane = await closed_at(first, find, HOUR)
    opens = lane.closed_until
    await handed_over(first)
    taken = first.store.answer(LeaseShard(holder="another", shards=[SHARD], number=1))
    assert taken is not None
    term = first.store.shards[SHARD].term
    said = LaneStanding(LANE, SHARD, 2 * HOUR, 0.25, 0, 60.0)
    first.store.answer(LeaseShard(holder="another", shards=[SHARD], number=2, release=True, terms=[term], standings=[said]))
    assert told(first) is not None
    async with asyncio.timeout(20):
        while not first.engine.shards.holds(SHARD):
            first.hand_in([first.item(find, {"domain": "b.example"})])  # sent away, until it is known that the other one has gone
            await asyncio.sleep(0.02)
    assert lane.closed_until > opens + HOUR - 60
    assert lane.share == 0.25
    assert len(first.port.requests) == 1
    first.engine.hand.put_down()
    await first.stop()
