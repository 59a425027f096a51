"""Reserved, settled, refunded, charged without a known outcome: to the right run, once, within its budget."""

from __future__ import annotations

import asyncio
import secrets
import time
from decimal import Decimal

import pytest

from rowmill_receipt_store.store import Store

from .conftest import OUTPUT_LIMIT, QUEUED, RUNNING, Books, Caller, new_key, new_keys

pytestmark = pytest.mark.servers

CENT = Decimal("0.01")


async def test_a_claim_reserves_and_a_completion_settles(ann: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="0.10")
    await ann.claim(key, cost=3 * CENT)
    assert await books.charged(ann.run) == 3 * CENT
    assert await books.charges(ann.run) == [(1, 3 * CENT, None, False)]

    await ann.confirm(key)
    await ann.complete(key, cost="0.02")

    assert await books.charged(ann.run) == 2 * CENT
    assert await books.charges(ann.run) == [(1, 3 * CENT, 2 * CENT, False)]


async def test_repeats_and_followers_are_free(ann: Caller, bob: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="1")
    await bob.halt("resume", budget="1")
    for _ in range(2):
        await ann.claim(key, cost=3 * CENT)
        await bob.claim(key, cost=3 * CENT)
        await ann.claim(key, cost=3 * CENT, confirm=True)
        await ann.confirm(key)
    for _ in range(2):
        await ann.complete(key, cost="0.02")
        await bob.claim(key, cost=3 * CENT)

    assert await books.charged(ann.run) == 2 * CENT
    assert await books.charged(bob.run) == 0
    assert await books.charges(bob.run) == []


async def test_a_page_is_served_in_its_order_as_far_as_the_budget_goes(ann: Caller, books: Books) -> None:
    await ann.halt("resume", budget="0.05")
    keys = sorted(new_keys(5), reverse=True)

    answers = await ann.claims(keys, cost=2 * CENT)

    assert [answer.state for answer in answers] == ["granted", "granted", "held", "held", "held"]
    assert await books.charged(ann.run) == 4 * CENT
    assert (await ann.claim(keys[4], cost=CENT)).state == "granted"
    assert (await ann.claim(keys[3], cost=CENT)).state == "held"
    assert (await ann.claim(keys[3])).state == "granted"
    for key, cost in ((keys[0], "0.02"), (keys[1], "0.02"), (keys[4], "0.01")):
        await ann.confirm(key)
        assert (await ann.claim(keys[2], cost=CENT)).state == "held"
        await ann.complete(key, cost=cost)
    assert (await ann.claim(keys[2], cost=CENT)).state == "over_budget"
    assert await books.balanced(ann.run)


async def test_a_larger_budget_lets_the_rest_through(ann: Caller) -> None:
    await ann.halt("resume", budget="0.01")
    keys = new_keys(2)
    await ann.claim(keys[0], cost=CENT, confirm=True)
    await ann.complete(keys[0], cost="0.01")

    assert (await ann.claim(keys[1], cost=CENT)).state == "over_budget"
    await ann.halt("resume", budget="0.02")
    assert (await ann.claim(keys[1], cost=CENT)).state == "granted"


async def test_a_budget_given_late_counts_what_was_charged_before(ann: Caller, books: Books) -> None:
    keys = new_keys(4)
    await ann.claims(keys[:3], confirm=True, cost=2 * CENT)
    await ann.complete(keys[0], cost="0.01")
    await ann.fail(keys[1], refund=True)
    assert await books.charged(ann.run) is None

    await ann.halt("resume", budget="0.04")

    assert await books.charged(ann.run) == 3 * CENT
    assert (await ann.claim(keys[3], cost=2 * CENT)).state == "held"
    assert (await ann.claim(keys[3], cost=CENT)).state == "granted"


async def test_a_release_refunds_once(ann: Caller, books: Books) -> None:
    await ann.halt("resume", budget="1")
    queued, running = new_keys(2)
    await ann.claim(queued, cost=CENT)
    await ann.claim(running, cost=CENT, confirm=True)
    for _ in range(2):
        await ann.release(queued)
        await ann.release(running, dispatch=1)

    assert await books.charged(ann.run) == 0
    assert await books.charges(ann.run) == []


async def test_an_expired_unsent_claim_is_refunded_by_who_takes_it(ann: Caller, bob: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="1")
    await bob.halt("resume", budget="1")
    await ann.claim(key, cost=3 * CENT)
    store.clock_offset = QUEUED + 1
    await bob.claim(key, cost=2 * CENT)

    assert await books.charged(ann.run) == 0
    assert await books.charges(ann.run) == []
    assert await books.charged(bob.run) == 2 * CENT
    assert await books.charges(bob.run) == [(1, 2 * CENT, None, False)]


