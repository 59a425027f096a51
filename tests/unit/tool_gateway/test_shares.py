"""Who should have which shards, and when a gateway steps back from another's."""

from __future__ import annotations

import math
import random

import pytest

from rowmill_contracts.digests import SHARDS
from rowmill_tool_gateway.sharing import Sharing, shares


def names(count: int, seed: int = 0) -> list[str]:
    dice = random.Random(f"{count} {seed}")
    return [f"{dice.getrandbits(128):032x}" for _ in range(count)]


@pytest.mark.parametrize("count", [*range(1, 18), 40])
def test_each_shard_has_one_gateway_and_shares_differ_by_one_at_most(count: int) -> None:
    for seed in range(20):
        given = shares(names(count, seed))
        assert sorted(shard for has in given.values() for shard in has) == list(range(SHARDS))
        sizes = {len(has) for has in given.values()}
        assert sizes <= {SHARDS // count, SHARDS // count + 1}
        assert len(given) == count


def test_all_reckon_the_same_whatever_the_order() -> None:
    gateways = names(5)
    assert shares(gateways) == shares(gateways[::-1]) == shares(random.Random(1).sample(gateways, 5))
    assert shares([]) == {}


@pytest.mark.parametrize("count", range(1, 6))
def test_few_shards_change_hands_but_for_the_share_of_who_comes(count: int) -> None:
    needless = []
    for seed in range(50):
        gateways = names(count + 1, seed)
        before, after = shares(gateways[:-1]), shares(gateways)
        moved = sum(len(before[gateway] - after[gateway]) for gateway in gateways[:-1])
        needless.append(moved - len(after[gateways[-1]]))
    assert min(needless) >= 0
    assert sum(needless) / len(needless) <= 2.5


ME, OTHER = "me", "other"
PATIENCE, AGAIN = 1.0, 6.0


@pytest.fixture
def sharing() -> Sharing:
    return Sharing(ME, patience=PATIENCE, again=AGAIN)


def theirs(sharing: Sharing) -> list[int]:
    return [shard for shard in range(SHARDS) if not sharing.ours(shard)]


def test_while_nothing_is_known_of_others_every_shard_may_be_ours(sharing: Sharing) -> None:
    assert sharing.due(range(SHARDS), 0.0) == []
    assert not sharing.called(3, 0.0)
    assert not sharing.sends_away(3, 0.0)
    assert not sharing.assigned(3)
    assert sharing.told([ME])
    assert not sharing.told([ME])
    assert theirs(sharing) == sharing.due(range(SHARDS), 0.0) == []
    assert sharing.assigned(3)


def test_when_another_comes_its_share_is_stepped_back_from_also_where_nothing_is_held(sharing: Sharing) -> None:
    sharing.told([ME, OTHER])
    assert sharing.due([], 0.0) == theirs(sharing)
    assert len(theirs(sharing)) == SHARDS // 2
    assert set(theirs(sharing)) == shares([ME, OTHER])[OTHER]
    for shard in theirs(sharing):
        assert sharing.sends_away(shard, 0.0)
        sharing.stepping(shard)
        assert sharing.sends_away(shard, 1e9), "until it is done"
        sharing.stepped(shard, 10.0)
    assert sharing.due(theirs(sharing), 10.0 + AGAIN / 2) == []
    sharing.told([ME])
    assert theirs(sharing) == []
    assert not any(sharing.sends_away(shard, 10.0) for shard in range(SHARDS))


def test_who_has_no_share_yet_takes_what_comes(sharing: Sharing) -> None:
    """It waits behind the others, so they are gone, or soon will be."""
    sharing.told([OTHER])
    assert theirs(sharing) == sharing.due(range(SHARDS), 0.0) == []
    assert not sharing.called(5, 0.0)
    assert sharing.wanted(5, 0.0)
    assert not sharing.assigned(5)


def test_calls_that_come_all_the_same_are_sent_away_for_a_moment_then_kept_and_stepped_back_from_again(sharing: Sharing) -> None:
    """At first another may only not have heard; then it is gone, or about to be; and who waits for a shard for ever may be the wrong one."""
    sharing.told([ME, OTHER])
    shard = theirs(sharing)[0]
    assert not sharing.called(shard, 0.0), "due already"
    sharing.stepping(shard)
    assert not sharing.called(shard, 0.0), "under way already"
    sharing.stepped(shard, 10.0)
    for at, away in [(10.0, True), (10.0 + 0.9 * PATIENCE, True), (10.0 + PATIENCE, False), (10.0 + 0.9 * AGAIN, False)]:
        assert not sharing.called(shard, at)
        assert sharing.sends_away(shard, at) == away
        assert sharing.wanted(shard, at) != away
    assert sharing.due([], math.inf) == [other for other in theirs(sharing) if other != shard], "nothing came of it since"


def test_who_gets_calls_of_anothers_shard_asks_who_shares_before_it_steps_back_again(sharing: Sharing) -> None:
    sharing.told([ME, OTHER])
    shard, also = theirs(sharing)[:2]
    for one in theirs(sharing):
        sharing.stepping(one)
        sharing.stepped(one, 10.0)
    late = 10.0 + AGAIN
    assert sharing.called(shard, late)
    assert not sharing.called(shard, late), "asked already"
    assert (sharing.sends_away(shard, late), sharing.wanted(shard, late)) == (False, False)
    sharing.told([ME, OTHER])
    assert sharing.due([], late) == [shard]
    assert (sharing.sends_away(shard, late), sharing.wanted(shard, late)) == (True, False)
    sharing.stepping(shard)
    assert sharing.called(also, late)
    sharing.told([ME])
    assert sharing.due([], late) == []
    assert sharing.wanted(also, late), "the other has gone"


def test_a_shard_that_is_held_though_it_is_anothers_is_given_up_after_a_while_without_a_call(sharing: Sharing) -> None:
    sharing.told([ME, OTHER])
    shard = theirs(sharing)[0]
    for one in theirs(sharing):
        sharing.stepping(one)
        sharing.stepped(one, 10.0)
    assert sharing.due([shard], 10.0 + 0.9 * AGAIN) == []
    assert sharing.due([shard], 10.0 + AGAIN) == [shard]
