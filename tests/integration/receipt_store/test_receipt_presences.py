"""Leases of executors end with their process's presence, and those of bodies with their run's term."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.budgets import Limits
from rowmill_contracts.presences import KeepPresence
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Lease, Store

from .conftest import OUTPUT_LIMIT, Caller

pytestmark = pytest.mark.servers

PRESENCE, GRACE = 6.0, 2.0


@pytest.fixture
def presences(database: Database) -> PresenceStore:
    return PresenceStore(database, lease=PRESENCE, grace=GRACE)


@pytest.fixture
def receipts(store: Store, presences: PresenceStore) -> Receipts:
    return Receipts(store, held_poll=0.25, output_limit=OUTPUT_LIMIT, presences=presences)


@pytest.fixture
def later(store: Store, presences: PresenceStore) -> Callable[[float], None]:
    """Lets time pass."""

    def move(seconds: float) -> None:
        store.clock_offset += seconds
        presences.clock_offset += seconds

    return move


async def there(presences: PresenceStore) -> str:
    """A process that is there."""
    name = f"executor-{secrets.token_hex(4)}"
    assert (await presences.keep(KeepPresence(presence=name))).seconds == PRESENCE
    return name


async def taken(bob: Caller, key: bytes, later: Any, *, asks: int = 4, apart: float = 0.7) -> bool:
    """Whether bob gets the key if he asks that often."""
    for _ in range(asks):
        if (await bob.claim(key, confirm=True)).state == "granted":
            return True
        later(apart)
    return False


async def test_a_step_of_a_dead_process_is_free_long_before_its_lease_is_over(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any
) -> None:
    ann = ann.but(presence=await there(presences))
    assert (await ann.claim(key, confirm=True)).state == "granted"
    assert not await taken(bob, key, later)
    later(PRESENCE)
    assert await taken(bob, key, later)
    answer = await bob.claim(key, confirm=True)
    assert (answer.dispatch, answer.took_over) == (2, True)
    assert (await ann.complete(key)).state == "superseded"


async def test_who_was_away_for_less_than_the_others_asked_keeps_its_steps(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any
) -> None:
    name = await there(presences)
    ann = ann.but(presence=name)
    await ann.claim(key, confirm=True)
    later(3 * PRESENCE)  # nobody was served meanwhile, and bob is the first to come back
    assert not await taken(bob, key, later, asks=3)
    assert (await presences.keep(KeepPresence(presence=name))).held
    assert not await taken(bob, key, later)
    assert (await ann.complete(key)).state == "stored"


async def test_a_presence_that_has_ended_stays_so_and_what_nobody_took_is_bound_to_a_new_one(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any
) -> None:
    name = await there(presences)
    ann = ann.but(presence=name)
    other = secrets.token_bytes(32)
    for each in (key, other):
        await ann.claim(each, confirm=True)
    later(PRESENCE)
    assert await taken(bob, key, later)
    assert not (await presences.keep(KeepPresence(presence=name))).held
    assert (await ann.claim(secrets.token_bytes(32), confirm=True)).state == "refused"
    fresh = await there(presences)
    bound = [Lease(key=each, lease_id=ann.lease, presence=fresh) for each in (key, other)]
    assert await ann.receipts.renew(bound) == [False, True]
    assert not await taken(bob, other, later)
    assert (await ann.complete(other)).state == "stored"


async def test_who_came_back_is_given_the_whole_time_again_when_it_falls_silent_once_more(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any
) -> None:
    name = await there(presences)
    await ann.but(presence=name).claim(key, confirm=True)
    later(PRESENCE)
    assert not await taken(bob, key, later, asks=3, apart=0.4 * GRACE)
    assert (await presences.keep(KeepPresence(presence=name))).held
    later(PRESENCE)
    assert not await taken(bob, key, later, asks=2, apart=0.4 * GRACE), "what others asked before it came back counts no more"
    assert await taken(bob, key, later, apart=0.4 * GRACE)


async def test_a_silence_of_all_counts_for_a_quarter_of_the_time_that_a_silent_process_has(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any
) -> None:
    await ann.but(presence=await there(presences)).claim(key, confirm=True)
    later(PRESENCE)
    assert not await taken(bob, key, later, asks=4, apart=2 * GRACE), "nobody was served in between, perhaps"
    assert await taken(bob, key, later, asks=1), "who asks seldom gets there, too"


async def test_a_process_that_is_there_or_has_gone_is_not_what_others_ask_for(presences: PresenceStore, later: Any) -> None:
    """They looked when it was silent; it has come back, or gone, since."""
    here, gone = await there(presences), await there(presences)
    later(PRESENCE)
    await presences.keep(KeepPresence(presence=here))
    await presences.keep(KeepPresence(presence=gone, leave=True))
    for _ in range(4):
        assert not await presences.contest([here, gone])
        later(0.4 * GRACE)
    assert (await presences.keep(KeepPresence(presence=here))).held
    assert not (await presences.keep(KeepPresence(presence=gone))).held


async def test_what_a_process_said_before_it_went_changes_nothing_when_it_comes_after(presences: PresenceStore) -> None:
    name = f"executor-{secrets.token_hex(4)}"
    await presences.keep(KeepPresence(presence=name, leave=True))
    assert not (await presences.keep(KeepPresence(presence=name))).held


async def test_a_silent_process_is_forgotten_a_day_later_and_no_earlier(
    ann: Caller, bob: Caller, key: bytes, presences: PresenceStore, later: Any, database: Database
) -> None:
    name = await there(presences)
    await ann.but(presence=name).claim(key, confirm=True)
    later(2 * PRESENCE)
    await there(presences)
    assert (await bob.claim(key, confirm=True)).state == "held", "who comes new makes nobody go"
    assert (await presences.keep(KeepPresence(presence=name))).held
    later(25 * 3600.0)
    await there(presences)
    assert await database.fetchrow("SELECT FROM presences WHERE presence = $1", name) is None


async def test_a_process_that_goes_leaves_its_steps_at_once(ann: Caller, bob: Caller, key: bytes, presences: PresenceStore) -> None:
    name = await there(presences)
    ann = ann.but(presence=name)
    await ann.claim(key, confirm=True)
    await presences.keep(KeepPresence(presence=name, leave=True))
    assert (await bob.claim(key, confirm=True)).state == "granted"


async def test_nothing_is_claimed_for_a_presence_that_nobody_has_heard_of(ann: Caller, key: bytes) -> None:
    assert (await ann.but(presence="executor-nobody").claim(key, confirm=True)).state == "refused"


async def test_a_body_takes_over_what_its_run_had_under_an_earlier_term_and_no_other_run_does(ann: Caller, bob: Caller, key: bytes) -> None:
    first = ann.but(run_term=1)
    assert (await first.claim(key, confirm=True)).state == "granted"
    assert (await bob.but(run_term=5).claim(key, confirm=True)).state == "held"
    assert (await ann.but(lease="again", run_term=1).claim(key, confirm=True)).state == "held"
    second = ann.but(lease="later", run_term=2)
    assert (await second.claim(key, confirm=True)).dispatch == 2
    assert (await first.but(lease="late").claim(key, confirm=True)).state == "held"
    assert not await first.renew(key)
    assert (await second.complete(key, 2)).state == "stored"


async def test_steps_are_no_calls_of_a_budget(ann: Caller, key: bytes, books: Any) -> None:
    await ann.decided("resume", budget=Limits(calls=0, retries=0), decision=1)
    assert (await ann.claim(secrets.token_bytes(32), confirm=True)).state == "over_budget"
    step = ann.but(counted=False)
    assert (await step.claim(key, confirm=True)).state == "granted"
    await step.fail(key, becomes="released")
    assert (await step.but(lease="again").claim(key, confirm=True)).dispatch == 2
    assert await books.counted(ann.run) == (0, 0)
    assert await books.balanced(ann.run)
