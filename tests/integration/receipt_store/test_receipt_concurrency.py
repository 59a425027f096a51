"""Many at once on overlapping keys: one holder each, no deadlock, every request repeated."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from decimal import Decimal

import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.receipts import ClaimAnswer
from rowmill_receipt_store.store import Store

from .conftest import RUNNING, Books, Caller, new_keys

pytestmark = pytest.mark.servers


async def _deadlocks(database: Database) -> int:
    row = await database.fetchrow("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert row is not None
    count: int = row[0]
    return count


@pytest.mark.parametrize("cost", [Decimal(0), Decimal("0.01")])
async def test_eight_claimers_of_overlapping_keys_get_each_key_once(cost: Decimal, ann: Caller, database: Database) -> None:
    keys = new_keys(600)
    before = await _deadlocks(database)

    async def claim(number: int) -> dict[bytes, ClaimAnswer]:
        mine = ann.but(lease=f"claimer-{number}", run=f"{ann.run}-{number % 3}")
        shuffled = random.Random(number).sample(keys, len(keys))
        answers: dict[bytes, ClaimAnswer] = {}
        for start in range(0, len(shuffled), 150):
            page = shuffled[start : start + 150]
            answers.update(zip(page, await mine.claims(page, confirm=True, cost=cost), strict=True))
        return answers

    by_claimer = await asyncio.gather(*(claim(number) for number in range(8)))

    for key in keys:
        states = Counter(answers[key].state for answers in by_claimer)
        assert states == {"granted": 1, "held": 7}
    assert await _deadlocks(database) == before


async def test_eight_claimers_of_expired_leases_get_each_key_once(ann: Caller, database: Database, store: Store) -> None:
    keys = new_keys(300)
    before = await _deadlocks(database)
    await ann.claims(keys, confirm=True, cost=Decimal("0.01"))
    store.clock_offset = RUNNING + 1

    async def claim(number: int) -> list[str]:
        mine = ann.but(lease=f"heir-{number}", run=f"{ann.run}-{number % 3}")
        shuffled = random.Random(number).sample(keys, len(keys))
        answers = dict(zip(shuffled, await mine.claims(shuffled, confirm=True, cost=Decimal("0.01")), strict=True))
        return [f"{answers[key].state} {answers[key].dispatch}" for key in keys]

    by_claimer = await asyncio.gather(*(claim(number) for number in range(8)))

    for states in zip(*by_claimer, strict=True):
        assert Counter(states) == {"granted 2": 1, "held 0": 7}
    assert await _deadlocks(database) == before


async def test_all_requests_at_once_and_twice_leave_one_output_each(ann: Caller, bob: Caller, database: Database, books: Books) -> None:
    keys = new_keys(120)
    before = await _deadlocks(database)
    for run in (ann, bob):
        await run.halt("resume", budget="1000")
    paid: Counter[bytes] = Counter()

    async def work(number: int) -> None:
        mine = (ann if number % 2 else bob).but(lease=f"worker-{number}")
        shuffled = random.Random(number).sample(keys, len(keys))
        wanting = shuffled
        while wanting:
            page = wanting[:40]
            first, second = await asyncio.gather(*(mine.claims(page, cost=Decimal("0.01")) for _ in range(2)))
            granted = [key for key, *answers in zip(page, first, second, strict=True) if any(a.state == "granted" for a in answers)]
            leases = [mine.held(key) for key in granted]
            await asyncio.gather(mine.receipts.renew(leases), mine.receipts.confirm(leases))
            confirmed = await mine.receipts.confirm(leases)
            results = []
            for key, answer in zip(granted, confirmed, strict=True):
                assert answer.state == "confirmed"
                paid[key] += 1
                results.append(mine.result(key, answer.dispatch, cost="0.01"))
            for answers in await asyncio.gather(*(mine.receipts.complete(results) for _ in range(2))):
                assert {answer.state for answer in answers} <= {"stored"}
            served = await mine.claims(page, only_cached=True)
            wanting = [key for key, answer in zip(page, served, strict=True) if answer.state != "completed"] + wanting[40:]

    await asyncio.gather(*(work(number) for number in range(8)))

    assert paid == dict.fromkeys(keys, 1)
    assert await books.balanced(ann.run)
    assert await books.balanced(bob.run)
    assert await books.charged(ann.run) + await books.charged(bob.run) == Decimal("1.20")  # type: ignore[operator]
    assert await _deadlocks(database) == before
