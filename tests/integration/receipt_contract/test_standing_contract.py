"""What is known of lanes goes with their shards: told by who holds them, to who holds them next; of both receipt-stores."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.integration.receipt_contract.conftest import Asker

from rowmill_contracts.shards import LaneStanding, LeaseShard, ShardsLeased

pytestmark = pytest.mark.servers

_shards = itertools.count(1000)


class Gateway:
    """One that has, or wants, a shard. Its requests are numbered but for those that are given a number."""

    def __init__(self, store: Asker, shard: int, name: str) -> None:
        self._store = store
        self._shard = shard
        self._name = f"{name}-{shard}"
        self._numbers = itertools.count(1)
        self.lane = f"acme/lane-{shard}"

    async def ask(self, term: int | None = None, *words: LaneStanding, **facts: Any) -> ShardsLeased:
        request = LeaseShard(
            holder=self._name,
            shards=[self._shard],
            terms=[] if term is None else [term],
            standings=list(words),
            **({"number": next(self._numbers)} | facts),
        )
        return await self._store.ask(request, ShardsLeased)

    async def takes(self) -> int:
        """Under which term it has the shard now."""
        lease = (await self.ask(0)).shards[0]
        assert lease.held
        return lease.term

    def says(self, closed: float, share: float = 1.0, missed: int = 0, away: float | None = None, lane: str = "") -> LaneStanding:
        return LaneStanding(lane or self.lane, self._shard, closed, share, missed, away)


@pytest.fixture
def shard() -> int:
    return next(_shards)


@pytest.fixture
def one(store: Asker, shard: int) -> Gateway:
    return Gateway(store, shard, "one")


@pytest.fixture
def two(store: Asker, shard: int) -> Gateway:
    return Gateway(store, shard, "two")


async def test_who_takes_a_shard_is_told_what_was_known_of_its_lanes(one: Gateway, two: Gateway) -> None:
    term = await one.takes()
    assert (await one.ask(term, one.says(1000.0, 0.25, 7, 60.0), one.says(0.0, 0.5, lane="acme/other"))).standings == []
    assert (await one.ask(0)).standings == [], "what it said itself it knows"
    await one.ask(term, release=True)
    taken = await two.ask(0)
    assert taken.shards[0].held
    closed, open_ = taken.standings
    assert (closed.lane, closed.shard, closed.share, closed.missed) == (two.lane, two.says(0).shard, 0.25, 7)
    assert 900.0 < closed.closed <= 1000.0
    assert closed.away is not None
    assert 60.0 <= closed.away < 160.0
    assert open_ == two.says(0.0, 0.5, lane="acme/other")
    assert (await two.ask(taken.shards[0].term)).standings == [], "once"
    assert len((await two.ask(0)).standings) == 2, "or again, to who did not hear it"


async def test_the_last_words_are_told_to_the_next_and_what_that_one_says_to_the_one_after(one: Gateway, two: Gateway) -> None:
    term = await one.takes()
    await one.ask(term, one.says(1000.0))
    await one.ask(term, one.says(2000.0, 0.5), release=True)
    taken = await two.ask(0)
    assert [(word.closed > 1000.0, word.share) for word in taken.standings] == [(True, 0.5)]
    term = taken.shards[0].term
    await two.ask(term, two.says(0.0))
    await two.ask(term, release=True)
    assert (await one.ask(0)).standings == [one.says(0.0)], "it is open again"


async def test_a_late_or_foreign_word_changes_nothing(one: Gateway, two: Gateway) -> None:
    former = await one.takes()
    await one.ask(former, one.says(1000.0, 0.5), number=5)
    await one.ask(former, one.says(0.0), number=4)  # overtaken
    await one.ask(former, one.says(0.0), number=5)  # came twice
    await two.ask(former, two.says(0.0))
    await two.ask(former, two.says(0.0), release=True)
    await one.ask(None, one.says(0.0), number=6)  # under no term
    await one.ask(former, release=True, number=7)
    await one.ask(former, one.says(0.0), release=True, number=8)  # it was given up
    term = await two.takes()
    await one.ask(former, one.says(0.0), number=9)
    await one.ask(term, one.says(0.0), number=10)
    await two.ask(former, two.says(0.0))
    [known] = (await two.ask(0)).standings
    assert known.share == 0.5
    assert known.closed > 900.0


async def test_a_word_of_another_shards_lane_changes_nothing(store: Asker, one: Gateway, two: Gateway) -> None:
    other = next(_shards)
    term = await one.takes()
    await one.ask(term, LaneStanding("acme/elsewhere", other, 1000.0))
    await one.ask(term, release=True)
    assert (await two.ask(0)).standings == []
    taken = await store.ask(LeaseShard(holder="anyone", shards=[other]), ShardsLeased)
    assert taken.standings == []