async def test_a_run_takes_its_own_expired_claim_within_a_spent_budget(ann: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="0.03")
    await ann.claim(key, cost=3 * CENT)
    store.clock_offset = QUEUED + 1

    assert (await ann.but(lease="again").claim(key, cost=3 * CENT)).state == "granted"
    assert await books.charged(ann.run) == 3 * CENT
    store.clock_offset += QUEUED + 1
    assert (await ann.but(lease="for nothing").claim(key)).state == "granted"
    assert await books.charged(ann.run) == 0
    assert await books.charges(ann.run) == []


async def test_what_was_sent_without_an_outcome_stays_charged_until_it_is_known(
    ann: Caller, bob: Caller, key: bytes, books: Books, store: Store
) -> None:
    await ann.halt("resume", budget="0.03")
    await ann.claim(key, cost=3 * CENT, confirm=True)
    store.clock_offset = RUNNING + 1
    assert (await ann.but(lease="again").claim(key, cost=3 * CENT)).state == "over_budget"

    await bob.claim(key, cost=CENT, confirm=True)

    assert await books.charges(ann.run) == [(1, 3 * CENT, None, True)]
    assert await books.charges(bob.run) == [(2, CENT, None, False)]
    for _ in range(2):
        assert (await ann.complete(key, cost="0.01")).state == "superseded"
    assert await books.charges(ann.run) == [(1, 3 * CENT, CENT, False)]
    assert await books.charged(ann.run) == CENT


async def test_the_same_run_pays_for_each_dispatch(ann: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, cost=3 * CENT, confirm=True)
    await ann.fail(key, becomes="released")
    retry = ann.but(lease="retry")
    await retry.claim(key, cost=3 * CENT, confirm=True)
    await retry.complete(key, dispatch=2, cost="0.01")

    assert await books.charges(ann.run) == [(1, 3 * CENT, 3 * CENT, False), (2, 3 * CENT, CENT, False)]
    assert await books.charged(ann.run) == 4 * CENT


@pytest.mark.parametrize("becomes", ["failed", "released"])
async def test_a_failure_keeps_or_refunds_its_charge_once(becomes: str, ann: Caller, books: Books) -> None:
    await ann.halt("resume", budget="1")
    charged, refunded, unsent = new_keys(3)
    await ann.claims([charged, refunded], cost=CENT, confirm=True)
    await ann.claim(unsent, cost=CENT)
    for _ in range(2):
        await ann.fail(charged, becomes=becomes)  # type: ignore[arg-type]
        await ann.fail(refunded, becomes=becomes, refund=True)  # type: ignore[arg-type]
        await ann.fail(unsent, 0, becomes=becomes)  # type: ignore[arg-type]

    assert await books.charges(ann.run) == [(1, CENT, CENT, False)]
    assert await books.charged(ann.run) == CENT


