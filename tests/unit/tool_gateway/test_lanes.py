"""Pacing, lanes, groups and turns, on a clock that is a number."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rowmill.durations import Rate
from rowmill_tool_gateway.fairness import RunQueue
from rowmill_tool_gateway.groups import Group
from rowmill_tool_gateway.lanes import Lane, ProbePolicy
from rowmill_tool_gateway.pacing import Pace

PROBES = ProbePolicy(after=5, first=1.0, limit=30.0)


def lane(*, concurrency: int = 10, rate: str | None = None) -> Lane:
    pace = None if rate is None else Pace(Rate.parse(rate))
    return Lane("acme", "hunter", 0, concurrency=concurrency, pace=pace, probes=PROBES)


def sends(pace: Pace, until: float, lateness: random.Random) -> list[float]:
    """Send as often as the pace allows, each time a little late, as timers are."""
    now, times = 0.0, []
    while now < until:
        now = max(now, pace.due_at()) + lateness.random() * 0.004
        pace.begin(now)
        pace.wrote(now)
        times.append(now)
    return times


def test_a_rate_is_never_exceeded_in_any_window_and_used_to_the_full() -> None:
    for rate, seed in ((Rate(200, 1.0), 1), (Rate(10, 1.0), 2), (Rate(60, 60.0), 3)):
        times = sends(Pace(rate), 10 * rate.window_seconds, random.Random(seed))
        for first, after in zip(times, times[rate.requests :], strict=False):
            assert after - first >= rate.window_seconds
        assert len(times) >= 0.98 * 10 * rate.requests


def test_a_request_that_is_written_late_holds_its_place_until_then() -> None:
    """Connections may open slowly, and then all at once: what counts is when requests are written."""
    pace = Pace(Rate(10, 1.0), burst=10)
    for _ in range(4):
        pace.begin(0.0)  # these connect for a while
    for _ in range(6):
        pace.begin(0.0)
        pace.wrote(0.0)
    assert pace.due_at() == math.inf or pace.due_at() >= 1.0
    for number in range(6):
        assert pace.due_at() <= 1.0 + number / 10
        pace.begin(1.0 + number / 10)
        pace.wrote(1.0 + number / 10)
    for _ in range(4):
        pace.wrote(1.5)
    assert pace.due_at() >= 2.0, "ten were written between 1.0 and 1.5"


def test_there_is_no_burst_unless_it_is_declared() -> None:
    even, bursting = Pace(Rate(10, 1.0)), Pace(Rate(10, 1.0), burst=5)
    for pace, at_once in ((even, 1), (bursting, 5)):
        taken = 0
        while pace.due_at() <= 100.0:
            pace.begin(100.0)
            taken += 1
        assert taken == at_once


def test_short_lateness_is_made_up_for_and_idleness_is_not() -> None:
    pace = Pace(Rate(200, 1.0))
    pace.begin(0.0)
    taken = 0
    while pace.due_at() <= 0.041:  # a busy loop came late
        pace.begin(0.041)
        taken += 1
    assert taken == 8
    taken = 0
    while pace.due_at() <= 10.0:
        pace.begin(10.0)
        taken += 1
    assert taken == 1, "no burst after a pause"


def test_sends_that_timers_make_late_do_not_make_each_window_begin_later() -> None:
    pace = Pace(Rate(200, 1.0))
    lateness = random.Random(4)
    writes: list[float] = []
    now = 0.0
    while now < 20.0:
        now = max(now, pace.due_at()) + lateness.choice([0.0, 0.0, 0.001, 0.004])
        pace.begin(now)
        pace.wrote(now)
        writes.append(now)
    assert all(later - earlier >= 1.0 for earlier, later in zip(writes, writes[200:], strict=False))
    assert sum(10.0 <= at < 20.0 for at in writes) >= 0.98 * 2_000


def test_a_lane_sends_within_its_concurrency() -> None:
    narrow = lane(concurrency=2)
    assert narrow.may_send(0.0)
    narrow.opened(0.0)
    narrow.opened(0.0)
    assert not narrow.may_send(0.0)
    narrow.finished(0.1)
    assert narrow.may_send(0.0)


def test_a_closed_lane_claims_and_sends_nothing_until_it_opens() -> None:
    closed = lane()
    closed.close(0.0, 10.0)
    closed.close(0.0, 5.0)
    assert not closed.may_send(9.9)
    assert closed.claim_room(9.9, 0.1) == 0
    assert closed.may_send(10.0)


def missed(unreachable: Lane, now: float) -> None:
    """A request of its own."""
    unreachable.opened(now)
    unreachable.finished(0.1)
    unreachable.missed(now, 1.0)


def test_after_five_misses_one_probe_at_a_time_with_growing_waits() -> None:
    unreachable = lane()
    for _ in range(4):
        missed(unreachable, 0.0)
    assert unreachable.may_send(0.0)
    missed(unreachable, 0.0)
    assert unreachable.closed_until == 1.0
    missed(unreachable, 1.0)
    assert unreachable.closed_until == 3.0
    assert unreachable.slots == 1
    unreachable.reached()
    assert unreachable.slots == 10


def test_what_was_begun_before_a_lane_closed_says_nothing_new() -> None:
    """A provider that was away for a moment was not asked for half a minute, since all connections that had been begun counted as probes."""
    unreachable = lane(concurrency=50)
    for _ in range(50):
        unreachable.opened(0.0)
    for at in range(50):
        unreachable.finished(at / 2)
        unreachable.missed(at / 2, 1.0)
    assert unreachable.closed_until == 3.0, "a second after the fifth"
    missed(unreachable, 25.0)
    assert unreachable.closed_until == 27.0


def test_claims_keep_just_ahead_of_what_can_be_sent() -> None:
    busy = lane(concurrency=10)
    assert busy.claim_room(0.0, 0.05) == 20
    busy.claimed = 15
    assert busy.claim_room(0.0, 0.05) == 5
    paced = lane(rate="10/s")
    assert 1.0 <= paced.claim_room(0.0, 0.1) <= 2.0


def test_appointments_follow_one_another_at_the_lanes_rate() -> None:
    paced = lane(rate="10/s")
    waits = [paced.appoint(0.0, 1.0, 1.0) for _ in range(3)]
    assert [round(wait, 6) for wait in waits] == [1.1, 1.2, 1.3]


def test_a_provider_that_is_not_reached_spreads_appointments_at_its_last_known_rate() -> None:
    unreachable = lane(concurrency=10)
    for _ in range(20):
        unreachable.opened(0.0)
        unreachable.finished(1.0)
    usual = unreachable.requests_per_second()
    for _ in range(5):
        unreachable.missed(0.0, 1.0)
    assert unreachable.slots == 1
    waits = [unreachable.appoint(0.0, 0.2, 1.0) for _ in range(100)]
    assert waits[0] > unreachable.closed_until
    assert [round((after - before) * usual, 6) for before, after in pairwise(waits)] == [1.0] * 99


def test_the_expected_wait_is_the_closing_and_the_queue_before() -> None:
    paced = lane(rate="10/s")
    paced.close(0.0, 3.0)
    assert paced.expected_wait(0.0, 20) == 5.0


def test_runs_take_turns_and_within_a_run_the_oldest_call_goes_first() -> None:
    queue: RunQueue[str] = RunQueue()
    for number in range(4):
        queue.add("big", 10.0 + number, f"big-{number}")
    queue.add("small", 20.0, "small-0")
    queue.add("big", 1.0, "big-parked")
    assert [queue.take() for _ in range(6)] == ["big-parked", "small-0", "big-0", "big-1", "big-2", "big-3"]
    assert queue.take() is None
    assert (queue.length, queue.runs) == (0, 0)


def test_in_each_round_the_run_whose_call_was_asked_for_first_goes_first_and_no_run_goes_twice() -> None:
    queue: RunQueue[str] = RunQueue()
    for run, asked in (("new", 30.0), ("old", 10.0), ("middle", 20.0)):
        for number in range(2):
            queue.add(run, asked + number, f"{run}-{number}")
    taken = [queue.take()]
    queue.add("new", 1.0, "new-parked")  # came back from an appointment
    queue.add("old", 2.0, "old-parked")
    taken += [queue.take() for _ in range(7)]
    assert taken == ["old-0", "new-parked", "middle-0", "old-parked", "middle-1", "new-0", "old-1", "new-1"]
    assert queue.take() is None


def test_a_run_that_brings_one_call_at_a_time_has_one_turn_a_round() -> None:
    queue: RunQueue[str] = RunQueue()
    for number in range(10):
        queue.add("steady", 100.0 + number, "steady")
    taken = []
    for _ in range(10):
        queue.add("trickle", 1.0, "trickle")
        taken += [queue.take(), queue.take()]
    assert Counter(taken) == {"steady": 10, "trickle": 10}


def test_what_was_withdrawn_is_passed_over_and_not_counted() -> None:
    queue: RunQueue[str] = RunQueue()
    first, _ = queue.add("a", 1.0, "a-0"), queue.add("a", 2.0, "a-1")
    only = queue.add("b", 1.0, "b-0")
    assert queue.withdraw(first)
    assert not queue.withdraw(first)
    queue.withdraw(only)
    assert (queue.length, queue.runs, queue.waiting("a"), queue.waiting("b")) == (1, 1, 1, 0)
    assert [queue.take(), queue.take()] == ["a-1", None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=40), st.sampled_from("abcd"), st.integers(0, 9))
def test_no_more_go_before_an_item_than_were_said_to(steps: list[tuple[str, int, bool]], run: str, asked: int) -> None:
    queue: RunQueue[int] = RunQueue()
    tickets: list[int] = []
    for other, then, leaves in steps:
        if leaves and tickets:
            queue.withdraw(tickets.pop(0))
        elif leaves:
            queue.take()
        else:
            tickets.append(queue.add(other, float(then), -1))
    said, of_run = queue.before(run, float(asked)), sum(queue.waiting(other) for other in "abcd")
    assert queue.length == of_run
    ticket = queue.add(run, float(asked), 1)
    assert queue.ahead(ticket) == said
    taken = [queue.take() for _ in range(queue.length)]
    assert taken.index(1) <= said
    assert (taken.count(1), taken.count(-1), queue.take()) == (1, of_run, None)


def test_a_call_that_was_asked_for_early_is_expected_before_all_younger_ones_of_its_run() -> None:
    queue: RunQueue[str] = RunQueue()
    for number in range(1000):
        queue.add("big", float(number), "big")
    queue.add("small", 5000.0, "small")
    assert [queue.before("big", asked) for asked in (-1.0, 0.0, 100.0, 5000.0)] == [1, 3, 203, 1001]
    assert queue.before("new", 1.0) == 2


def test_a_line_of_any_length_is_taken_in_order_and_leaves_nothing_behind() -> None:
    queue: RunQueue[int] = RunQueue()
    order = list(range(5000))
    random.Random(5).shuffle(order)
    for number in order:
        queue.add("a", float(number), number)
        if number % 7 == 0:
            queue.add("b", -1.0 - number, -1)
    taken = [item for _ in range(queue.length) if (item := queue.take()) is not None and item >= 0]
    assert taken == sorted(order)
    assert (queue.length, queue.runs, queue.waiting("a")) == (0, 0, 0)


def test_a_small_run_gets_half_the_turns_beside_a_big_one() -> None:
    queue: RunQueue[str] = RunQueue()
    for number in range(1000):
        queue.add("big", number, "big")
    for number in range(10):
        queue.add("small", 5000 + number, "small")
    assert Counter(queue.take() for _ in range(20)) == {"big": 10, "small": 10}


def test_a_refusal_halves_what_is_allowed_and_service_brings_it_back() -> None:
    """Additive increase, multiplicative decrease: of the rate and of what may be open at once."""
    burdened = Lane("acme", "hunter", 0, concurrency=8, pace=Pace(Rate(10, 1.0)), probes=PROBES, recovery=20.0)
    burdened.overrun(0.0, 1.0)
    assert (burdened.share, burdened.allowed, burdened.requests_per_second()) == (0.5, 4, 5.0)
    for _ in range(5):
        burdened.overrun(0.5, 1.0)  # they were sent before the first refusal was known
    assert burdened.share == 0.5
    assert not burdened.may_send(1.4)
    burdened.overrun(2.0, 1.0)
    assert burdened.share == 0.25
    now = 3.0
    burdened.served(now)
    assert burdened.share < 0.35
    shares = []
    for _ in range(200):
        now += 0.1
        burdened.served(now)
        shares.append(burdened.share)
    steps = [after - before for before, after in pairwise(shares)]
    assert max(steps) < 0.0051
    assert shares[-1] == 1.0
    assert (burdened.allowed, burdened.requests_per_second()) == (8, 10.0)


def test_refusals_without_end_leave_one_request_at_a_time() -> None:
    burdened = Lane("acme", "hunter", 0, concurrency=8, pace=Pace(Rate(64, 1.0)), probes=PROBES, recovery=20.0)
    for number in range(50):
        burdened.overrun(10.0 * number, 1.0)
    assert (burdened.allowed, burdened.requests_per_second()) == (1, 1.0)
    assert burdened.may_send(1000.0)


def test_a_halved_pace_is_even_and_no_faster_than_its_half() -> None:
    pace = Pace(Rate(100, 1.0))
    pace.share = 0.5
    times = sends(pace, 4.0, random.Random(1))
    assert 0.96 * 200 <= len(times) <= 202
    assert all(after - before > 0.0 for before, after in pairwise(times))


def batches(size: int = 3, pace: Pace | None = None) -> Group[str]:
    return Group(size=size, gather=0.005, pace=pace)


def test_a_full_batch_goes_at_once_and_a_partial_one_when_nothing_more_is_coming() -> None:
    group = batches()
    assert group.due_at(0.0) is None
    group.coming = 2
    group.add(1.0, "a")
    assert group.due_at(1.0) == 1.005
    group.add(1.004, "b")
    assert group.due_at(1.004) == 1.005  # counted from the first, never extended
    group.coming = 0
    assert group.due_at(1.004) == 1.004
    group.coming = 5
    group.add(1.004, "c")
    group.add(1.004, "d")
    assert group.due_at(1.004) == 1.004
    assert group.take(1.004) == ["a", "b", "c"]
    assert group.ready == 1


def test_a_tools_own_rate_holds_its_group_back() -> None:
    group = batches(size=1, pace=Pace(Rate(1, 10.0)))
    for name in ("a", "b"):
        group.add(0.0, name)
    group.take(0.0)
    due = group.due_at(0.1)
    assert due is not None
    assert due > 9.0


def test_a_call_can_be_taken_out_before_it_is_sent() -> None:
    group = batches()
    for name in ("a", "b"):
        group.add(0.0, name)
    group.remove("a")
    assert group.take(0.0) == ["b"]


def test_a_lane_knows_since_when_its_provider_does_not_serve() -> None:
    refused = lane()
    assert refused.unavailable_for(5.0) is None
    refused.close(10.0, 1.0)
    refused.close(20.0, 1.0)
    assert refused.unavailable_for(25.0) == 15.0
    refused.reached()
    assert refused.unavailable_for(25.0) == 15.0
    refused.served(25.0)
    assert refused.unavailable_for(25.0) is None
    refused.missed(30.0, 0.5)
    assert refused.unavailable_for(31.0) == 1.0
