"""Deaths of gateways, counted on the receipts that they had in hand, in the tables."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.receipts import GetReceipt
from rowmill_receipt_store.deaths import USUAL
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.operator_store import OperatorStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Store

from .conftest import RUNNING, Books, Caller

pytestmark = pytest.mark.servers


class Mortal:
    """A call whose gateways die, one after the other."""

    def __init__(self, caller: Caller, store: Store, key: bytes) -> None:
        self.caller = caller.but(counts_deaths=True)
        self.store = store
        self.key = key
        self.sent = 0

    async def claim(self) -> str:
        """Ask for it under a lease of its own: as it was answered, or `suspect`."""
        self.caller = self.caller.but(lease=f"{self.caller.lease}+")
        answer = await self.caller.claim(self.key, confirm=True)
        assert answer.alone == (answer.state == "granted" and not answer.dispatch)
        return "suspect" if answer.alone else answer.state

    async def dies(self, *, alone: bool) -> str:
        """Its gateway sends it and dies: how it is answered then, at its next claim."""
        if alone:
            assert (await self.caller.confirm(self.key, alone=True)).state == "confirmed"
        self.sent += 1
        self.store.clock_offset += RUNNING + 1
        return await self.claim()


async def test_a_call_that_ends_its_gateways_is_condemned_and_shown(
    ann: Caller, store: Store, database: Database, receipts: Receipts, key: bytes, books: Books
) -> None:
    await ann.halt("resume", "1")
    ann = ann.but(cost=Decimal("0.01"))
    call = Mortal(ann, store, key)
    assert await call.claim() == "granted"
    while (answer := await call.dies(alone=call.sent >= USUAL.suspected_after)) != "failed":
        assert answer == ("suspect" if call.sent >= USUAL.suspected_after else "granted")
    assert call.sent == USUAL.suspected_after + USUAL.deaths_alone

    assert await books.state(key) == "failed"
    assert await books.charged(ann.run) == Decimal("0.01") * call.sent
    assert await books.balanced(ann.run)
    again = await ann.but(lease="another").claim(key, confirm=True)
    assert again.state == "failed"
    assert again.failure is not None
    assert again.failure.code == "poison"
    shown = await Operating(OperatorStore(database), receipts).shown(GetReceipt(receipt=key.hex()[:16]))
    assert shown.receipt is not None
    assert (shown.receipt.state, shown.receipt.deaths, shown.receipt.failure) == ("failed", call.sent, again.failure)


async def test_who_is_merely_there_is_never_condemned_and_begins_anew_after_an_outcome(
    ann: Caller, store: Store, key: bytes, database: Database
) -> None:
    call = Mortal(ann, store, key)
    await call.claim()
    for _ in range(3 * (USUAL.suspected_after + USUAL.deaths_alone)):
        assert await call.dies(alone=False) in {"granted", "suspect"}
        if call.sent >= USUAL.suspected_after:
            assert (await call.caller.confirm(key)).state == "confirmed"
    row = await database.fetchrow("SELECT deaths, dispatch FROM receipts WHERE key = $1", key)
    assert row is not None
    assert row["deaths"] == USUAL.suspected_after

    assert (await call.caller.fail(key, row["dispatch"], becomes="released")).state == "stored"
    assert await call.claim() == "granted"
    assert await call.dies(alone=False) == "granted"
    assert (await call.caller.complete(key, row["dispatch"] + 2)).state == "stored"
    row = await database.fetchrow("SELECT deaths FROM receipts WHERE key = $1", key)
    assert row is not None
    assert row["deaths"] == 0


async def test_a_suspect_that_others_have_joined_is_alone_no_more(ann: Caller, store: Store, key: bytes, database: Database) -> None:
    call = Mortal(ann, store, key)
    await call.claim()
    for _ in range(USUAL.suspected_after):
        await call.dies(alone=False)
    for _ in range(2 * USUAL.deaths_alone):
        confirmed = await call.caller.confirm(key, alone=True)
        assert await call.caller.confirm(key) == confirmed
        assert await call.dies(alone=False) == "suspect"


async def test_the_run_that_sent_it_last_is_told_too(ann: Caller, bob: Caller, store: Store, key: bytes) -> None:
    call = Mortal(ann, store, key)
    await call.claim()
    for _ in range(USUAL.suspected_after + USUAL.deaths_alone - 1):
        await call.dies(alone=call.sent >= USUAL.suspected_after)
    call.caller = bob.but(counts_deaths=True)
    lease = await _lease_of(store, key)
    assert (await ann.but(lease=lease).confirm(key, alone=True)).state == "confirmed"
    store.clock_offset += RUNNING + 1
    assert await call.claim() == "failed"
    assert (await ann.but(lease="another").claim(key)).state == "failed"


async def _lease_of(store: Store, key: bytes) -> str:
    row = await store._database.fetchrow("SELECT lease_id FROM receipts WHERE key = $1", key)
    assert row is not None
    return str(row["lease_id"])
