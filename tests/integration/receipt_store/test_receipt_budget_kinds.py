"""Budgets of calls, retries and wall time: reserved, settled, refunded like money, and as exact."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rowmill_contracts.budgets import Limits
from rowmill_receipt_store.store import Store

from .conftest import QUEUED, RUNNING, Books, Caller, new_key, new_keys
from .test_receipt_budgets import CENT

pytestmark = pytest.mark.servers


async def test_a_call_is_reserved_by_its_claim_and_stays_with_its_outcome(ann: Caller, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(calls=3))
    done, failed, unknown = new_keys(3)
    for _ in range(2):
        await ann.claims([done, failed, unknown], confirm=True)
    assert await books.counted(ann.run) == (3, 0)

    for _ in range(2):
        await ann.complete(done)
        await ann.fail(failed)
        await ann.fail(unknown, becomes="outcome_unknown")

    assert await books.counted(ann.run) == (3, 0)
    assert (await ann.claim(new_key())).state == "over_budget"
    [told] = await store.tallies([ann.run])
    assert (told.counted_calls, told.counted_retries) == (3, 0), "as who resumes the run is told"
    assert await books.balanced(ann.run)


async def test_what_was_not_sent_or_not_charged_is_refunded_once(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(calls=5))
    queued, confirmed, refused, unheard, expired = keys = new_keys(5)
    await ann.claims([queued, unheard, expired])
    await ann.confirm(unheard)
    await ann.claims([confirmed, refused], confirm=True)
    assert await books.counted(ann.run) == (5, 0)
    assert (await ann.claim(new_key())).state == "held", "two of them are not sent and may come back"

    for _ in range(2):
        await ann.release(queued)
        await ann.release(confirmed, dispatch=1)
        await ann.fail(refused, becomes="released", refund=True)
        await ann.release(unheard)
    assert await books.counted(ann.run) == (1, 0)
    store.clock_offset = QUEUED + 1
    await bob.claim(expired)

    assert await books.counted(ann.run) == (0, 0)
    assert await books.charges(ann.run) == []
    store.clock_offset += QUEUED + 1
    states = [answer.state for answer in await ann.but(lease="again").claims([*keys, new_key()])]
    assert states == [*["granted"] * 5, "held"]
    assert await books.balanced(ann.run)


async def test_a_retry_is_another_dispatch_of_a_call_that_was_charged(ann: Caller, key: bytes, books: Books) -> None:
    await ann.decided("resume", budget=Limits(retries=2))
    await ann.claim(key, confirm=True)
    for dispatch in (1, 2):
        await ann.but(lease=f"{dispatch - 1}" if dispatch > 1 else ann.lease).fail(key, dispatch, becomes="released")
        assert (await ann.but(lease=f"{dispatch}").claim(key, confirm=True)).dispatch == dispatch + 1
    assert await books.counted(ann.run) == (1, 2)

    await ann.but(lease="2").fail(key, 3, becomes="released")
    spent = await ann.but(lease="3").claim(key)

    assert (spent.state, spent.reason) == ("over_budget", f"budget: retries, all 2 are made and receipt {key.hex()[:12]} would be tried again")
    assert (await ann.claim(new_key())).state == "granted", "a first call is no retry"
    await ann.decided("resume", budget=Limits(retries=3))
    assert (await ann.but(lease="3").claim(key)).state == "granted"
    assert await books.balanced(ann.run)


async def test_a_retry_that_was_not_charged_is_none(ann: Caller, key: bytes, books: Books) -> None:
    await ann.decided("resume", budget=Limits(retries=0))
    await ann.claim(key, confirm=True)
    await ann.fail(key, becomes="released", refund=True)

    assert (await ann.but(lease="again").claim(key)).state == "granted"
    assert await books.counted(ann.run) == (1, 0)


async def test_a_dispatch_that_nobody_ended_makes_the_next_one_a_retry(ann: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(retries=1))
    await ann.claim(key, confirm=True)
    store.clock_offset = RUNNING + 1
    await ann.but(lease="again").claim(key, confirm=True)
    assert await books.counted(ann.run) == (1, 1)

    store.clock_offset += RUNNING + 1
    assert (await ann.but(lease="third").claim(key)).state == "over_budget"
    assert await books.balanced(ann.run)


async def test_a_run_takes_its_own_expired_claim_within_spent_calls(ann: Caller, key: bytes, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(calls=1))
    await ann.claim(key)
    store.clock_offset = QUEUED + 1

    assert (await ann.but(lease="again").claim(key, confirm=True)).state == "granted"
    assert await books.counted(ann.run) == (1, 0)
    assert await books.balanced(ann.run)


async def test_followers_and_what_is_stored_cost_no_call(ann: Caller, bob: Caller, key: bytes, books: Books) -> None:
    await bob.decided("resume", budget=Limits(calls=0, money=CENT))
    await ann.claim(key, confirm=True)
    assert (await bob.claim(key)).state == "held"
    await ann.complete(key)

    assert (await bob.claim(key)).state == "completed"
    assert (await bob.claim(new_key())).state == "over_budget"
    assert await books.counted(bob.run) == (0, 0)


async def test_calls_count_from_when_such_a_budget_was_first_given(ann: Caller, books: Books, store: Store) -> None:
    before, paid, taken = new_keys(3)
    await ann.claims([before], confirm=True)
    await ann.claims([paid], confirm=True, cost=CENT)
    await ann.claim(taken, cost=CENT)

    await ann.decided("resume", budget=Limits(calls=1))

    assert await books.counted(ann.run) == (0, 0)
    await ann.complete(before)
    await ann.complete(paid, cost="0.01")
    store.clock_offset = QUEUED + 1
    again = ann.but(lease="again")
    assert (await again.claim(taken, confirm=True)).state == "granted"
    assert await books.counted(ann.run) == (1, 0)
    assert await books.charged(ann.run) == CENT
    assert (await ann.claim(new_key())).state == "held"
    await again.complete(taken)
    assert (await ann.claim(new_key())).state == "over_budget"
    assert await books.balanced(ann.run)


async def test_money_alone_counts_no_calls(ann: Caller, key: bytes, books: Books) -> None:
    await ann.halt("resume", budget="1")
    await ann.claim(key, confirm=True)

    assert await books.charges(ann.run) == []


async def test_the_reason_names_the_budget_and_the_first_receipt_of_a_page_that_it_does_not_pay(ann: Caller) -> None:
    keys = new_keys(4)
    await ann.decided("resume", budget=Limits(calls=1))
    await ann.claim(keys[0], confirm=True)
    await ann.complete(keys[0])
    answers = await ann.claims(keys[1:])
    calls = f"budget: calls, all 1 are made and receipt {keys[1].hex()[:12]} would be one more"
    assert [(answer.state, answer.reason) for answer in answers] == [("over_budget", calls)] * 3

    await ann.decided("resume", budget=Limits(calls=9, money=CENT))
    spent = await ann.claim(keys[3], cost=2 * CENT)
    assert spent.reason == f"budget: money, 0.01 of 0.01 is left and receipt {keys[3].hex()[:12]} may cost 0.02"


async def test_nothing_is_sent_after_the_wall_time(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(wall_time=30), deadline=time.time() + 30, decision=1)
    done, queued, sent = new_keys(3)
    await ann.claims([done, sent], confirm=True)
    await ann.complete(done)
    store.clock_offset = 25
    await ann.claim(queued)

    store.clock_offset = 31

    why = f"budget: wall time, 30 s are over and receipt {queued.hex()[:12]} is not sent"
    confirmed = await ann.confirm(queued)
    assert (confirmed.state, confirmed.reason) == ("halted", why)
    late = await ann.claim(new_key())
    assert late.state == "over_budget"
    assert late.reason.startswith("budget: wall time, 30 s are over and receipt ")
    assert (await ann.claim(done)).state == "completed"
    assert (await ann.complete(sent)).state == "stored"
    assert (await bob.claim(queued)).state == "granted", "another run need not wait for a lease that its holder may not use"

    await ann.decided("resume", budget=Limits(wall_time=60), deadline=time.time() + 60, decision=2)
    assert (await ann.claim(new_key(), confirm=True)).state == "granted"


@pytest.mark.parametrize("kind", ["money", "calls", "retries"])
async def test_eight_claimers_at_once_spend_each_kind_exactly(kind: str, ann: Caller, books: Books) -> None:
    keys = new_keys(40)
    limits: dict[str, Any] = {"money": Limits(money=25 * CENT), "calls": Limits(calls=25), "retries": Limits(retries=25)}
    await ann.decided("resume", budget=Limits(calls=1000))
    if kind == "retries":
        await ann.claims(keys, confirm=True)
        for key in keys:
            await ann.fail(key, becomes="released")
    await ann.decided("resume", budget=limits[kind])

    async def work(number: int) -> int:
        """Claim all keys in another order, give a third of what was granted back, and end the rest somehow; how many were kept."""
        mine, kept = ann.but(lease=f"claimer-{number}"), 0
        for turn in range(4):
            order = [keys[(number * 5 + turn * 7 + step) % len(keys)] for step in range(len(keys))]
            for page in (order[:20], order[20:]):
                answers = await mine.but(lease=f"{mine.lease}-{turn}").claims(page, cost=CENT, confirm=True)
                for place, (key, answer) in enumerate(zip(page, answers, strict=True)):
                    if answer.state != "granted":
                        continue
                    holder = mine.but(lease=f"{mine.lease}-{turn}")
                    if turn < 3 and place % 3 == 0:
                        await holder.release(key, dispatch=answer.dispatch)
                    else:
                        kept += 1
                        await holder.complete(key, answer.dispatch, cost="0.01")
        return kept

    kept = sum(await asyncio.gather(*(work(number) for number in range(8))))

    assert kept == 25, "neither passed nor left unused"
    spent = {"money": await books.charged(ann.run), "calls": (await books.counted(ann.run))[0], "retries": (await books.counted(ann.run))[1]}
    assert spent[kind] == {"money": 25 * CENT, "calls": 25, "retries": 25}[kind]
    assert await books.balanced(ann.run)


async def test_eight_claimers_at_once_send_nothing_after_the_wall_time(ann: Caller, books: Books, store: Store) -> None:
    await ann.decided("resume", budget=Limits(wall_time=50, calls=1000), deadline=time.time() + 50, decision=1)
    keys = new_keys(80)
    granted: list[float] = []

    async def work(number: int) -> None:
        for turn in range(10):
            mine, asked_at = ann.but(lease=f"{number}-{turn}"), store.clock_offset
            page = keys[number * 10 : number * 10 + 10]
            for key, answer in zip(page, await mine.claims(page, confirm=True), strict=True):
                if answer.state == "granted":
                    granted.append(asked_at)
                    await mine.release(key, dispatch=answer.dispatch)
            store.clock_offset += 1

    await asyncio.gather(*(work(number) for number in range(8)))

    assert granted
    assert max(granted) <= 50
    assert (await ann.claim(new_key())).state == "over_budget"
    assert await books.balanced(ann.run)
