"""Permits of rates that gateways share: by simulated gateways on simulated clocks, judged by the times at which requests are written."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from tests.fakes.receipts import MemoryReceipts
from tests.unit.tool_gateway.conftest import Hold, Rig, find_tool

from rowmill.durations import Rate
from rowmill_contracts.shards import LeaseShard, ShardsLeased
from rowmill_tool_gateway.lanes import Lane, ProbePolicy
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.permits import Permits, Window

LIFE = 2.0
SHARD = 3


@dataclass
class World:
    """One clock for all, a store, and what the provider saw."""

    now: float = 1000.0
    written: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryReceipts(lambda: self.now, shard=6.0)


class Gateway:
    """Holds the shard when the store says so; sends as fast as it may. ``travel``: seconds that a question or an answer takes at most. It has more in
    hand than it may send, unless it is told how much.
    """

    def __init__(self, world: World, name: str, rate: Rate, dice: random.Random, *, burst: int = 1, travel: float = 0.03) -> None:
        self.world, self.name, self.dice, self.travel = world, name, dice, travel
        self.offset = dice.random() * 1e6  # its monotonic clock has nothing to do with the store's
        self.pace = Pace(rate, burst, shared=True)
        self.permits = Permits(LIFE)
        self.permits.add(Window("acme/hunter", SHARD, self.pace, lambda: self.in_hand))
        self.term = 0
        self.until = float("-inf")
        self.next_renewal = world.now
        self.in_hand = 10_000

    @property
    def clock(self) -> float:
        return self.world.now + self.offset

    def renew(self) -> None:
        """Ask and be answered; the world goes on meanwhile, and so does this gateway."""
        asked = self.clock
        drawings = self.permits.draws([SHARD], asked)
        request = LeaseShard(holder=self.name, shards=[SHARD], draws=[drawing.draw for drawing in drawings])
        self.send_until(self.world.now + self.dice.random() * self.travel)
        reply = self.world.store.answer(request)
        assert isinstance(reply, ShardsLeased)
        self.send_until(self.world.now + self.dice.random() * self.travel)
        [lease] = reply.shards
        if not lease.held or lease.term != self.term:
            self.permits.lost(SHARD)
        self.term, self.until = lease.term, asked + lease.seconds if lease.held else float("-inf")
        self.permits.drawn(drawings, reply.drawn, {SHARD: lease.term} if lease.held else {}, self.clock)

    def release(self) -> None:
        drawings = self.permits.last_words([SHARD], self.clock)
        self.until = float("-inf")
        self.permits.lost(SHARD)
        self.world.now += self.dice.random() * self.travel
        self.world.store.answer(LeaseShard(holder=self.name, shards=[SHARD], release=True, draws=[drawing.draw for drawing in drawings]))

    def send_until(self, end: float) -> None:
        """Send whatever may be sent up to then, each a little late, some after a slow connection."""
        while True:
            at = max(self.pace.due_at() - self.offset, self.world.now) + self.dice.random() * 0.002
            if at > end or not self.in_hand or not self.pace.permitted(at + self.offset) or at + self.offset >= self.until:
                self.world.now = max(self.world.now, end)
                return
            self.world.now = at
            self.pace.begin(self.clock)
            self.pace.wrote(self.clock)
            self.world.written.append(at)
            self.in_hand -= 1

    def work_until(self, end: float) -> None:
        while self.world.now < end:
            self.renew()
            self.send_until(min(end, self.world.now + 1.0))


def never_exceeded(written: list[float], rate: Rate) -> None:
    assert all(earlier <= later for earlier, later in pairwise(written))
    for first, beyond in zip(written, written[rate.requests :], strict=False):
        assert beyond - first >= rate.window_seconds - 1e-6, f"{rate.requests + 1} requests within {beyond - first:.4f} s"


RATES = [Rate(200, 1.0), Rate(10, 1.0), Rate(60, 60.0), Rate(7, 0.5), Rate(20, 10.0)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("burst", [1, 5, 60])
def test_a_rate_is_exact_over_handing_over_dying_and_freezing(rate: Rate, burst: int) -> None:
    """Gateways take turns in every way that there is, and the provider never sees more in any window than it allows."""
    for seed in range(8):
        dice = random.Random(seed)
        world = World()
        gateways = [Gateway(world, f"gateway-{n}", rate, dice, burst=burst) for n in range(3)]
        for _ in range(8):
            gateway = dice.choice(gateways)
            gateway.in_hand = dice.choice([1, rate.requests // 2, 10_000])
            end = world.now + dice.choice([0.5, 2.5, 1.3 * rate.window_seconds])
            gateway.work_until(end)
            match dice.choice(["hand over", "die", "freeze", "lose an answer"]):
                case "hand over":
                    gateway.release()
                case "die":
                    gateways[gateways.index(gateway)] = Gateway(world, f"again-{seed}-{world.now}", rate, dice, burst=burst)
                    world.now += 6.0
                case "freeze":
                    world.now += dice.choice([1.0, 3.0, 7.0])
                    gateway.send_until(world.now + 1.0)  # thawed: whatever it may still send by its own clock
                case "lose an answer":
                    drawings = gateway.permits.draws([SHARD], gateway.clock)
                    world.store.answer(LeaseShard(holder=gateway.name, shards=[SHARD], draws=[drawing.draw for drawing in drawings]))
                    gateway.send_until(world.now + 3.0)
        never_exceeded(world.written, rate)


@pytest.mark.parametrize("burst", [1, 10])
@pytest.mark.parametrize("rate", [Rate(200, 1.0), Rate(10, 1.0), Rate(60, 60.0)])
def test_while_there_is_work_a_rate_is_used_to_the_full(rate: Rate, burst: int) -> None:
    world = World()
    gateway = Gateway(world, "gateway", rate, random.Random(1), burst=burst)
    began = world.now
    gateway.work_until(began + 10 * rate.window_seconds)
    assert len(world.written) >= 0.98 * rate.requests * (world.now - began) / rate.window_seconds


def test_after_handing_over_in_order_nothing_of_the_rate_is_lost() -> None:
    rate = Rate(60, 60.0)
    world = World()
    gateways = [Gateway(world, f"gateway-{n}", rate, random.Random(n)) for n in range(2)]
    began = world.now
    for turn in range(20):
        gateways[turn % 2].work_until(world.now + 15.0)
        gateways[turn % 2].release()
    assert len(world.written) >= 0.98 * (world.now - began)
    never_exceeded(world.written, rate)


BURST = Rate(30, 60.0)


def test_of_a_burst_no_more_is_drawn_than_is_there_to_be_sent() -> None:
    """What was drawn counts as sent when its gateway dies: with the whole burst each time, the next one would stand still for a window."""
    world = World()
    dying, successor = (Gateway(world, name, BURST, random.Random(1), burst=30) for name in ("dying", "successor"))
    dying.in_hand = 3
    dying.work_until(world.now + 2.5)
    assert len(world.written) == 3
    world.now += 6.0
    successor.work_until(world.now + 5.0)
    assert len(world.written) >= 30 - 2, "but for what comes at an even pace while permits are good"
    never_exceeded(world.written, BURST)


def test_no_more_is_drawn_than_the_window_has_room_for() -> None:
    """However much is in hand: else one that dies at the end of its burst would have the lane stand still for a window after its death."""
    world = World()
    dying, successor = (Gateway(world, name, BURST, random.Random(1), burst=30) for name in ("dying", "successor"))
    dying.work_until(world.now + 2.5)
    assert len(world.written) == 30
    dying.work_until(world.now + 40.0)
    assert len(world.written) == 30
    again = world.written[0] + BURST.window_seconds
    world.now += 6.0
    successor.work_until(again + 5.0)
    assert len(world.written) >= 2 * 30 - 2
    never_exceeded(world.written, BURST)


def test_nothing_of_a_burst_is_drawn_before_it_is_known_what_others_sent() -> None:
    """It could not be sent yet, and would count as sent should the answer be the last that its gateway hears."""
    world = World()
    dying, successor = (Gateway(world, name, BURST, random.Random(1), burst=30) for name in ("dying", "successor"))
    dying.renew()
    assert not world.written
    world.now += 6.0
    successor.work_until(world.now + 5.0)
    assert len(world.written) >= 30 - 2
    never_exceeded(world.written, BURST)


async def test_what_is_drawn_for_a_lane_is_what_its_calls_in_hand_can_use(rig: Rig) -> None:
    """Three of them, of which one at a time goes, and what comes at an even pace while permits are good."""
    find = find_tool(rate="100/10s", burst=100, concurrency=1)
    held = Hold(rig)
    items = [rig.item(find, {"domain": f"d{number}"}) for number in range(3)]
    rig.hand_in(items)
    async with asyncio.timeout(20):
        while not held.open or not rig.store._leasing.windows["acme/hunter"].sent:
            await asyncio.sleep(0.01)
    drawn = [draw.permits for request in rig.bus.asked if isinstance(request, LeaseShard) for draw in request.draws]
    held.answer()
    assert {(await rig.bus.outcome(item.call_id)).outcome for item in items} == {"completed"}
    assert len(drawn) >= 2, "and not before the first answer alone, when what others sent is not known"
    assert max(drawn) <= 3 + 2


def test_of_a_burst_that_slots_hold_back_only_those_count_that_can_begin() -> None:
    lane = Lane("acme", "hunter", SHARD, concurrency=2, pace=None, probes=ProbePolicy(5, 1.0, 30.0))
    for _ in range(50):
        lane.opened(0.0)
        lane.finished(10.0)
    assert lane.requests_within(LIFE) == 3, "two now, and perhaps one when the first ends"
    lane.opened(0.0)
    lane.opened(0.0)
    assert lane.requests_within(LIFE) == 1


def test_an_old_copy_of_a_draw_changes_nothing() -> None:
    """A request may be delivered again later; its report knows nothing of what was sent since."""
    world = World()
    rate = Rate(60, 60.0)
    gateway = Gateway(world, "gateway", rate, random.Random(1))
    gateway.work_until(world.now + 5.0)
    old = gateway.permits.draws([SHARD], gateway.clock)
    gateway.work_until(world.now + 40.0)
    world.store.answer(LeaseShard(holder="gateway", shards=[SHARD], draws=[drawing.draw for drawing in old]))
    world.now += 6.0
    Gateway(world, "successor", rate, random.Random(2), burst=60).work_until(world.now + 5.0)
    assert len(world.written) > 50
    never_exceeded(world.written, rate)


def test_without_an_answer_permits_end_by_the_gateways_own_clock() -> None:
    world = World()
    gateway = Gateway(world, "gateway", Rate(10, 1.0), random.Random(1), travel=1.0)
    asked = world.now
    gateway.renew()
    assert world.now > asked + 0.5, "the answer took its time"
    gateway.send_until(asked + 30.0)
    assert world.written
    assert max(world.written) < asked + LIFE
    assert not gateway.pace.may_write(gateway.clock)
