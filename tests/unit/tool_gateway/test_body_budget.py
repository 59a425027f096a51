"""The bytes of bodies that are read at the same time: never over the budget, and everybody comes to an end."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill_tool_gateway.body_budget import SMALL, STEP, BodyBudget, BodyShare

MIB = 2**20
TOTAL, LIMIT = 64 * MIB, 32 * MIB


@dataclass
class Body:
    """A body that is read in pieces of 256 KiB, as far as its share allows."""

    size: int
    announced: bool
    share: BodyShare
    there: int = 0
    paused: bool = False

    def read(self) -> bool:
        """Read a piece; whether it is whole."""
        self.there = min(self.size, self.there + STEP)
        if self.there == self.size:
            self.share.done()
            return True
        self.paused = not self.share.want(self.there, self.size if self.announced else None)
        return False


def bodies(budget: BodyBudget, sizes: list[tuple[int, bool]]) -> list[Body]:
    made: list[Body] = []
    for size, announced in sizes:
        body = Body(size, announced, None)  # type: ignore[arg-type]

        def resume(body: Body = body) -> None:
            body.paused = False

        body.share = budget.share(resume)
        made.append(body)
    return made


@given(st.lists(st.tuples(st.integers(1, LIMIT), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_whatever_is_read_at_once_is_within_the_budget_and_ends(sizes: list[tuple[int, bool]], order: random.Random) -> None:
    budget = BodyBudget(TOTAL, LIMIT)
    left = bodies(budget, sizes)
    while left:
        ready = [body for body in left if not body.paused]
        assert ready, "all of them wait for each other"
        body = order.choice(ready)
        if body.read():
            left.remove(body)
        assert budget.held <= TOTAL
    assert (budget.held, budget.waiting) == (0, 0)


@pytest.mark.parametrize("announced", [True, False])
def test_ten_bodies_of_20_mib_at_once_all_end(announced: bool) -> None:
    budget = BodyBudget(TOTAL, LIMIT)
    left = bodies(budget, [(20 * MIB, announced)] * 10)
    while left:
        for body in [body for body in left if not body.paused]:  # all of them come at the same pace
            if body.read():
                left.remove(body)
    assert 40 * MIB <= budget.most <= TOTAL


def test_a_body_that_stalls_holds_up_only_what_it_holds() -> None:
    budget = BodyBudget(TOTAL, LIMIT)
    stalled, *others = bodies(budget, [(30 * MIB, True), *[(20 * MIB, False)] * 10])
    assert not stalled.read()
    while others:
        ready = [body for body in others if not body.paused]
        assert ready
        for body in ready:
            if body.read():
                others.remove(body)
    stalled.share.done()
    assert budget.held == 0


def test_who_gives_up_gives_back_and_lets_the_next_one_read() -> None:
    budget = BodyBudget(TOTAL, LIMIT)
    first, second, third = bodies(budget, [(32 * MIB, True)] * 3)
    for body in (first, second, third):
        body.read()
    assert (first.paused, second.paused, third.paused) == (False, False, True)
    third.share.done()
    assert budget.waiting == 0
    again = bodies(budget, [(32 * MIB, True)])[0]
    again.read()
    assert again.paused
    first.share.done()
    assert not again.paused


def test_small_bodies_do_not_wait_and_a_large_one_is_not_passed_for_ever() -> None:
    budget = BodyBudget(TOTAL, LIMIT)
    first, second, large, late = bodies(budget, [(32 * MIB, True), (31 * MIB, True), (32 * MIB, True), (MIB, True)])
    for body in (first, second, large, late):
        body.read()
    assert large.paused
    assert late.paused, "it would fit, and so would the next one, and the large one would wait for ever"
    assert budget.share(lambda: None).want(SMALL, SMALL)
    second.share.done()
    assert not large.paused


def test_a_budget_that_holds_no_body_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no body"):
        BodyBudget(LIMIT - 1, LIMIT)