async def test_a_failure_after_its_lease_moved_settles_its_charge(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="1")
    charged, refunded = new_keys(2)
    await ann.claims([charged, refunded], cost=CENT, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claims([charged, refunded], cost=CENT, confirm=True)
    for _ in range(2):
        assert (await ann.fail(charged)).state == "superseded"
        assert (await ann.fail(refunded, refund=True)).state == "superseded"

    assert await books.charges(ann.run) == [(1, CENT, CENT, False)]
    assert await books.charged(ann.run) == CENT
    assert await books.balanced(ann.run)


async def test_an_unknown_outcome_stays_charged_and_a_late_completion_settles(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="1")
    said, expired = new_keys(2)
    await ann.claims([said, expired], cost=CENT, confirm=True, effect="non_idempotent")
    await ann.fail(said, becomes="outcome_unknown")
    store.clock_offset = RUNNING + 1
    assert (await bob.claim(expired)).state == "unknown"

    assert await books.charges(ann.run) == [(1, CENT, None, True)] * 2
    assert await books.charged(ann.run) == 2 * CENT
    await ann.complete(said, cost="0")
    await ann.complete(expired, cost="0.005")
    assert sorted(await books.charges(ann.run)) == [(1, CENT, Decimal(0), False), (1, CENT, Decimal("0.005"), False)]
    assert await books.charged(ann.run) == Decimal("0.005")


async def test_an_actual_cost_above_its_bound_is_booked_and_halts_the_run(ann: Caller, books: Books) -> None:
    await ann.halt("resume", budget="0.05")
    one, two = new_keys(2)
    await ann.claim(one, cost=CENT, confirm=True)
    await ann.claim(two, cost=CENT)
    await ann.complete(one, cost="0.07")

    assert await books.charged(ann.run) == 8 * CENT
    assert one.hex()[:12] in await books.reason(ann.run)
    assert (await ann.confirm(two)).state == "halted"
    assert (await ann.claim(new_key())).state == "halted"
    assert await ann.halt("resume", budget="1") == "running"
    assert (await ann.confirm(two)).state == "confirmed"
    assert await books.balanced(ann.run)


async def test_an_actual_cost_above_its_reservation_halts_within_the_budget_too_but_once(ann: Caller, books: Books) -> None:
    """The promise that the budget holds rests on reservations. Who resumes has been told; from then on only the budget itself halts."""
    await ann.halt("resume", budget="0.20")
    keys = new_keys(4)
    await ann.claims(keys, cost=CENT, confirm=True)
    await ann.complete(keys[0], cost="0.02")

    assert await books.reason(ann.run) == f"budget: money, receipt {keys[0].hex()[:12]} cost 0.02, more than the 0.01 reserved for it"
    halted = await ann.claim(new_key())
    assert (halted.state, halted.reason) == ("halted", await books.reason(ann.run))
    await ann.halt("resume")
    await ann.complete(keys[1], cost="0.02")
    assert (await ann.claim(new_key())).state == "granted"
    await ann.complete(keys[2], cost="0.17")
    assert keys[2].hex()[:12] in (await ann.claim(new_key())).reason
    assert await books.balanced(ann.run)


async def test_a_late_cost_above_its_bound_halts_too(ann: Caller, bob: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.halt("resume", budget="0.05")
    await ann.claim(key, cost=CENT, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claim(key, confirm=True)
    assert (await ann.complete(key, cost="0.07")).state == "superseded"

    assert key.hex()[:12] in await books.reason(ann.run)
    assert (await ann.claim(new_key())).state == "halted"


async def test_a_cost_that_only_its_result_knows_is_booked(ann: Caller, books: Books, key: bytes) -> None:
    await ann.claim(key, confirm=True)
    for _ in range(2):
        await ann.complete(key, cost="0.07")

    assert await books.charges(ann.run) == [(1, Decimal(0), 7 * CENT, False)]


async def test_claims_of_many_at_once_never_pass_a_budget_nor_leave_it_unused(ann: Caller, books: Books) -> None:
    await ann.halt("resume", budget="0.50")
    keys = new_keys(40)

    async def claim(number: int) -> list[str]:
        mine = ann.but(lease=f"claimer-{number}")
        order = [keys[(number * 5 + step) % len(keys)] for step in range(len(keys))]
        return [answer.state for page in (order[:20], order[20:]) for answer in await mine.claims(page, cost=2 * CENT)]

    states = [state for answers in await asyncio.gather(*(claim(number) for number in range(8))) for state in answers]

    assert states.count("granted") == 25
    assert await books.charged(ann.run) == 50 * CENT
    assert await books.balanced(ann.run)


async def test_books_balance_whatever_is_done_at_once(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    for run in (ann, bob):
        await run.halt("resume", budget="5")
    keys = new_keys(30)

    async def work(number: int) -> None:
        base = ann if number % 2 else bob
        for turn in range(6):
            mine = base.but(lease=f"{number}-{turn}", started_at=time.time() + 10_000 * turn)
            some = keys[(number * 3) % 15 :: 2]
            granted = [
                key for key, answer in zip(some, await mine.claims(some, cost=CENT, confirm=turn % 2 == 0), strict=True) if answer.state == "granted"
            ]
            for key in granted[::3]:
                await mine.release(key)
            for key in granted[1::3]:
                dispatch = (await mine.confirm(key)).dispatch
                await mine.complete(key, dispatch, cost="0.02")
            for key in granted[2::3]:
                dispatch = (await mine.confirm(key)).dispatch
                await mine.fail(key, dispatch, becomes="released", refund=turn % 3 == 0)
            store.clock_offset += RUNNING / 4

    await asyncio.gather(*(work(number) for number in range(6)))

    assert await books.balanced(ann.run)
    assert await books.balanced(bob.run)


async def test_a_rejected_output_is_charged_at_what_it_cost(ann: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, cost=3 * CENT, confirm=True)
    for _ in range(2):
        assert (await ann.complete(key, output=secrets.token_bytes(OUTPUT_LIMIT + 1), cost="0.01")).state == "rejected"

    assert await books.charges(ann.run) == [(1, 3 * CENT, CENT, False)]
    assert await books.charged(ann.run) == CENT


async def test_a_confirmed_claim_that_was_not_sent_is_refunded_after_its_lease_moved_too(
    ann: Caller, bob: Caller, key: bytes, books: Books, store: Store
) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, cost=CENT, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claim(key, confirm=True)
    assert await books.charges(ann.run) == [(1, CENT, None, True)]

    for _ in range(2):
        assert not await ann.release(key, dispatch=1)

    assert await books.charges(ann.run) == []
    assert await books.charged(ann.run) == 0
