"""Runs that stop and halt, shards that change hands."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

import pytest

from rowmill.runtime.db import Database
from rowmill_receipt_store.store import Store

from .conftest import OUTPUT_LIMIT, QUEUED, RUNNING, SHARD, Caller, new_key, new_keys, new_run

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("action", ["stop", "halt"])
async def test_claims_and_confirmations_of_a_halted_run_are_told_so(action: str, ann: Caller) -> None:
    new, queued, done = new_keys(3)
    await ann.claim(queued)
    await ann.claim(done, confirm=True)
    await ann.complete(done)

    for _ in range(2):
        assert await ann.halt(action) == ("stopped" if action == "stop" else "halted")  # type: ignore[arg-type]

    assert [answer.state for answer in await ann.claims([new, done, queued])] == ["halted"] * 3
    assert (await ann.claim(new, only_cached=True)).state == "halted"
    assert (await ann.claim(new, confirm=True)).state == "halted"
    assert (await ann.confirm(queued)).state == "halted"


async def test_what_was_sent_before_is_recorded_after(ann: Caller, bob: Caller) -> None:
    done, failed = new_keys(2)
    await ann.claims([done, failed], confirm=True)
    await ann.halt("stop")

    assert await ann.renew(done)
    assert (await ann.complete(done)).state == "stored"
    assert (await ann.fail(failed)).state == "stored"
    assert (await bob.claim(done, started_at=0.0)).state == "completed"


async def test_an_unsent_claim_of_a_halted_run_is_free_for_others(ann: Caller, bob: Caller) -> None:
    queued, running = new_keys(2)
    await ann.claim(queued)
    await ann.claim(running, confirm=True)
    await ann.halt("halt")

    assert [answer.state for answer in await bob.claims([queued, running])] == ["granted", "held"]
    await ann.halt("resume")
    assert (await ann.confirm(queued)).state == "lost"


async def test_resume_lifts_a_halt_but_never_a_stop(ann: Caller, key: bytes) -> None:
    await ann.claim(key)
    await ann.halt("halt")
    for _ in range(2):
        assert await ann.halt("resume") == "running"
    assert (await ann.confirm(key)).state == "confirmed"

    await ann.halt("stop")
    assert await ann.halt("resume", budget="1") == "stopped"
    assert await ann.halt("halt") == "stopped"
    assert (await ann.claim(new_key())).state == "halted"


async def test_a_run_can_be_stopped_before_it_is_known(ann: Caller) -> None:
    early = ann.but(run=new_run())
    assert await early.halt("stop") == "stopped"
    assert (await early.claim(new_key())).state == "halted"
    assert (await ann.claim(new_key())).state == "granted"


async def test_nothing_is_granted_after_the_answer_to_a_stop(ann: Caller) -> None:
    stopped = False
    late: list[str] = []

    async def claim(number: int) -> None:
        while True:
            began_after = stopped
            answers = await ann.but(lease=f"{number}").claims(new_keys(20), confirm=True)
            if began_after:
                late.extend(answer.state for answer in answers)
            if stopped:
                return

    claimers = [asyncio.ensure_future(claim(number)) for number in range(4)]
    await asyncio.sleep(0)
    await ann.halt("stop")
    granted_by = await _granted(ann)
    stopped = True
    await asyncio.gather(*claimers)

    assert set(late) <= {"halted"}
    assert await _granted(ann) == granted_by


async def _granted(caller: Caller) -> int:
    database = caller.receipts._store._database
    row = await database.fetchrow("SELECT count(*) FROM receipts WHERE run_id = $1", caller.run)
    assert row is not None
    count: int = row[0]
    return count


async def test_a_shard_has_one_holder_and_its_term_rises_at_each_change_of_hands(ann: Caller, shard: int, store: Store) -> None:
    taken = await ann.lease_shard("one", shard)
    assert (taken.held, taken.term, taken.seconds) == (True, 1, SHARD)
    other = await ann.lease_shard("two", shard)
    assert (other.held, other.term) == (False, 1)
    assert 0 < other.seconds <= SHARD
    store.clock_offset = SHARD - 1
    assert (await ann.lease_shard("one", shard)).term == 1
    store.clock_offset = SHARD + 1
    assert not (await ann.lease_shard("two", shard)).held
    store.clock_offset += SHARD + 1
    assert (await ann.lease_shard("one", shard)).term == 1
    store.clock_offset += SHARD + 1
    assert (await ann.lease_shard("two", shard)).term == 2
    assert not (await ann.lease_shard("one", shard)).held


async def test_a_lapsed_shard_is_taken_only_from_a_holder_that_does_not_come_back_while_others_ask(database: Database, shard: int) -> None:
    store = Store(database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT, shard_grace=SHARD)

    async def asks(holder: str, after: float = 0.0) -> bool:
        store.clock_offset += after
        return (await store.lease_shards(holder, [shard]))[0].held

    assert await asks("one")
    assert not await asks("two")
    assert not await asks("two", 10 * SHARD), "nobody was served meanwhile: the holder could not renew either"
    assert await asks("one", SHARD / 3)
    assert not await asks("two", SHARD / 3), "the holder came back"

    waited = 0.0
    while not await asks("two", SHARD / 3):
        waited += SHARD / 3
    assert waited >= SHARD - SHARD / 3
    assert not await asks("one")

    await store.release_shards("two", [shard])
    assert await asks("one"), "what is given up is free at once"


async def test_a_silent_holder_loses_a_lapsed_shard_also_to_who_asks_seldom(database: Database, shard: int) -> None:
    store = Store(database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT, shard_grace=SHARD)
    await store.lease_shards("one", [shard])

    held = []
    for _ in range(6):
        held.append((await store.lease_shards("two", [shard]))[0].held)
        store.clock_offset += 3.1

    assert held == [False, False, False, False, True, True]


@pytest.mark.parametrize(("shortest", "longest"), [(0.5, 3.0), (2.0, 4.0), (3.1, 10.0), (0.5, 100.0), (1000.0, 100_000.0)])
async def test_whatever_the_gaps_a_silent_holder_loses_its_shard_and_one_that_comes_back_in_time_keeps_it(
    database: Database, shard: int, shortest: float, longest: float
) -> None:
    store = Store(database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT, shard_grace=SHARD)
    chance = random.Random(longest)

    async def asks(holder: str) -> bool:
        return (await store.lease_shards(holder, [shard]))[0].held

    def gaps() -> Iterator[float]:
        for _ in range(math.ceil(SHARD / min(shortest, SHARD / 4)) + 1):
            gap = chance.uniform(shortest, longest)
            store.clock_offset += gap
            yield gap

    assert await asks("one")
    counted = 0.0
    for gap in gaps():
        counted = counted + gap if gap <= SHARD / 2 else counted + SHARD / 4
        if counted > SHARD - 0.5:
            assert await asks("one"), "it came back in time"
            counted = 0.0
            assert not await asks("two")
        else:
            assert not await asks("two")

    assert await asks("one")
    assert not await asks("two")
    for _ in gaps():
        if await asks("two"):
            break
    assert await asks("two"), "the holder was silent for all of this"
    assert not await asks("one")


async def test_many_shards_are_answered_in_the_order_asked(ann: Caller, shard: int, store: Store) -> None:
    shards = [1000 * shard + n for n in (3, 1, 2)]
    await ann.lease_shard("other", shards[1])

    leases = await store.lease_shards("one", shards)

    assert [(lease.shard, lease.held) for lease in leases] == [(shards[0], True), (shards[1], False), (shards[2], True)]


async def test_a_shard_given_up_is_free_and_its_term_holds_no_longer(ann: Caller, shard: int, key: bytes) -> None:
    await ann.lease_shard("one", shard)
    mine = ann.but(shard=shard, term=1)
    await mine.claim(key)
    assert not (await ann.lease_shard("two", shard, release=True)).held
    assert not (await ann.lease_shard("two", shard)).held

    for _ in range(2):
        assert not (await ann.lease_shard("one", shard, release=True)).held

    assert (await mine.claim(new_key())).state == "refused"
    assert (await mine.confirm(key)).state == "refused"
    assert (await ann.lease_shard("one", shard)).term == 2


async def test_a_late_copy_of_giving_up_leaves_a_shard_that_was_taken_again(ann: Caller, shard: int) -> None:
    first = await ann.lease_shard("one", shard)
    await ann.lease_shard("one", shard, release=True, term=first.term)
    again = await ann.lease_shard("one", shard)
    assert again.term == first.term + 1

    await ann.lease_shard("one", shard, release=True, term=first.term)

    assert not (await ann.lease_shard("two", shard)).held
    assert (await ann.lease_shard("one", shard)).term == again.term
    await ann.lease_shard("one", shard, release=True, term=again.term)
    assert (await ann.lease_shard("two", shard)).held


async def test_an_older_term_is_refused_for_claims_and_confirmations_not_for_completions(ann: Caller, shard: int, store: Store) -> None:
    queued, running, new = new_keys(3)
    await ann.lease_shard("one", shard)
    older = ann.but(shard=shard, term=1)
    await older.claim(queued)
    await older.claim(running, confirm=True)
    store.clock_offset = SHARD + 1
    await ann.lease_shard("two", shard)

    assert (await older.claim(new)).state == "refused"
    assert (await older.confirm(queued)).state == "refused"
    assert (await older.but(term=None).claim(new)).state == "refused"
    assert (await older.but(term=None).confirm(queued)).state == "refused"
    assert (await older.complete(running)).state == "stored"
    assert (await ann.but(shard=shard, term=2).claim(new)).state == "granted"


async def test_leases_end_with_the_term_of_a_holder_that_was_lost(ann: Caller, bob: Caller, shard: int, store: Store) -> None:
    queued, read, paid = new_keys(3)
    await ann.lease_shard("one", shard)
    lost = ann.but(shard=shard, term=1)
    await lost.claim(queued)
    await lost.claim(read, confirm=True)
    await lost.claim(paid, confirm=True, effect="non_idempotent")
    store.clock_offset = SHARD + 1
    assert SHARD + 1 < QUEUED
    assert [answer.state for answer in await bob.claims([queued, read, paid])] == ["held"] * 3

    await ann.lease_shard("two", shard)

    answers = await bob.but(shard=shard, term=2).claims([queued, read, paid])
    assert [answer.state for answer in answers] == ["granted", "granted", "unknown"]
    assert [answer.took_over for answer in answers] == [False, True, False]


async def test_a_lease_that_a_later_term_confirmed_does_not_end_with_the_term_that_claimed_it(
    ann: Caller, bob: Caller, shard: int, key: bytes, store: Store
) -> None:
    await ann.lease_shard("one", shard)
    await ann.but(shard=shard, term=1).claim(key)
    store.clock_offset = SHARD + 1
    await ann.lease_shard("two", shard)
    await ann.lease_shard("two", shard, release=True)
    assert (await ann.lease_shard("one", shard)).term == 3

    assert (await ann.but(shard=shard, term=3).confirm(key)).state == "confirmed"

    assert (await bob.but(shard=shard, term=3).claim(key)).state == "held"
    store.clock_offset += SHARD + 1
    assert (await ann.lease_shard("two", shard)).term == 4
    assert (await bob.but(shard=shard, term=4).claim(key)).state == "granted", "lost with the term that confirmed it"


async def test_leases_outlive_a_shard_that_was_handed_over(ann: Caller, bob: Caller, shard: int, key: bytes) -> None:
    await ann.lease_shard("one", shard)
    mine = ann.but(shard=shard, term=1)
    await mine.claim(key, confirm=True)
    await ann.lease_shard("one", shard, release=True)
    await ann.lease_shard("two", shard)

    assert (await bob.but(shard=shard, term=2).claim(key)).state == "held"
    assert await mine.renew(key)
    assert (await mine.complete(key)).state == "stored"


async def test_a_shard_never_leased_grants_nothing(ann: Caller, shard: int) -> None:
    mine = ann.but(shard=shard, term=1)

    assert (await mine.claim(new_key())).state == "refused"
