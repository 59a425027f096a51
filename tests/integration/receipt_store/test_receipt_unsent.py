"""What calls under way have of a budget is waited for while it may come back, and by nobody once it cannot; also beside older processes."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.budgets import Limits
from rowmill_receipt_store.store import Store
from rowmill_receipt_store.sweeping import Sweep

from .conftest import QUEUED, RUNNING, SHARD, Books, Caller, new_key, new_keys, new_run

pytestmark = pytest.mark.servers

ONE = Limits(calls=1)
CENT = Decimal("0.01")


class OlderProcess:
    """What processes did that did not know of unsent charges; their statements name none of it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def confirm(self, key: bytes) -> None:
        sql = "UPDATE receipts SET state = 'running', revision = revision + 1, dispatch = dispatch + 1 WHERE key = $1 AND state = 'queued'"
        await self._database.execute(sql, key)

    async def release(self, key: bytes) -> None:
        await self._database.execute("UPDATE receipts SET state = 'released', revision = revision + 1 WHERE key = $1", key)
        sql = """
            WITH gone AS (DELETE FROM charges WHERE key = $1 RETURNING run_id, calls)
            UPDATE runs r SET calls = r.calls - g.calls FROM gone g WHERE r.run_id = g.run_id
        """
        await self._database.execute(sql, key)

    async def claim(self, key: bytes, run: str, state: str) -> None:
        """Under a lease that is over."""
        sql = """
            INSERT INTO receipts (
                key, revision, state, dispatch, lease_id, holder, run_id, caller, org, tool, effect, reserved, took_over, expires_at
            ) VALUES ($1, 1, $3, ($3 = 'running')::integer, 'old', 'old', $2, '', '', 'tool', 'read', 0, false, now())
        """
        await self._database.execute(sql, key, run, state)
        await self._database.execute("INSERT INTO charges (run_id, key, dispatch, reserved, calls) VALUES ($1, $2, 1, 0, 1)", run, key)
        await self._database.execute("UPDATE runs SET calls = calls + 1 WHERE run_id = $1", run)


@pytest.fixture
def older(database: Database) -> OlderProcess:
    return OlderProcess(database)


@pytest.fixture
def sweep(database: Database) -> Sweep:
    return Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=2)


async def test_what_an_older_process_confirms_spends_the_budget(ann: Caller, older: OlderProcess, key: bytes) -> None:
    await ann.decided("resume", budget=ONE, decision=1)
    await ann.claim(key)
    assert (await ann.claim(new_key())).state == "held"
    await older.confirm(key)
    assert (await ann.claim(new_key())).state == "held"
    await ann.complete(key)
    assert (await ann.claim(new_key())).state == "over_budget"


async def test_what_an_older_process_gives_back_is_waited_for_by_nobody(ann: Caller, older: OlderProcess, key: bytes) -> None:
    await ann.decided("resume", budget=ONE, decision=1)
    await ann.claim(key)
    await older.release(key)
    other = new_key()
    assert (await ann.claim(other)).state == "granted"
    await ann.confirm(other)
    await ann.complete(other)
    assert (await ann.claim(new_key())).state == "over_budget"


async def test_the_look_gives_back_and_corrects_what_older_processes_left(
    ann: Caller, older: OlderProcess, sweep: Sweep, database: Database, books: Books
) -> None:
    await ann.decided("resume", budget=Limits(calls=9), decision=1)
    queued, running = new_keys(5), new_keys(3)
    for key in queued:
        await older.claim(key, ann.run, "queued")
    for key in running:
        await older.claim(key, ann.run, "running")
    await database.execute("DELETE FROM receipts WHERE key = $1", running[0])
    sweep.clock_offset = QUEUED + 1
    assert await sweep.look() == 5
    assert await books.counted(ann.run) == (3, 0)
    [[unsent]] = await database.fetch("SELECT count(*) FROM charges WHERE run_id = $1 AND unsent", ann.run)
    assert unsent == 0


@pytest.mark.parametrize("limits", [Limits(calls=3), Limits(money=Decimal("0.03"))], ids=["calls", "money"])
async def test_nobody_waits_for_ever_for_a_claim_that_is_not_sent(limits: Limits, ann: Caller, store: Store) -> None:
    """Its holder keeps it, and neither sends it nor gives it back."""
    await ann.decided("resume", budget=limits, decision=1)
    keys = new_keys(3)
    await ann.claims(keys, cost=CENT)
    for _ in range(12):
        held = await ann.claim(new_key(), cost=CENT)
        assert (held.state, held.reason.partition(",")[0]) == ("held", "budget: calls" if limits.calls else "budget: money")
        store.clock_offset += QUEUED - 1
        await ann.receipts.renew([ann.held(key) for key in keys])
    store.clock_offset += 2 * QUEUED
    over = await ann.claim(new_key(), cost=CENT)
    assert over.state == "over_budget"


async def test_what_is_sent_is_waited_for_as_long_as_its_lease_lasts(ann: Caller, store: Store, key: bytes) -> None:
    """However long its call takes; and not once its gateway is dead, though nobody has asked for it since."""
    await ann.decided("resume", budget=ONE, decision=1)
    await ann.claim(key)
    await ann.confirm(key)
    for _ in range(3):
        store.clock_offset += RUNNING - 1
        await ann.receipts.renew([ann.held(key)])
        assert (await ann.claim(new_key())).state == "held"
    store.clock_offset += RUNNING + 1
    assert (await ann.claim(new_key())).state == "over_budget"


async def test_a_call_does_not_wait_for_its_own_dispatch_of_which_nobody_will_tell(ann: Caller, store: Store, key: bytes) -> None:
    """Its gateway died, and another has the lane. It was sent, perhaps, so it stays charged, and the budget is spent."""
    await ann.decided("resume", budget=Limits(money=CENT), decision=1)
    dead = ann.but(lease="dead", shard=901, term=(await ann.lease_shard("dead", 901)).term)
    await dead.claim(key, cost=CENT)
    await dead.confirm(key)
    for _ in range(2):  # asked for once it has lapsed, and had by who asks again
        store.clock_offset += SHARD + 1
        lane = await ann.lease_shard("next", 901)
    assert lane.held
    next_one = ann.but(lease="next", shard=901, term=lane.term)
    assert (await next_one.claim(new_key(), cost=CENT)).state == "held", "what is on its way may still come back, for all that others know"
    assert (await next_one.claim(key, cost=CENT)).state == "over_budget"


async def test_a_claim_that_is_taken_over_is_waited_for_anew(ann: Caller, store: Store, key: bytes) -> None:
    """The gateway that had it first died; the one that has it now is about to send it, or to give it back."""
    await ann.decided("resume", budget=ONE, decision=1)
    await ann.claim(key)
    store.clock_offset += 11 * QUEUED
    assert (await ann.but(lease="next").claim(key)).state == "granted"
    store.clock_offset += 2 * QUEUED
    assert (await ann.claim(new_key())).state == "held"


async def test_runs_wait_for_no_claims_of_others(ann: Caller, bob: Caller, store: Store) -> None:
    for run in (ann, bob):
        await run.decided("resume", budget=ONE, decision=1)
    sent = new_key()
    await bob.claim(sent)
    await bob.confirm(sent)
    await bob.complete(sent)
    await ann.claim(new_key())
    third = ann.but(run=new_run())
    await third.claims(new_keys(2))
    assert (await bob.claim(new_key())).state == "over_budget"
    assert (await ann.claim(new_key())).state == "held"
