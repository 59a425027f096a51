"""How long something was away, of the time for which a message is in hand."""

from __future__ import annotations

import pytest
from tests.fakes.clocks import FrozenClock

from rowmill.runtime.outages import RECOVERY_SECONDS, Outages


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def outages(clock: FrozenClock) -> Outages:
    return Outages(clock)


def test_an_outage_counts_from_its_begin_until_a_little_after_its_end(clock: FrozenClock, outages: Outages) -> None:
    since, note = clock.time, outages.noting("the database")
    clock.time += 5
    note(True)
    note(True)
    clock.time += 20
    assert (outages.away(), outages.within(since), outages.within(clock.time - 3)) == ({"the database": 20.0}, 20.0, 3.0)
    note(False)
    note(False)
    clock.time += RECOVERY_SECONDS / 2
    assert (outages.away(), outages.within(since)) == ({}, 20 + RECOVERY_SECONDS / 2)
    clock.time += 100
    assert (outages.within(since), outages.within(clock.time - 50)) == (20 + RECOVERY_SECONDS, 0.0)


def test_outages_at_the_same_time_count_once(clock: FrozenClock, outages: Outages) -> None:
    since, database, broker = clock.time, outages.noting("the database"), outages.noting("the broker")
    database(True)
    clock.time += 10
    broker(True)
    clock.time += 10
    database(False)
    clock.time += 30
    assert outages.within(since) == 50
    broker(False)
    clock.time += 100
    assert outages.within(since) == 50 + RECOVERY_SECONDS


def test_a_neighbour_that_did_not_answer_is_away_since_it_was_asked_until_it_is_heard(clock: FrozenClock, outages: Outages) -> None:
    since = clock.time
    clock.time += 30
    outages.silent("answers", 30)
    clock.time += 20
    outages.back("others")
    assert outages.away() == {"answers": 50.0}
    outages.back("answers")
    assert (outages.away(), outages.within(since)) == ({}, 50.0)


def test_a_neighbour_that_nobody_asks_again_is_not_away_for_ever(clock: FrozenClock, outages: Outages) -> None:
    since = clock.time
    clock.time += 10
    outages.silent("answers", 10)
    clock.time += 19 + RECOVERY_SECONDS
    outages.silent("answers", 10)  # asked again, in vain
    clock.time += 19 + RECOVERY_SECONDS
    assert outages.away() == {"answers": 48.0 + 2 * RECOVERY_SECONDS}
    clock.time += 100
    assert outages.away() == {}
    assert outages.within(since) == 49 + 2 * RECOVERY_SECONDS


def test_however_often_something_is_away_for_a_moment_the_first_time_is_not_forgotten(clock: FrozenClock, outages: Outages) -> None:
    since, note = clock.time, outages.noting("the database")
    for _ in range(500):
        note(True)
        clock.time += 1
        note(False)
        clock.time += RECOVERY_SECONDS / 2
    assert outages.within(since) == 500 * (1 + RECOVERY_SECONDS / 2)
