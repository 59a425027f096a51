"""Operators: seeing receipts, deciding where nobody knows how a dispatch ended, forgetting old ones."""

from __future__ import annotations

import secrets
import time
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.receipts import GetReceipt, ListReceipts, PruneReceipts, ReceiptsPruned, ReplayReceipt, SettleReceipt
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.operator_store import OperatorStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Store

from .conftest import FAILURE, OUTPUT_LIMIT, RUNNING, Books, Caller, new_key, new_keys, new_run

pytestmark = pytest.mark.servers

CENT = Decimal("0.01")
DAY = 86_400.0
PAID_FOR_ONCE: dict[str, Any] = {"effect": "non_idempotent", "reusable": False}


@pytest.fixture
def operating(database: Database, receipts: Receipts) -> Operating:
    return Operating(OperatorStore(database), receipts)


async def unknown(caller: Caller, key: bytes) -> str:
    """A dispatch of which nobody knows how it ended; answers the receipt's name."""
    await caller.halt("resume", budget="1")
    await caller.claim(key, confirm=True, cost=3 * CENT, **PAID_FOR_ONCE)
    await caller.fail(key, becomes="outcome_unknown")
    return key.hex()[:12]


async def test_an_unknown_outcome_is_settled_by_hand_with_output(ann: Caller, bob: Caller, key: bytes, operating: Operating, books: Books) -> None:
    name = await unknown(ann, key)

    for _ in range(2):
        settled = await operating.settle(SettleReceipt(receipt=name, outcome="completed", output=msgspec.Raw(b'{"score":5}'), cost=2 * CENT))
        assert settled.state == "decided"
        assert settled.receipt is not None
        assert settled.receipt.state == "completed"

    served = await ann.claim(key, **PAID_FOR_ONCE)
    assert (served.state, bytes(served.output)) == ("completed", b'{"raw":{"score":5}}')
    assert await books.charges(ann.run) == [(1, 3 * CENT, 2 * CENT, False)]
    assert (await ann.complete(key, cost="0.03")).state == "stored"
    assert bytes((await bob.claim(key)).output) == b'{"raw":{"score":5}}'


async def test_settled_as_failed_it_failed_for_its_run_alone(ann: Caller, bob: Caller, key: bytes, operating: Operating, books: Books) -> None:
    name = await unknown(ann, key)

    for _ in range(2):
        assert (await operating.settle(SettleReceipt(receipt=name, outcome="failed", message="no trace of it"))).state == "decided"

    failed = await ann.claim(key, **PAID_FOR_ONCE)
    assert failed.failure is not None
    assert (failed.state, failed.failure.message, failed.failure.origin) == ("failed", "no trace of it", "operator")
    assert (await bob.claim(key, **PAID_FOR_ONCE)).state == "granted"
    assert await books.charges(ann.run) == [(1, 3 * CENT, 3 * CENT, False)]


async def test_a_replay_lets_one_more_dispatch_through_and_charges_both(
    ann: Caller, bob: Caller, key: bytes, operating: Operating, books: Books
) -> None:
    name = await unknown(ann, key)
    assert (await bob.claim(key, **PAID_FOR_ONCE)).state == "unknown"

    for _ in range(2):
        assert (await operating.replay(ReplayReceipt(receipt=name))).state == "decided"

    again = ann.but(lease="again")
    assert (await again.claim(key, confirm=True, cost=3 * CENT, **PAID_FOR_ONCE)).dispatch == 2
    assert (await operating.replay(ReplayReceipt(receipt=name))).state == "not_unknown"
    await again.complete(key, dispatch=2, cost="0.01")
    assert await books.charges(ann.run) == [(1, 3 * CENT, 3 * CENT, False), (2, 3 * CENT, CENT, False)]


async def test_what_is_known_cannot_be_decided(ann: Caller, operating: Operating) -> None:
    held, done = new_keys(2)
    await ann.claims([held, done], confirm=True)
    await ann.complete(done)

    for key in (held, done):
        request = SettleReceipt(receipt=key.hex(), outcome="completed", output=msgspec.Raw(b"2"))
        assert (await operating.settle(request)).state == "not_unknown"
        assert (await operating.replay(ReplayReceipt(receipt=key.hex()))).state == "not_unknown"
    assert bytes((await ann.claim(done)).output) == b'{"raw":1}'


