"""A confirmation whose answer was lost: its holder never heard a dispatch number, sent nothing, and can say so (`Release` with dispatch 0)."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rowmill_receipt_store.store import Store

from .conftest import RUNNING, SHARD, Books, Caller

pytestmark = pytest.mark.servers

CENT = Decimal("0.01")


@pytest.mark.parametrize("effect", ["read", "idempotent", "non_idempotent"])
async def test_it_is_given_back_while_it_runs(effect: str, ann: Caller, bob: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, cost=CENT, effect=effect)
    await ann.confirm(key)

    assert await ann.release(key)
    assert not await ann.release(key)

    assert await books.charges(ann.run) == []
    assert await books.charged(ann.run) == 0
    assert (await ann.confirm(key)).state == "lost"
    granted = await bob.claim(key, effect=effect, confirm=True)
    assert (granted.state, granted.dispatch, granted.took_over) == ("granted", 2, False)


async def test_it_frees_a_key_whose_outcome_was_taken_for_unknown_when_the_shard_lapsed(
    ann: Caller, bob: Caller, key: bytes, shard: int, books: Books, store: Store
) -> None:
    await ann.halt("resume", budget="1")
    term = (await ann.lease_shard("first", shard)).term
    mine = ann.but(shard=shard, term=term)
    await mine.claim(key, cost=CENT, effect="non_idempotent")
    await mine.confirm(key)
    store.clock_offset = SHARD + 1
    await ann.lease_shard("second", shard)
    assert (await bob.claim(key, effect="non_idempotent")).state == "unknown"
    assert (await mine.confirm(key)).state == "refused"
    assert await books.charges(ann.run) == [(1, CENT, None, True)]

    assert await mine.release(key)

    assert await books.charges(ann.run) == []
    assert await books.charged(ann.run) == 0
    assert (await bob.claim(key, effect="non_idempotent", confirm=True)).state == "granted"


async def test_it_refunds_what_stayed_charged_when_another_took_the_key_over(
    ann: Caller, bob: Caller, key: bytes, books: Books, store: Store
) -> None:
    await ann.halt("resume", budget="1")
    await bob.halt("resume", budget="1")
    await ann.claim(key, cost=CENT, effect="idempotent")
    await ann.confirm(key)
    store.clock_offset = RUNNING + 1
    await bob.claim(key, cost=2 * CENT, effect="idempotent", confirm=True)
    assert await books.charges(ann.run) == [(1, CENT, None, True)]

    for _ in range(2):
        assert not await ann.release(key)

    assert await books.charges(ann.run) == []
    assert await books.charged(ann.run) == 0
    assert await books.charges(bob.run) == [(2, 2 * CENT, None, False)]
    assert (await bob.complete(key, dispatch=2, cost="0.01")).state == "stored"


async def test_it_gives_back_nothing_of_other_leases_of_its_run(ann: Caller, key: bytes, books: Books, store: Store) -> None:
    """What the run has sent under another lease stays charged, and its lease stays its holder's."""
    await ann.halt("resume", budget="1")
    sent = ann.but(lease="sent")
    await sent.claim(key, cost=CENT, effect="idempotent", confirm=True)
    store.clock_offset = RUNNING + 1
    unheard = ann.but(lease="unheard")
    await unheard.claim(key, cost=CENT, effect="idempotent")
    await unheard.confirm(key)
    assert await books.charges(ann.run) == [(1, CENT, None, True), (2, CENT, None, False)]

    assert await unheard.release(key)
    assert await books.charges(ann.run) == [(1, CENT, None, True)]
    assert await books.charged(ann.run) == CENT

    await sent.but(lease="third").claim(key, cost=CENT, effect="idempotent", confirm=True)
    assert not await unheard.release(key)
    assert await books.charges(ann.run) == [(1, CENT, None, True), (3, CENT, None, False)]
    assert await books.balanced(ann.run)


async def test_what_has_an_outcome_is_not_given_back(ann: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, cost=CENT, confirm=True)
    await ann.complete(key, cost="0.01")

    assert not await ann.release(key)

    assert await books.state(key) == "completed"
    assert await books.charged(ann.run) == CENT
