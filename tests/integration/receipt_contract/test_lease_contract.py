"""What ends leases and who may take them: shards, their windows and open requests, presences, terms of bodies; of both receipt-stores."""

from __future__ import annotations

import itertools
import secrets

import msgspec
import pytest
from tests.integration.receipt_contract.conftest import Asker

from rowmill_contracts.presences import KeepPresence, PresenceKept
from rowmill_contracts.receipts import (
    LeaseRef,
    Renew,
    Renewed,
)
from rowmill_contracts.shards import Draw, Drawn, LeaseShard, OpenRequests, Sent, ShardsLeased

pytestmark = pytest.mark.servers

_shards = itertools.count()


async def test_a_renewed_lease_is_held_and_one_that_moved_is_not(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    renewed = await store.ask(
        Renew(leases=[LeaseRef(key=key, lease_id=lease, run_id=store.run, dispatch=1) for lease in ("lease-1", "lease-2")]), Renewed
    )
    assert renewed.held == [True, False]


async def test_a_shards_term_rises_with_its_holder_and_older_terms_are_refused(store: Asker, key: str) -> None:
    shard = next(_shards)
    first = await store.shard(shard, "gateway-1")
    assert first.held
    assert first.seconds > 0
    assert not (await store.shard(shard, "gateway-2")).held
    assert (await store.shard(shard, "gateway-1")).term == first.term
    queued = await store.claim(key, shard=shard, term=first.term)
    assert queued.state == "granted"
    await store.shard(shard, "gateway-1", release=True)
    second = await store.shard(shard, "gateway-2")
    assert second.held
    assert second.term > first.term
    assert (await store.confirm(key, shard=shard, term=first.term)).state == "refused"
    assert (await store.claim(secrets.token_hex(32), shard=shard, term=first.term)).state == "refused"
    assert (await store.claim(secrets.token_hex(32), shard=shard, term=second.term)).state == "granted"


async def test_who_takes_a_shard_over_is_told_what_its_predecessor_may_have_sent(store: Asker, key: str) -> None:
    shard = next(_shards)
    term = (await store.shard(shard, "gateway-1")).term
    draw = Draw(window=key, shard=shard, number=1, permits=7, seconds=2.0, span=60.0)
    assert await store.draw("gateway-1", draw) == Drawn(granted=True, sent=[]), "nothing is known of a window that nobody drew for"
    known = msgspec.structs.replace(draw, number=2, term=term, sent=[Sent(30.0, 4), Sent(1.0, 2)])
    assert await store.draw("gateway-1", known) == Drawn(granted=True), "the holder knows better"
    assert await store.draw("gateway-1", draw) == Drawn(granted=False), "an older draw comes too late"
    assert await store.draw("gateway-2", msgspec.structs.replace(draw, number=9)) == Drawn(granted=False), "another holds the shard"

    last = msgspec.structs.replace(known, number=3, permits=5, seconds=0.0, sent=[Sent(31.0, 4), Sent(59.9, 9), Sent(2.0, 2), Sent(0.5, 3)])
    assert (await store.draw("gateway-1", last, release=True)).granted
    told = (await store.draw("gateway-2", msgspec.structs.replace(draw, number=1, span=58.0))).sent
    assert told is not None
    assert [one.requests for one in told] == [4, 2, 3, 5], "oldest first, within the span, permits as late as they go"
    for one, least in zip(told, [31.0, 2.0, 0.5, 0.0], strict=True):
        assert least <= one.seconds_ago < least + 20
    assert await store.draw("gateway-1", msgspec.structs.replace(last, number=4)) == Drawn(granted=False), "its term is over"


async def test_a_report_of_a_former_term_is_not_believed(store: Asker, key: str) -> None:
    shard = next(_shards)
    first = (await store.shard(shard, "gateway-1")).term
    draw = Draw(window=key, shard=shard, number=1, permits=3, seconds=1000.0, span=60.0)
    await store.draw("gateway-1", draw)
    await store.shard(shard, "gateway-1", release=True)
    await store.shard(shard, "gateway-2")
    await store.shard(shard, "gateway-2", release=True)
    told = (await store.draw("gateway-1", msgspec.structs.replace(draw, number=2, term=first, sent=[]))).sent
    assert told is not None
    assert [one.requests for one in told] == [3]
    assert told[0].seconds_ago < 0, "its permits are still good"


async def test_who_takes_a_shard_is_told_what_its_former_holder_has_open(store: Asker) -> None:
    shard = next(_shards)
    lane = OpenRequests(f"acme/lane-{shard}", 3)
    await store.ask(LeaseShard(holder=f"first-{shard}", shards=[shard], number=1), ShardsLeased)
    given_up = LeaseShard(holder=f"first-{shard}", shards=[shard], release=True, open=[lane], number=2)
    assert lane not in (await store.ask(given_up, ShardsLeased)).open, "it knows that itself"
    taken = await store.ask(LeaseShard(holder=f"second-{shard}", shards=[shard], number=1), ShardsLeased)
    assert taken.shards[0].held
    assert lane in taken.open
    await store.ask(LeaseShard(holder=f"first-{shard}", shards=[], serving=False, number=3), ShardsLeased)
    assert lane not in (await store.ask(LeaseShard(holder=f"second-{shard}", shards=[shard], number=2), ShardsLeased)).open


async def test_what_an_answer_to_a_former_holder_closed_is_told_for_the_longest_that_any_says(store: Asker) -> None:
    shard = next(_shards)
    lane = f"acme/closed-{shard}"
    for number, closed in enumerate([0.0, 60.0, 30.0]):
        said = OpenRequests(lane, number, closed)
        answer = await store.ask(LeaseShard(holder=f"{number}-{shard}", shards=[], open=[said], number=1), ShardsLeased)
        assert not any(one.lane == lane and one.closed == closed > 0 for one in answer.open), "it knows that itself"
    told = await store.ask(LeaseShard(holder=f"new-{shard}", shards=[shard], number=1), ShardsLeased)
    assert [one for one in told.open if one.lane == lane] == [OpenRequests(lane, 3, 60.0)]


async def test_a_lease_ends_with_the_presence_of_its_process(store: Asker, key: str) -> None:
    mine = f"executor-{key[:8]}"
    assert (await store.claim(key, confirm=True, presence=mine)).state == "refused", "nobody has said that it is there"
    assert (await store.ask(KeepPresence(presence=mine), PresenceKept)).held
    assert (await store.claim(key, confirm=True, presence=mine)).dispatch == 1
    assert (await store.claim(key, "lease-2", confirm=True)).state == "held"
    assert not (await store.ask(KeepPresence(presence=mine, leave=True), PresenceKept)).held
    assert not (await store.ask(KeepPresence(presence=mine), PresenceKept)).held, "it has ended for good"
    assert (await store.claim(secrets.token_hex(32), presence=mine)).state == "refused"
    assert (await store.claim(key, "lease-2", confirm=True)).dispatch == 2


async def test_a_lease_that_nobody_took_is_bound_to_another_presence(store: Asker, key: str) -> None:
    mine, again = f"executor-{key[:8]}", f"executor-{key[8:16]}"
    await store.ask(KeepPresence(presence=mine), PresenceKept)
    await store.claim(key, confirm=True, presence=mine)
    await store.ask(KeepPresence(presence=mine, leave=True), PresenceKept)
    await store.ask(KeepPresence(presence=again), PresenceKept)
    renewed = await store.ask(Renew(leases=[LeaseRef(key=key, lease_id="lease-1", run_id=store.run, dispatch=1)], presence=again), Renewed)
    assert renewed.held == [True]
    assert (await store.claim(key, "lease-2", confirm=True)).state == "held"


async def test_a_newer_body_takes_over_what_its_run_holds(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True, run_term=3)
    assert (await store.claim(key, "lease-2", confirm=True, run_term=3)).state == "held"
    assert (await store.claim(key, "lease-2", confirm=True, run_term=9, run_id=f"{store.run}-other")).state == "held"
    assert (await store.claim(key, "lease-2", confirm=True, run_term=4)).dispatch == 2
    assert (await store.complete(key, 1)).state == "superseded"