async def test_an_output_too_large_to_be_stored_is_rejected(ann: Caller, key: bytes, operating: Operating) -> None:
    name = await unknown(ann, key)
    output = msgspec.Raw(msgspec.json.encode("x" * OUTPUT_LIMIT))

    assert (await operating.settle(SettleReceipt(receipt=name, outcome="completed", output=output))).state == "rejected"


async def test_names_are_prefixes_that_fit_one_receipt(ann: Caller, operating: Operating) -> None:
    common = secrets.token_bytes(8)
    twins = [common + bytes([last]) + bytes(23) for last in (1, 2)]
    await ann.claims(twins)

    assert (await operating.shown(GetReceipt(receipt=common.hex()))).matches == 2
    assert (await operating.replay(ReplayReceipt(receipt=common.hex()))).state == "ambiguous"
    shown = await operating.shown(GetReceipt(receipt=common.hex() + "0"))
    assert shown.matches == 2
    shown = await operating.shown(GetReceipt(receipt=common.hex() + "02"))
    assert shown.receipt is not None
    assert (shown.receipt.receipt, shown.receipt.state) == (common.hex()[:12], "queued")
    assert (await operating.settle(SettleReceipt(receipt=new_key().hex(), outcome="failed"))).state == "absent"


async def test_receipts_are_listed_in_pages_by_what_is_asked_for(ann: Caller, bob: Caller, operating: Operating) -> None:
    keys = sorted(new_keys(5))
    await ann.claims(keys, confirm=True)
    await bob.claim(new_key(), confirm=True)
    await ann.fail(keys[3], becomes="outcome_unknown")

    found, after = [], ""
    while True:
        listed = await operating.listed(ListReceipts(run_id=ann.run, limit=2, after=after))
        found += [view.receipt for view in listed.receipts]
        after = listed.after
        if not after:
            break
    assert found == [key.hex()[:12] for key in keys]
    unknown_ones = (await operating.listed(ListReceipts(run_id=ann.run, state="outcome_unknown"))).receipts
    assert [(view.receipt, view.failure) for view in unknown_ones] == [(keys[3].hex()[:12], FAILURE)]


async def prune(operating: Operating, older_than: float, *, dry_run: bool = False, oldest_run: float | None = None) -> ReceiptsPruned:
    """All pages of a pruning. ``oldest_run``: when the oldest run started that is not over; None: all are."""
    completed = ended = failures = size = 0
    after, now = "", time.time() + 60
    if not dry_run:
        while (page := await operating.pruned(PruneReceipts(older_than=older_than, after=after))).after:
            after = page.after
        after, now = "", page.at
    oldest = now if oldest_run is None else oldest_run
    while True:
        page = await operating.pruned(PruneReceipts(older_than=older_than, after=after, dry_run=dry_run, oldest_run=oldest))
        completed, ended, failures, size = completed + page.completed, ended + page.ended, failures + page.failures, size + page.bytes
        after = page.after
        if not after:
            return ReceiptsPruned(completed=completed, ended=ended, failures=failures, bytes=size)


async def test_pruning_forgets_old_outputs_and_failures_and_nothing_that_is_open(
    ann: Caller, database: Database, operating: Operating, books: Books, store: Store
) -> None:
    await database.execute("TRUNCATE receipts, failures, charges, tallies, runs")
    await ann.halt("resume", budget="1")
    store.clock_offset = -2 * DAY
    old, failed, released, unsettled = new_keys(4)
    await ann.claims([old, failed, released], confirm=True, cost=CENT)
    await ann.claim(unsettled, confirm=True, cost=CENT, **PAID_FOR_ONCE)
    await ann.complete(old, output=b'{"raw":"old"}')
    await ann.fail(failed)
    await ann.release(released, dispatch=1)
    await ann.fail(unsettled, becomes="outcome_unknown")
    store.clock_offset = 0.0
    fresh, held = new_keys(2)
    await ann.claims([fresh, held], confirm=True, cost=CENT)
    await ann.complete(fresh, cost="0.01")
    charged = await books.charged(ann.run)

    counted = await prune(operating, DAY, dry_run=True)
    assert (counted.completed, counted.ended, counted.failures, counted.bytes) == (1, 2, 1, len(b'{"raw":"old"}'))
    assert await books.state(old) == "completed"
    assert await prune(operating, DAY) == counted

    states = [await books.state(key) for key in (old, failed, released, unsettled, fresh, held)]
    assert states == ["", "", "", "outcome_unknown", "completed", "running"]
    assert await books.charged(ann.run) == charged
    assert await books.balanced(ann.run)
    assert (await ann.but(lease="again").claim(old, confirm=True, cost=CENT)).dispatch == 1
    assert await books.balanced(ann.run)
    assert await prune(operating, DAY) == ReceiptsPruned()


