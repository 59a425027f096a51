"""Claims whose gateway died before it heard of them: no charge without a dispatch is left standing (SPEC 4.7)."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from tests.e2e.gaps.gap import DyingProcess, Gap

from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.budgets import Limits
from rowmill_contracts.digests import shard_of
from rowmill_contracts.receipts import HaltRun, RunHalted
from rowmill_contracts.tools import CallItem, ToolCalls
from rowmill_contracts.topology import RECEIPTS_SETTLE, gateway_calls
from rowmill_receipt_store.app import App
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_receipt_store.store import Store
from rowmill_receipt_store.sweeping import Sweep

from .conftest import QUEUED, Books, Caller, new_key, new_keys, new_run

pytestmark = pytest.mark.servers

COST = Decimal("0.01")


@pytest.fixture
def sweep(database: Database) -> Sweep:
    return Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=100_000)


async def looked(sweep: Sweep, store: Store, seconds: float) -> int:
    """Look, so many seconds from now."""
    store.clock_offset += seconds
    sweep.clock_offset = store.clock_offset
    return await sweep.look()


async def test_a_claim_that_nobody_will_send_is_released_and_refunded(ann: Caller, store: Store, sweep: Sweep, books: Books, key: bytes) -> None:
    await ann.decided("resume", budget=COST, decision=1)
    await ann.claim(key, cost=COST)
    await looked(sweep, store, 1.9 * QUEUED)
    assert await books.charged(ann.run) == COST

    assert await looked(sweep, store, 0.2 * QUEUED) == 1

    assert (await books.charged(ann.run), await books.charges(ann.run), await books.state(key)) == (Decimal(0), [], "released")
    assert await books.balanced(ann.run)
    assert (await ann.confirm(key)).state == "lost"
    assert (await ann.but(lease="another").claim(new_key(), cost=COST)).state == "granted"
    assert await looked(sweep, store, 0) == 0


async def test_calls_and_retries_are_given_back_too(ann: Caller, store: Store, sweep: Sweep, books: Books) -> None:
    await ann.decided("resume", budget=Limits(calls=2, retries=2), decision=1)
    keys = new_keys(2)
    await ann.claims(keys)
    assert await books.counted(ann.run) == (2, 0)
    await looked(sweep, store, 3 * QUEUED)
    assert await books.counted(ann.run) == (0, 0)
    assert await books.balanced(ann.run)


async def test_what_may_have_been_sent_and_what_lives_stays_charged(ann: Caller, store: Store, sweep: Sweep, books: Books) -> None:
    await ann.halt("resume", "1")
    sent, unknown, done, failed = keys = new_keys(4)
    await ann.claims(keys, cost=COST, effect="non_idempotent")
    for one in keys:
        await ann.confirm(one)
    await ann.fail(unknown, becomes="outcome_unknown")
    await ann.complete(done, cost="0.01")
    await ann.fail(failed)
    store.clock_offset += 10 * QUEUED
    living = new_key()
    await ann.claim(living, cost=COST)

    await looked(sweep, store, 0)

    assert await books.charged(ann.run) == 5 * COST
    states = [await books.state(one) for one in (sent, unknown, done, failed, living)]
    assert states == ["running", "outcome_unknown", "completed", "failed", "queued"]


async def test_a_look_gives_all_back_page_by_page(ann: Caller, store: Store, database: Database, books: Books) -> None:
    await ann.halt("resume", "1")
    await ann.claims(new_keys(7), cost=COST)
    sweep = Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=2)
    assert [await looked(sweep, store, 3 * QUEUED) for _ in range(2)] == [7, 0]
    assert await books.charged(ann.run) == 0


async def test_claims_that_are_over_for_a_moment_take_no_place_of_those_that_nobody_will_send(ann: Caller, store: Store, database: Database) -> None:
    first, second, orphan = sorted(new_keys(3))
    await ann.halt("resume", "1")
    await ann.claim(orphan, cost=COST)
    store.clock_offset += QUEUED
    await ann.claims([first, second], cost=COST)
    sweep = Sweep(database, SystemClock(), interval=1000, patience=QUEUED, page=2)
    assert [await looked(sweep, store, after) for after in (1.5 * QUEUED, QUEUED)] == [1, 2]


async def test_what_others_have_in_hand_is_left_for_the_next_look(ann: Caller, store: Store, sweep: Sweep, database: Database) -> None:
    keys = new_keys(2)
    await ann.claims(keys, cost=COST)
    async with asyncio.timeout(20), database.pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT FROM receipts WHERE key = $1 FOR UPDATE", keys[0])
        assert await looked(sweep, store, 3 * QUEUED) == 1
    assert await looked(sweep, store, 0) == 1


async def test_looking_beside_claims_confirmations_and_releases_keeps_the_account(ann: Caller, store: Store, sweep: Sweep, books: Books) -> None:
    """Whoever comes first, each reservation is given back once."""
    await ann.halt("resume", "100")
    keys = new_keys(40)
    for _ in range(10):
        await ann.claims(keys, cost=COST)
        store.clock_offset += 3 * QUEUED
        sweep.clock_offset = store.clock_offset
        bob = ann.but(lease=f"bob-{secrets.token_hex(4)}")
        await asyncio.gather(
            sweep.look(),
            bob.claims(keys[:20], cost=COST),
            ann.receipts.confirm([ann.held(key) for key in keys[10:30]]),
            ann.receipts.release([ann.held(key) for key in keys[25:]]),
            sweep.look(),
        )
        assert await books.balanced(ann.run)
        for key in keys:
            await ann.release(key)
            await bob.release(key)
        ann = bob.but(lease=f"ann-{secrets.token_hex(4)}")
        assert await books.charged(ann.run) == 0


# ---- a gateway that dies exactly there ----------------------------------------------------------------------------------------------------

SCALE = 0.05
TOOLS = """
from decimal import Decimal
from pydantic import BaseModel
from rowmill import Provider, ToolCall

