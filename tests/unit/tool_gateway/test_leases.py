"""The leases that a call is sent under, its shard's and its receipt's: nothing is sent without them, and what was sent keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal

import pytest
from tests.unit.tool_gateway.conftest import Hold, Rig, answering, find_tool, raw_of

from rowmill_contracts.receipts import ClaimReceipts, Complete, HaltRun
from rowmill_contracts.shards import LeaseShard
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings


async def test_without_the_shards_lease_nothing_is_sent_and_calls_are_deferred(settings: ToolGatewaySettings) -> None:
    rig = Rig(settings)
    find = find_tool()
    rig.store.answer(LeaseShard(holder="another", shards=list(range(16))))
    for shard in rig.store.shards.values():
        shard.expires += 3600
    [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert outcome.outcome == "deferred"
    assert not rig.port.requests
    assert not all(rig.engine.shards.may_take(shard) for shard in range(16)), "suspect calls are left to who has the shard"
    rig.store.answer(LeaseShard(holder="another", shards=list(range(16)), release=True))
    [later] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert later.outcome == "completed"
    assert all(rig.engine.shards.may_take(shard) for shard in range(16))
    await rig.stop()


async def test_what_was_claimed_is_not_sent_once_the_shards_lease_has_lapsed(settings: ToolGatewaySettings) -> None:
    """The claim was granted under a lease that held then; the right to spend is looked at again before each request."""
    rig = Rig(settings.model_copy(update={"claim_ahead": 10.0, "hand": 60.0}))
    provider = Hold(rig)
    find = find_tool(concurrency=1)
    first, second = rig.item(find, {"domain": "a.example"}), rig.item(find, {"domain": "b.example"})
    async with asyncio.timeout(10):
        rig.hand_in([first, second])
        while rig.bus.claims < 2 or not rig.port.requests:
            await asyncio.sleep(0)
        rig.bus.silent.add(LeaseShard)
        for lease in rig.engine.shards._leases.values():
            lease.until = float("-inf")
        provider.answer()
        assert (await rig.bus.outcome(first.call_id)).outcome == "completed"
        for _ in range(100):
            await asyncio.sleep(0)
    assert len(rig.port.requests) == 1
    await rig.stop()


async def connecting(rig: Rig, meanwhile: Callable[[], None]) -> None:
    """Let the first connection stand only when ``meanwhile`` has happened."""

    async def connect() -> None:
        rig.port.connect = None
        while not rig.store.receipts or {receipt.state for receipt in rig.store.receipts.values()} - {"running"}:
            await asyncio.sleep(0)
        meanwhile()

    rig.port.connect = connect


@pytest.mark.parametrize("effect", ["read", "non_idempotent"])
async def test_a_lease_that_lapses_while_the_connection_opens_leaves_the_call_unsent_and_uncharged(rig: Rig, effect: str) -> None:
    """Another gateway may have taken the shard meanwhile: what is not written by then must not be."""
    find = find_tool(effect=effect)
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))

    def taken_by_another() -> None:
        for shard in rig.store.shards.values():
            shard.expires = 0.0
        rig.store.answer(LeaseShard(holder="another", shards=list(rig.store.shards)))
        for lease in rig.engine.shards._leases.values():
            lease.until = float("-inf")

    await connecting(rig, taken_by_another)
    [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert outcome.outcome == "deferred"
    assert rig.port.requests == []
    assert [receipt.state for receipt in rig.store.receipts.values()] == ["released"]
    assert rig.store.runs["run-1"].charged() == 0


async def test_shards_are_given_up_under_the_term_that_they_were_held_under(rig: Rig) -> None:
    await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    held = {number: lease.term for number, lease in rig.store.shards.items()}
    await rig.engine.shards.release()

    [given_up] = [request for request in rig.bus.asked if isinstance(request, LeaseShard) and request.release]
    assert held
    assert dict(zip(given_up.shards, given_up.terms, strict=True)) == held


async def test_a_shard_that_was_lost_and_regained_meanwhile_is_not_the_one_that_was_claimed_under(rig: Rig) -> None:
    def lost_and_regained() -> None:
        shards = list(rig.store.shards)
        rig.store.answer(LeaseShard(holder=rig.holder, shards=shards, release=True))
        rig.store.answer(LeaseShard(holder="another", shards=shards))
        rig.store.answer(LeaseShard(holder="another", shards=shards, release=True))
        rig.store.answer(LeaseShard(holder=rig.holder, shards=shards))
        for number, lease in rig.engine.shards._leases.items():
            lease.term = rig.store.shards[number].term

    await connecting(rig, lost_and_regained)
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert [receipt.dispatch for receipt in rig.store.receipts.values()] == [2], "claimed anew under the new term"
    assert len(rig.port.requests) == 1


@pytest.mark.parametrize("effect", ["read", "non_idempotent"])
async def test_a_receipt_lease_that_is_lost_before_the_request_is_written_aborts_it(effect: str) -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, receipt_renewal=0.2))
    aborting = asyncio.Event()

    def theirs() -> None:
        for receipt in rig.store.receipts.values():
            receipt.lease_id, receipt.dispatch, receipt.state = "another's", receipt.dispatch + 1, "running"

    async def connect() -> None:
        rig.port.connect = None
        while not rig.store.receipts or {receipt.state for receipt in rig.store.receipts.values()} - {"running"}:
            await asyncio.sleep(0)
        theirs()
        async with asyncio.timeout(10):
            while not any(flight.lost for flight in rig.engine.hand.flights.values()):
                await asyncio.sleep(0)
        aborting.set()

    rig.port.connect = connect
    [outcome] = await rig.ask([rig.item(find_tool(effect=effect), {"domain": "a.example"})])
    assert aborting.is_set()
    assert outcome.outcome == "deferred", "it waits for the other holder's result"
    assert rig.port.requests == []
    assert [receipt.lease_id for receipt in rig.store.receipts.values()] == ["another's"]
    await rig.stop()


async def test_a_receipt_lease_that_is_lost_after_the_request_was_sent_lets_its_result_serve_the_row_alone() -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, receipt_renewal=0.2))
    lost = asyncio.Event()

    async def answered_when_lost(request: HttpRequest) -> HttpResponse:
        [receipt] = rig.store.receipts.values()
        receipt.lease_id, receipt.dispatch = "another's", receipt.dispatch + 1
        async with asyncio.timeout(10):
            while not any(flight.lost for flight in rig.engine.hand.flights.values()):
                await asyncio.sleep(0)
        lost.set()
        return await answering({"email": "late"})(request)

    rig.port.script = answered_when_lost
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert lost.is_set()
    assert (outcome.outcome, raw_of(outcome)["email"]) == ("completed", "late")
    [receipt] = rig.store.receipts.values()
    assert (receipt.state, receipt.lease_id, receipt.output) == ("running", "another's", None)
    await rig.stop()


async def test_a_refused_term_stops_spending_until_the_shard_is_leased_anew(rig: Rig) -> None:
    find = find_tool()
    await rig.ask([rig.item(find, {"domain": "a.example"})])
    for shard in rig.store.shards.values():
        shard.term += 1
    [outcome] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert outcome.outcome == "completed"


async def test_a_result_that_cannot_be_stored_stops_all_dispatch_until_it_can(rig: Rig) -> None:
    find = find_tool()
    rig.bus.silent = {Complete}
    first = rig.item(find, {"domain": "a.example"})
    rig.hand_in([first])
    while not any(isinstance(request, Complete) for request in rig.bus.asked):
        await asyncio.sleep(0)
    [blocked] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert blocked.outcome == "deferred"
    assert len(rig.port.requests) == 1
    assert rig.engine.dispatcher.prevented == 1
    rig.bus.silent = set()
    assert (await rig.bus.outcome(first.call_id)).outcome == "completed"
    [later] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert later.outcome == "completed"


async def test_an_unanswered_claim_defers_and_the_same_lease_is_found_again(rig: Rig) -> None:
    find = find_tool()
    rig.bus.silent = {ClaimReceipts}
    [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert outcome.outcome == "deferred"
    rig.bus.silent = set()
    [later] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert later.outcome == "completed"
    assert len(rig.port.requests) == 1


async def test_another_holders_call_is_waited_for_and_its_result_shared(settings: ToolGatewaySettings, rig: Rig) -> None:
    find = find_tool()
    other = Rig(settings, store=rig.store)
    provider = Hold(rig)
    first = rig.item(find, {"domain": "a.example"})
    rig.hand_in([first])
    while not rig.port.requests:
        await asyncio.sleep(0)
    [receipt] = rig.store.receipts.values()
    receipt.shard = None  # as if the other gateway had another shard: the term is not what is looked at here
    for shard in rig.store.shards.values():
        shard.holder = ""
    second = other.item(find, {"domain": "a.example"})
    other.hand_in([second], run="run-2")
    while not other.bus.claims:
        await asyncio.sleep(0)
    provider.answer()
    assert (await rig.bus.outcome(first.call_id)).execution == "live"
    shared = await other.bus.outcome(second.call_id)
    assert (shared.outcome, shared.execution) == ("completed", "cache")
    assert not other.port.requests
    await other.stop()


async def test_stopping_gives_unsent_claims_back_and_defers_their_calls(settings: ToolGatewaySettings) -> None:
    rig = Rig(settings)
    provider = Hold(rig)
    find = find_tool(concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)]
    rig.hand_in(items)
    while not rig.port.requests:
        await asyncio.sleep(0)
    stopping = asyncio.ensure_future(rig.stop())
    deferred = [await rig.bus.outcome(item.call_id) for item in items[1:]]
    assert [outcome.outcome for outcome in deferred] == ["deferred", "deferred"]
    provider.answer()
    await stopping
    assert (await rig.bus.outcome(items[0].call_id)).outcome == "completed"
    assert not {receipt.state for receipt in rig.store.receipts.values()} & {"queued", "running"}
    assert not [shard for shard in rig.store.shards.values() if shard.holder]


async def test_a_call_that_outlives_its_page_is_carried_by_its_lease() -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, in_flight_hold=6.0))
    provider = Hold(rig)
    find = find_tool()
    started = rig.clock.now()
    [parked] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert (parked.outcome, parked.wait_ms) == ("deferred", 3000)
    while rig.engine.hand.pages:
        await asyncio.sleep(0)
    again = rig.item(find, {"domain": "a.example"})
    rig.hand_in([again], started_at=started)
    provider.answer()
    assert (await rig.bus.outcome(again.call_id)).execution == "live"
    assert len(rig.port.requests) == 1
    await rig.stop()


async def test_leases_of_calls_in_hand_are_renewed() -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, receipt_renewal=0.5))
    provider = Hold(rig)
    item = rig.item(find_tool(), {"domain": "a.example"})
    rig.hand_in([item])
    while not rig.store.receipts:
        await asyncio.sleep(0)
    [receipt] = rig.store.receipts.values()
    first = receipt.expires
    while receipt.expires == first:
        await asyncio.sleep(0)
    provider.answer()
    assert (await rig.bus.outcome(item.call_id)).outcome == "completed"
    await rig.stop()