async def test_a_refresh_under_way_keeps_the_output_it_replaces(ann: Caller, bob: Caller, key: bytes, operating: Operating, store: Store) -> None:
    store.clock_offset = -2 * DAY
    await ann.claim(key, confirm=True)
    await ann.complete(key)
    store.clock_offset = 0.0
    await bob.claim(key, confirm=True, force=True)

    await prune(operating, DAY)

    assert (await ann.but(lease="reader").claim(key, only_cached=True)).state == "completed"


async def test_nothing_is_forgotten_that_a_run_could_need_which_is_not_over(
    ann: Caller, bob: Caller, books: Books, operating: Operating, store: Store, database: Database
) -> None:
    """Ann's run began after the old output was stored and before it was retired: it may come back for what it was served, however old that is."""
    await database.execute("TRUNCATE receipts, failures, charges, tallies, runs")
    old, own, failed, given_back, before = new_keys(5)
    store.clock_offset = -3 * DAY
    await bob.claim(old, confirm=True)
    await bob.complete(old)
    await bob.claim(before, confirm=True)
    await bob.fail(before)
    store.clock_offset = -2 * DAY
    started = time.time() - 2 * DAY - 60
    run = ann.but(started_at=started)
    assert (await run.claim(old)).state == "completed"
    await run.claims([own, failed, given_back], confirm=True)
    await run.complete(own)
    await run.fail(failed)
    await run.release(given_back, dispatch=1)
    store.clock_offset = 0.0

    pruned = await prune(operating, DAY, oldest_run=started)

    assert (pruned.completed, pruned.ended, pruned.failures) == (0, 1, 1), "bob's failure alone"
    again = run.but(lease="again")
    assert [(await again.claim(key)).state for key in (old, own, failed)] == ["completed", "completed", "failed"]
    assert [await books.state(key) for key in (given_back, before)] == ["released", ""]
    newer = bob.but(lease="newer", run=new_run(), started_at=time.time() + 1)
    assert (await newer.claim(old, only_cached=True)).state == "absent", "it serves no run that starts now"
    assert (await newer.claim(own, confirm=True)).dispatch == 2
    await newer.complete(own, dispatch=2)

    finished = await prune(operating, DAY)

    assert (finished.completed, finished.ended) == (1, 2)
    assert [await books.state(key) for key in (old, own, failed, given_back)] == ["", "completed", "", ""]
    assert (await newer.claim(own, only_cached=True)).state == "completed"


async def test_a_retired_output_that_is_made_anew_serves_again(ann: Caller, bob: Caller, key: bytes, operating: Operating, store: Store) -> None:
    store.clock_offset = -2 * DAY
    await ann.claim(key, confirm=True)
    await ann.complete(key)
    store.clock_offset = 0.0
    await prune(operating, DAY, oldest_run=0.0)
    newer = bob.but(started_at=time.time() + 1)
    await newer.claim(key, confirm=True)
    await newer.complete(key, dispatch=2)

    assert (await ann.but(lease="later", started_at=time.time() + 2).claim(key, only_cached=True)).state == "completed"


async def test_an_expired_lease_is_no_receipt_to_forget(ann: Caller, key: bytes, operating: Operating, store: Store, books: Books) -> None:
    store.clock_offset = -2 * DAY - RUNNING
    await ann.claim(key, confirm=True, **PAID_FOR_ONCE)
    store.clock_offset = 0.0

    await prune(operating, DAY)

    assert await books.state(key) == "running"