class Given(BaseModel):
    number: int

mill = Provider("mill", base_url="https://mill.example", concurrency=50)

@mill.tool("pay", effect="non_idempotent", cost=Decimal("0.01"))
async def pay(given: Given, call: ToolCall) -> int:
    raise AssertionError("nothing may be sent")
"""


@pytest.fixture
async def app(broker_url: str, database_url: str) -> AsyncIterator[App]:
    app = App(ReceiptStoreSettings(broker_url=broker_url, database_url=database_url, time_scale=SCALE, sweep_interval=4.0, shard_lease=120.0))
    await app.start()
    yield app
    await app.stop()


async def test_a_gateway_that_dies_before_it_hears_of_its_claims_leaves_no_charge(
    app: App, broker_url: str, database_url: str, database: Database, books: Books, tmp_path: Path
) -> None:
    (tmp_path / "tools_of_the_dead.py").write_text(TOOLS)
    (tmp_path / "rowmill.toml").write_text('plays = ["tools_of_the_dead"]\ntools = ["tools_of_the_dead"]\n')
    environment = {
        **os.environ,
        "ROWMILL_BROKER_URL": broker_url,
        "ROWMILL_DATABASE_URL": database_url,
        "ROWMILL_PROJECT": str(tmp_path),
        "ROWMILL_TIME_SCALE": str(SCALE),
        "ROWMILL_HAND": "200",  # a busy machine neither sends the calls away nor loses the shard before they are claimed
        "ROWMILL_LOOK_AFTER": "200",
    }
    gap = Gap(service="tool-gateway", message="ClaimReceipts", when="after", repaired_by="the sweep")
    gateway = DyingProcess(gap, environment, tmp_path / "gateway.log")
    run = new_run()
    gateway.start()
    try:
        async with Bus(ServiceSettings(broker_url=broker_url), service="executor") as bus, asyncio.timeout(60):
            await bus.ask(HaltRun(run_id=run, action="resume", budget=Decimal(1), decision=1), RECEIPTS_SETTLE, RunHalted)
            items = [_call(number) for number in range(20)]
            message = ToolCalls(run_id=run, org="acme", play="paying", started_at=time.time(), calls=items)
            await bus.publish(message, gateway_calls(shard_of("acme", "mill")), reply_to=bus.reply_to)
            while gateway.exit_status is None:
                await asyncio.sleep(0.01)
            while {record["state"] for record in await database.fetch("SELECT state FROM receipts WHERE run_id = $1", run)} != {"released"}:
                await asyncio.sleep(0.05)
    finally:
        if gateway.exit_status is None:
            gateway.signal(signal.SIGKILL)
    assert await books.charges(run) == []
    assert await books.balanced(run)


def _call(number: int) -> CallItem:
    encoded = canonical({"number": number})
    key = receipt_key("acme", secrets.token_hex(4), "mill.pay", "1", encoded, "")
    return CallItem(call_id=f"call-{number}", tool="mill.pay", receipt_key=key, input=msgspec.Raw(encoded), row=f"items/{number}")
