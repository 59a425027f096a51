"""Taking in turn."""

from __future__ import annotations

import pytest

from rowmill_row_executor.fairness import RoundRobin


def drained(turns: RoundRobin[str, int]) -> list[tuple[str, int]]:
    taken = []
    while turns:
        taken.append(turns.take())
    return taken


def test_keys_are_served_in_turn_and_keep_their_order() -> None:
    turns: RoundRobin[str, int] = RoundRobin()
    turns.add("big", range(4))
    turns.add("small", range(2))
    assert drained(turns) == [("big", 0), ("small", 0), ("big", 1), ("small", 1), ("big", 2), ("big", 3)]


def test_a_key_that_comes_late_does_not_wait_for_the_backlog() -> None:
    turns: RoundRobin[str, int] = RoundRobin()
    turns.add("big", range(1000))
    for _ in range(10):
        turns.take()
    turns.add("late", [7])
    assert ("late", 7) in [turns.take(), turns.take()]


def test_a_held_key_is_passed_over_until_it_is_released() -> None:
    turns: RoundRobin[str, int] = RoundRobin()
    turns.add("a", range(2))
    turns.add("b", range(1))
    turns.hold("a")
    turns.add("a", [9])
    assert drained(turns) == [("b", 0)]
    assert turns.waiting("a") == 3
    turns.release("a")
    assert drained(turns) == [("a", 0), ("a", 1), ("a", 9)]


def test_a_key_can_be_held_and_released_while_it_has_nothing() -> None:
    turns: RoundRobin[str, int] = RoundRobin()
    turns.hold("a")
    turns.release("a")
    assert not turns
    with pytest.raises(IndexError):
        turns.take()
