"""When a consumer counts as one that does not consume."""

from __future__ import annotations

from rowmill.runtime.watching import IDLE_LOOKS, ConsumerWatch


def test_a_queue_that_nobody_consumes_is_noticed_at_once() -> None:
    assert ConsumerWatch("q", 10).look(ready=0, consumers=0) is not None


def test_ready_messages_that_never_arrive_are_noticed_after_several_looks() -> None:
    watch = ConsumerWatch("q", 10)
    looks = [watch.look(ready=5, consumers=2) for _ in range(IDLE_LOOKS)]
    assert looks[:-1] == [None] * (IDLE_LOOKS - 1)
    assert looks[-1] is not None


def test_an_arrival_or_an_empty_queue_begins_the_count_anew() -> None:
    watch = ConsumerWatch("q", 10)
    for _ in range(3 * IDLE_LOOKS):
        watch.began()
        watch.ended()
        assert watch.look(ready=5, consumers=1) is None
        assert watch.look(ready=5, consumers=1) is None
        assert watch.look(ready=0, consumers=1) is None


def test_a_consumer_whose_hands_are_full_is_owed_nothing() -> None:
    watch = ConsumerWatch("q", 2)
    watch.began()
    watch.began()
    assert [watch.look(ready=5, consumers=1) for _ in range(2 * IDLE_LOOKS)] == [None] * (2 * IDLE_LOOKS)


def test_the_waiting_consumer_of_a_single_active_queue_is_owed_nothing_unless_it_is_alone() -> None:
    waiting = ConsumerWatch("q", 10, single_active=True)
    assert [waiting.look(ready=5, consumers=2) for _ in range(2 * IDLE_LOOKS)] == [None] * (2 * IDLE_LOOKS)
    alone = ConsumerWatch("q", 10, single_active=True)
    assert [alone.look(ready=5, consumers=1) for _ in range(IDLE_LOOKS)][-1] is not None
