"""What a run was charged, as it is told: every dispatch, whatever came of it, and nothing that was not sent."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from importlib.resources import files

import pytest

from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.charges import AskCharges, RunCharges
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Store
from rowmill_receipt_store.sweeping import Sweep

from .conftest import QUEUED, RUNNING, Books, Caller, new_key, new_keys, new_run

pytestmark = pytest.mark.servers

CENT = Decimal("0.01")


@pytest.mark.parametrize("budget", [None, Decimal(5)], ids=["no budget", "a budget"])
@pytest.mark.parametrize("cost", [Decimal(0), CENT], ids=["free", "a cent"])
async def test_calls_that_fail_are_told_and_calls_that_were_not_sent_are_not(
    ann: Caller, books: Books, cost: Decimal, budget: Decimal | None
) -> None:
    if budget is not None:
        await ann.decided("resume", budget=budget)
    completed, failed, tried, refused, unsent, unheard, unknown, dead = new_keys(8)
    await ann.claims([completed, failed, tried, refused, unheard, unknown], confirm=True, cost=cost)
    await ann.claims([unsent, dead], cost=cost)
    assert await books.tallied(ann.run) == (8 * cost, 8), "what is claimed is reserved"

    for _ in range(2):  # each is told twice, and booked once
        await ann.complete(completed, cost=str(cost))
        await ann.fail(failed)
        await ann.fail(tried, becomes="released")
        await ann.fail(refused, becomes="released", refund=True)
        await ann.release(unsent)
        await ann.release(unheard)
        await ann.fail(unknown, becomes="outcome_unknown")
        await ann.fail(dead, dispatch=0)
    assert await books.tallied(ann.run) == (4 * cost, 4)

    again = ann.but(lease="again")
    await again.claims([tried, refused, completed, failed], confirm=True, cost=cost)
    await again.complete(tried, dispatch=2, cost=str(cost))
    await again.complete(refused, dispatch=2, cost=str(cost))
    await ann.complete(unknown, cost=str(cost))

    assert await books.tallied(ann.run) == (6 * cost, 6), "a try more of two calls; two were answered from what is stored"


@pytest.mark.parametrize("cost", [Decimal(0), CENT], ids=["free", "a cent"])
async def test_who_takes_a_claim_over_pays_for_it_and_who_sent_pays_for_what_it_sent(
    ann: Caller, bob: Caller, key: bytes, books: Books, store: Store, cost: Decimal
) -> None:
    sent = new_key()
    await ann.claim(key, cost=cost)
    await ann.claim(sent, cost=cost, confirm=True)
    store.clock_offset = max(QUEUED, RUNNING) + 1
    await bob.claims([key, sent], cost=cost, confirm=True)
    assert await books.tallied(ann.run) == (cost, 1)
    assert await books.tallied(bob.run) == (2 * cost, 2)

    await ann.release(key)
    await ann.complete(sent, cost=str(cost))
    assert await books.tallied(ann.run) == (cost, 1)
    assert await books.tallied(bob.run) == (2 * cost, 2)


async def test_what_was_not_sent_is_no_call_though_others_have_its_key_by_now(ann: Caller, bob: Caller, books: Books, store: Store) -> None:
    unsent, refused, failed = new_keys(3)
    await ann.claims([unsent, refused, failed], cost=CENT, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claims([unsent, refused, failed], cost=CENT, confirm=True)
    assert await books.tallied(ann.run) == (3 * CENT, 3), "nobody knows yet"

    for _ in range(2):
        await ann.release(unsent)
        await ann.fail(refused, becomes="released", refund=True)
        await ann.fail(failed)

    assert await books.tallied(ann.run) == (CENT, 1)
    assert await books.tallied(bob.run) == (3 * CENT, 3)


async def test_a_claim_whose_holder_died_before_it_sent_is_no_call(ann: Caller, key: bytes, books: Books, database: Database) -> None:
    sweep = Sweep(database, SystemClock(), interval=1.0, patience=QUEUED, page=1000)
    await ann.claim(key, cost=CENT)
    sweep.clock_offset = 2 * QUEUED + 1
    await sweep.look()

    assert await books.tallied(ann.run) == (Decimal(0), 0)


async def test_what_a_call_cost_is_told_once_it_is_known_however_late(ann: Caller, books: Books, store: Store, bob: Caller) -> None:
    dear, cheap, late = new_keys(3)
    await ann.claims([dear, cheap, late], confirm=True, cost=2 * CENT)
    await ann.complete(dear, cost="0.05")
    await ann.complete(cheap, cost="0.01")
    assert await books.tallied(ann.run) == (8 * CENT, 3)

    store.clock_offset = RUNNING + 1
    await bob.claim(late, cost=2 * CENT, confirm=True)
    await ann.complete(late, cost="0.07")

    assert await books.tallied(ann.run) == (13 * CENT, 3)


async def test_a_retry_of_a_call_that_failed_for_its_run_is_charged_again(ann: Caller, key: bytes, books: Books) -> None:
    await ann.claim(key, cost=CENT, confirm=True)
    await ann.fail(key)
    await ann.decided("resume", decision=1, retry=True)
    await ann.but(lease="again").claim(key, cost=CENT, confirm=True)
    await ann.but(lease="again").complete(key, dispatch=2, cost="0.01")

    assert await books.tallied(ann.run) == (2 * CENT, 2)


async def test_steps_are_no_calls(ann: Caller, key: bytes, books: Books) -> None:
    await ann.claim(key, counted=False, confirm=True)
    await ann.complete(key)

    assert await books.tallied(ann.run) == (Decimal(0), 0)


async def test_runs_are_told_together_and_later_is_known_by_its_version(ann: Caller, bob: Caller, key: bytes, receipts: Receipts) -> None:
    unknown = new_run()

    async def charges(*questions: list[str]) -> list[list[RunCharges]]:
        return [told.runs for told in await receipts.charged([AskCharges(run_ids=run_ids) for run_ids in questions])]

    [[before]] = await charges([ann.run])
    await ann.claim(key, cost=CENT, confirm=True)
    [[between]] = await charges([ann.run])
    await ann.fail(key, refund=True)
    told, [again], nothing = await charges([bob.run, ann.run, unknown, ann.run], [ann.run], [])

    assert before == RunCharges(run_id=ann.run)
    assert (between.cost, between.calls) == (CENT, 1)
    assert [(run.run_id, str(run.cost.normalize()), run.calls) for run in told] == [(run, "0", 0) for run in (bob.run, ann.run, unknown, ann.run)]
    assert (again, nothing) == (told[1], []), "each question is answered for itself"
    assert before.version < between.version < told[1].version


async def test_what_runs_were_charged_before_there_were_tallies_is_told_too(ann: Caller, books: Books, database: Database) -> None:
    failed, settled, open_ = new_keys(3)
    await ann.claims([failed, settled, open_], confirm=True, cost=CENT)
    await ann.fail(failed)
    await ann.complete(settled, cost="0.03")
    before = await books.tallied(ann.run)
    migration = files("rowmill_receipt_store").joinpath("migrations/0011_tallies.sql").read_text("utf-8")
    [filling] = [statement for statement in migration.split(";") if "INSERT INTO tallies" in statement]

    await database.execute("TRUNCATE tallies")
    await database.execute(filling)

    assert await books.tallied(ann.run) == before == (5 * CENT, 3)


async def test_sessions_that_charge_a_run_at_once_do_not_wait_for_each_other(ann: Caller, books: Books, database: Database) -> None:
    """A session that has booked and not committed holds up no other."""
    async with database.pool.acquire() as connection, connection.transaction():
        await connection.execute("INSERT INTO tallies VALUES ($1, pg_backend_pid(), 1, 0.01, 1)", ann.run)
        async with asyncio.timeout(30):
            await ann.claims(new_keys(3), cost=CENT, confirm=True)
        await connection.execute("UPDATE tallies SET charged = 0, calls = 0 WHERE run_id = $1 AND session = pg_backend_pid()", ann.run)

    assert await books.tallied(ann.run) == (3 * CENT, 3)
