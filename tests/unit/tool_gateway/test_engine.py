"""Calls through the engine: each answered once, under one receipt, and what failures lead to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import FindIn, FindOut, Rig, answering, in_turn

from rowmill import Batch, Bearer, HttpTool, Provider, secret
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.events import Control
from rowmill_contracts.receipts import ClaimReceipts, Complete, HaltRun
from rowmill_contracts.shards import LeaseShard
from rowmill_contracts.tools import CallOutcome
from rowmill_tool_gateway.flights import Flight
from rowmill_tool_gateway.handlers import Handlers
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings


def find_tool(*, effect: str = "read", **options: Any) -> Any:
    provider_options = {name: options.pop(name) for name in ("rate", "burst", "concurrency") if name in options}
    provider = Provider("hunter", base_url="http://127.0.0.1:1", **provider_options)

    @provider.post("/v2/find", effect=effect, cost=Decimal("0.01"), **options)  # type: ignore[arg-type]
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    return Find


def raw_of(outcome: CallOutcome) -> Any:
    return msgspec.json.decode(outcome.result)["raw"]


async def lost(_: HttpRequest) -> HttpResponse:
    raise NoResponse("no_answer", "the connection was lost")


async def test_a_call_is_claimed_sent_stored_and_answered(rig: Rig) -> None:
    find = find_tool()
    [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert (outcome.outcome, outcome.execution, outcome.cost) == ("completed", "live", Decimal("0.01"))
    assert msgspec.json.decode(outcome.result) == {"raw": {"email": "a@example"}, "meta": {"http_status": 200}}
    [request] = rig.port.requests
    assert (request.method, request.url, request.body) == ("POST", "http://127.0.0.1:1/v2/find", b'{"domain":"a.example"}')
    assert [receipt.state for receipt in rig.store.receipts.values()] == ["completed"]


async def test_a_stored_output_answers_without_a_request(rig: Rig) -> None:
    find = find_tool()
    await rig.ask([rig.item(find, {"domain": "a.example"}, row="leads/1")])
    [cached] = await rig.ask([rig.item(find, {"domain": "a.example"}, row="leads/9")], run="run-2")
    assert (cached.outcome, cached.execution, cached.cost) == ("completed", "cache", Decimal(0))
    assert len(rig.port.requests) == 1


async def test_who_paid_is_live_again_when_asked_again(rig: Rig) -> None:
    find = find_tool()
    started = rig.clock.now()
    await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    [again] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert (again.execution, again.cost) == ("live", Decimal("0.01"))
    assert len(rig.port.requests) == 1


async def test_equal_calls_share_one_request(rig: Rig) -> None:
    find = find_tool()
    items = [rig.item(find, {"domain": "a.example"}, row=f"leads/{n}") for n in range(5)]
    outcomes = await rig.ask(items)
    assert [outcome.execution for outcome in outcomes] == ["live", *["in_flight"] * 4]
    assert len(rig.port.requests) == 1


async def test_a_repeated_page_joins_the_one_in_hand(rig: Rig) -> None:
    find = find_tool()
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a@example"})(request)

    rig.port.script = held
    first = rig.item(find, {"domain": "a.example"})
    rig.hand_in([first])
    while not rig.port.requests:
        await asyncio.sleep(0)
    second = msgspec.structs.replace(first, call_id="again")
    rig.hand_in([second])
    flowing.set()
    outcomes = [await rig.bus.outcome(first.call_id), await rig.bus.outcome("again")]
    assert [outcome.execution for outcome in outcomes] == ["live", "live"]
    assert len(rig.port.requests) == 1


async def test_null_extractors_are_no_result(rig: Rig) -> None:
    rig.port.script = answering({"email": None})
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "no_result"


async def test_a_listed_status_is_no_result_whatever_its_body(rig: Rig) -> None:
    rig.port.script = answering(["nothing here"], status=404)
    [outcome] = await rig.ask([rig.item(find_tool(no_result=[404]), {"domain": "a.example"})])
    assert outcome.outcome == "no_result"
    assert msgspec.json.decode(outcome.result) == {"raw": ["nothing here"], "data": None, "meta": {"http_status": 404}}


async def test_batches_carry_many_calls_in_order(rig: Rig) -> None:
    find = find_tool(batch=Batch(50, path="/v2/bulk", items="items", results="data.results"))
    rig.port.script = answering(lambda body: {"data": {"results": [{"email": f"x@{item['domain']}"} for item in body["items"]]}})
    items = [rig.item(find, {"domain": f"d{n}.example"}, row=f"leads/{n}") for n in range(120)]
    outcomes = await rig.ask(items)
    assert [raw_of(outcome)["email"] for outcome in outcomes] == [f"x@d{n}.example" for n in range(120)]
    assert [len(msgspec.json.decode(request.body or b"")["items"]) for request in rig.port.requests] == [50, 50, 20]
    assert {request.url for request in rig.port.requests} == {"http://127.0.0.1:1/v2/bulk"}


async def test_a_batch_with_another_number_of_results_fails_all_its_calls(rig: Rig) -> None:
    find = find_tool(batch=Batch(50, path="/v2/bulk", items="items", results="results"))
    rig.port.script = answering({"results": [{"email": "x"}]})
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)])
    assert {(outcome.outcome, outcome.failure.code if outcome.failure else "") for outcome in outcomes} == {("failed", "result_count")}


async def test_an_idempotent_batch_carries_a_key_per_item_also_when_repeated(rig: Rig) -> None:
    find = find_tool(effect="idempotent", batch=Batch(50, path="/v2/bulk", items="items", results="results", item_key="key"))
    fine = answering(lambda body: {"results": [{"email": item["domain"]} for item in body["items"]]})
    rig.port.script = in_turn(answering({}, status=500), fine)
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)])
    assert [outcome.outcome for outcome in outcomes] == ["completed"] * 3
    keys = [{item["domain"]: item["key"] for item in msgspec.json.decode(request.body or b"")["items"]} for request in rig.port.requests]
    first, *again = keys  # retries are jittered, so the items may come again in more than one request
    assert {domain: key for page in again for domain, key in page.items()} == first
    assert len(set(first.values())) == 3


async def test_results_are_matched_by_id_where_they_carry_one(rig: Rig) -> None:
    find = find_tool(batch=Batch(50, path="/v2/bulk", items="items", results="results", id_field="domain"))
    rig.port.script = answering(
        lambda body: {"results": [{"domain": item["domain"], "email": item["domain"]} for item in reversed(body["items"][1:])]}
    )
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)])
    assert [outcome.outcome for outcome in outcomes] == ["failed", "completed", "completed"]
    assert [raw_of(outcome)["email"] for outcome in outcomes[1:]] == ["d1.example", "d2.example"]


async def test_a_5xx_is_retried_under_the_same_idempotency_key(rig: Rig) -> None:
    rig.port.script = in_turn(answering({}, status=500), answering({}, status=503), answering({"email": "a"}))
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert len({request.headers["Idempotency-Key"] for request in rig.port.requests}) == 1
    assert len(rig.port.requests) == 3


async def test_a_call_fails_after_five_attempts_and_stays_failed_for_its_run_alone(rig: Rig) -> None:
    find = find_tool()
    rig.port.script = answering({}, status=500)
    started = rig.clock.now()
    [first] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert first.outcome == "failed"
    assert first.failure is not None
    assert (first.failure.code, first.failure.status) == ("http_500", 500)
    assert len(rig.port.requests) == 5
    [again] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert again.outcome == "failed"
    assert len(rig.port.requests) == 5
    rig.port.script = answering({"email": "a"})
    [other] = await rig.ask([rig.item(find, {"domain": "a.example"})], run="run-2")
    assert other.outcome == "completed"


@pytest.mark.parametrize(
    ("effect", "outcome", "requests"), [("read", "completed", 2), ("idempotent", "completed", 2), ("non_idempotent", "unknown", 1)]
)
async def test_a_lost_answer_is_repeated_only_where_the_effect_allows(rig: Rig, effect: str, outcome: str, requests: int) -> None:
    find = find_tool(effect=effect)
    rig.port.script = in_turn(lost, answering({"email": "a"}))
    started = rig.clock.now()
    [ended] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert ended.outcome == outcome
    assert len(rig.port.requests) == requests
    if outcome == "unknown":
        [other] = await rig.ask([rig.item(find, {"domain": "a.example"})], run="run-2")
        assert other.outcome == "unknown"
        assert len(rig.port.requests) == requests


async def test_a_non_idempotent_call_is_confirmed_right_before_it_is_sent_on_a_new_connection(rig: Rig) -> None:
    [outcome] = await rig.ask([rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert rig.port.requests[0].fresh
    kinds = [type(request).__name__ for request in rig.bus.asked if not isinstance(request, LeaseShard)]
    assert kinds == ["ClaimReceipts", "Confirm", "Complete"]


async def test_a_429_defers_until_the_provider_said_and_gives_the_receipt_back_uncharged(rig: Rig) -> None:
    find = find_tool()
    rig.port.script = answering({}, status=429, Retry_After="7")
    [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert outcome.outcome == "deferred"
    assert 7000 <= outcome.wait_ms < 8000
    [receipt] = rig.store.receipts.values()
    assert receipt.state == "released"
    assert rig.store.runs["run-1"].charged() == 0
    [other] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert other.outcome == "deferred"
    assert len(rig.port.requests) == 1


async def test_a_closed_lane_still_answers_what_is_stored(rig: Rig) -> None:
    find = find_tool()
    await rig.ask([rig.item(find, {"domain": "a.example"})])
    rig.port.script = answering({}, status=429, Retry_After="60")
    await rig.ask([rig.item(find, {"domain": "b.example"})])
    [cached] = await rig.ask([rig.item(find, {"domain": "a.example"}, row="leads/7")], run="run-2")
    assert (cached.outcome, cached.execution) == ("completed", "cache")


async def test_a_wait_beyond_what_the_tool_allows_fails_at_once(rig: Rig) -> None:
    rig.port.script = answering({}, status=429, Retry_After="7200")
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"}, asked=rig.clock.now())])
    assert outcome.outcome == "failed"
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.failure.category) == ("provider_unavailable", "unavailable")


async def test_a_leg_of_a_waterfall_gives_up_on_a_provider_that_does_not_serve(rig: Rig) -> None:
    find = find_tool()
    rig.port.script = answering({}, status=429, Retry_After="50")
    [early] = await rig.ask([rig.item(find, {"domain": "a.example"}, asked=rig.clock.now() - 3000, max_wait=60.0)])
    assert early.outcome == "deferred"  # it has waited for long, the provider has been away only now
    rig.port.script = answering({}, status=429, Retry_After="61")
    [late] = await rig.ask([rig.item(find, {"domain": "b.example"}, org="other", asked=rig.clock.now(), max_wait=60.0)], org="other")
    assert late.outcome == "failed"


async def test_a_leg_of_a_waterfall_waits_for_its_turn_at_a_provider_that_serves(rig: Rig) -> None:
    find = find_tool(rate="10/s")
    long_ago = rig.clock.now() - 600
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}, asked=long_ago, max_wait=60.0) for n in range(12)])
    assert {outcome.outcome for outcome in outcomes} == {"completed", "deferred"}


async def test_a_402_halts_and_keeps_no_failure(rig: Rig) -> None:
    rig.port.script = answering({"error": "pay"}, status=402)
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert (outcome.outcome, outcome.reason) == ("halted", "payment")
    assert not rig.store.failures


async def test_a_halted_run_spends_nothing_and_its_follower_of_another_run_takes_over(rig: Rig) -> None:
    find = find_tool()
    rig.store.answer(HaltRun(run_id="run-1", action="stop"))
    halted, follower = rig.item(find, {"domain": "a.example"}), rig.item(find, {"domain": "a.example"})
    rig.hand_in([halted], run="run-1")
    rig.hand_in([follower], run="run-2")
    assert (await rig.bus.outcome(halted.call_id)).outcome == "halted"
    taken = await rig.bus.outcome(follower.call_id)
    assert (taken.outcome, taken.execution) == ("completed", "live")
    assert len(rig.port.requests) == 1


async def test_a_spent_budget_halts(rig: Rig) -> None:
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal("0.02")))
    find = find_tool()
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)])
    assert sorted((outcome.outcome, outcome.reason.partition(",")[0]) for outcome in outcomes) == [
        ("completed", ""),
        ("completed", ""),
        ("halted", "budget: money"),
    ]


async def test_a_call_that_cost_more_than_its_tool_said_halts_its_run_and_is_named(rig: Rig) -> None:
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))
    find = find_tool(actual_cost=lambda _: Decimal("0.07"))
    item = rig.item(find, {"domain": "a.example"})
    [first] = await rig.ask([item])
    assert (first.outcome, first.cost) == ("completed", Decimal("0.07"))
    [second] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert (second.outcome, second.reason) == (
        "halted",
        f"budget: money, receipt {item.receipt_key[:12]} cost 0.07, more than the 0.01 reserved for it",
    )
    assert rig.store.runs["run-1"].charged() == Decimal("0.07")


async def test_an_unknown_tool_fails_and_names_the_known_ones(rig: Rig) -> None:
    item = rig.item(find_tool(), {"domain": "a.example"})
    [outcome] = await rig.ask([msgspec.structs.replace(item, tool="hunter.nothing")])
    assert outcome.failure is not None
    assert outcome.failure.code == "unknown_tool"
    assert "hunter.find" in outcome.failure.message


async def test_connections_that_never_open_close_the_lane_and_the_calls_wait(rig: Rig) -> None:
    async def refused(_: HttpRequest) -> HttpResponse:
        raise NoResponse("never_opened", "connection refused")

    rig.port.script = refused
    [outcome] = await rig.ask([rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})])
    assert outcome.outcome == "deferred"
    assert len(rig.port.requests) == 5
    assert rig.store.runs["run-1"].charged() == 0


async def test_forced_calls_go_again_once_per_run(rig: Rig) -> None:
    find = find_tool()
    await rig.ask([rig.item(find, {"domain": "a.example"})])
    started = rig.clock.now()
    [forced] = await rig.ask([rig.item(find, {"domain": "a.example"})], run="run-2", force="tools", started_at=started)
    [again] = await rig.ask([rig.item(find, {"domain": "a.example"})], run="run-2", force="tools", started_at=started)
    assert (forced.execution, again.execution) == ("live", "live")
    assert len(rig.port.requests) == 2
    assert len({request.headers["Idempotency-Key"] for request in rig.port.requests}) == 2


async def test_concurrency_is_never_exceeded(settings: ToolGatewaySettings) -> None:
    open_now = highest = 0

    async def counted(request: HttpRequest) -> HttpResponse:
        nonlocal open_now, highest
        open_now += 1
        highest = max(highest, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return await answering({"email": "a"})(request)

    rig = Rig(settings.model_copy(update={"hand": 60.0}))  # a busy machine sends none of them away
    rig.port.script = counted
    find = find_tool(concurrency=3)
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(40)])
    assert {outcome.outcome for outcome in outcomes} == {"completed"}
    assert highest == 3
    await rig.stop()


async def test_calls_beyond_the_rate_are_deferred_one_appointment_after_the_other(rig: Rig) -> None:
    find = find_tool(rate="10/s")
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(12)])
    waits = [outcome.wait_ms for outcome in outcomes if outcome.outcome == "deferred"]
    assert 8 <= len(waits) <= 11
    assert len(set(waits)) == len(waits)


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
    answer = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await answer.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    find = find_tool(concurrency=1)
    first, second = rig.item(find, {"domain": "a.example"}), rig.item(find, {"domain": "b.example"})
    async with asyncio.timeout(10):
        rig.hand_in([first, second])
        while rig.bus.claims < 2 or not rig.port.requests:
            await asyncio.sleep(0)
        rig.bus.silent.add(LeaseShard)
        for lease in rig.engine.shards._leases.values():
            lease.until = float("-inf")
        answer.set()
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


async def test_secrets_are_resolved_before_anything_is_claimed(settings: ToolGatewaySettings) -> None:
    """A claim may be the confirmation, and a function that fetches a secret may take a minute."""
    asked, given = threading.Event(), threading.Event()

    def fetched() -> str:
        asked.set()
        assert given.wait(10)
        return "the-key-itself"

    rig = Rig(settings)
    provider = Provider("hunter", base_url="http://127.0.0.1:1", auth=Bearer(secret("HUNTER_KEY", function=fetched)))

    @provider.post("/v2/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]): ...

    item = rig.item(Find, {"domain": "a.example"})
    rig.hand_in([item])
    while not asked.is_set():
        await asyncio.sleep(0.001)
    for _ in range(100):
        await asyncio.sleep(0)
    assert rig.bus.claims == 0
    given.set()
    assert (await rig.bus.outcome(item.call_id)).outcome == "completed"
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
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
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
    flowing.set()
    assert (await rig.bus.outcome(first.call_id)).execution == "live"
    shared = await other.bus.outcome(second.call_id)
    assert (shared.outcome, shared.execution) == ("completed", "cache")
    assert not other.port.requests
    await other.stop()


async def test_a_credential_that_is_refused_is_resolved_anew_once() -> None:
    environ = {"KEY": "old-secret-value"}
    rig = Rig(ToolGatewaySettings(time_scale=0.05), environ=environ)
    provider = Provider("hunter", base_url="http://127.0.0.1:1", auth=Bearer(secret("KEY")))

    @provider.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]): ...

    async def picky(request: HttpRequest) -> HttpResponse:
        if request.headers["Authorization"] == "Bearer old-secret-value":
            environ["KEY"] = "new-secret-value"
            return HttpResponse(401, b'{"error": "old-secret-value is no more"}')
        if request.headers["Authorization"] == "Bearer new-secret-value":
            return HttpResponse(200, b'{"email": "new-secret-value@example"}')
        raise AssertionError

    rig.port.script = picky
    [outcome] = await rig.ask([rig.item(Find, {"domain": "a.example"})])
    assert (outcome.outcome, raw_of(outcome)) == ("completed", {"email": "***@example"})
    rig.port.script = answering({"error": "new-secret-value is refused too"}, status=403)
    [refused] = await rig.ask([rig.item(Find, {"domain": "b.example"})])
    assert refused.outcome == "failed"
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.category) == ("http_403", "auth")
    assert "secret-value" not in refused.failure.message
    await rig.stop()


async def test_stopping_gives_unsent_claims_back_and_defers_their_calls(settings: ToolGatewaySettings) -> None:
    rig = Rig(settings)
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    find = find_tool(concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)]
    rig.hand_in(items)
    while not rig.port.requests:
        await asyncio.sleep(0)
    stopping = asyncio.ensure_future(rig.stop())
    deferred = [await rig.bus.outcome(item.call_id) for item in items[1:]]
    assert [outcome.outcome for outcome in deferred] == ["deferred", "deferred"]
    flowing.set()
    await stopping
    assert (await rig.bus.outcome(items[0].call_id)).outcome == "completed"
    assert not {receipt.state for receipt in rig.store.receipts.values()} & {"queued", "running"}
    assert not [shard for shard in rig.store.shards.values() if shard.holder]


async def test_a_call_that_outlives_its_page_is_carried_by_its_lease() -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, in_flight_hold=6.0))
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    find = find_tool()
    started = rig.clock.now()
    [parked] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
    assert (parked.outcome, parked.wait_ms) == ("deferred", 3000)
    while rig.engine.hand.pages:
        await asyncio.sleep(0)
    again = rig.item(find, {"domain": "a.example"})
    rig.hand_in([again], started_at=started)
    flowing.set()
    assert (await rig.bus.outcome(again.call_id)).execution == "live"
    assert len(rig.port.requests) == 1
    await rig.stop()


async def test_leases_of_calls_in_hand_are_renewed() -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, receipt_renewal=0.5))
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    item = rig.item(find_tool(), {"domain": "a.example"})
    rig.hand_in([item])
    while not rig.store.receipts:
        await asyncio.sleep(0)
    [receipt] = rig.store.receipts.values()
    first = receipt.expires
    while receipt.expires == first:
        await asyncio.sleep(0)
    flowing.set()
    assert (await rig.bus.outcome(item.call_id)).outcome == "completed"
    await rig.stop()


async def test_a_hint_that_a_run_stopped_gives_back_what_is_claimed_and_not_sent(rig: Rig) -> None:
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    find = find_tool(concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)]
    rig.hand_in(items)
    while not rig.port.requests or len(rig.store.receipts) < 2:
        await asyncio.sleep(0)
    rig.store.answer(HaltRun(run_id="run-1", action="stop"))
    rig.engine.dispatcher.give_back("run-1", confirmed=True)
    stopped = [await rig.bus.outcome(item.call_id) for item in items[1:]]
    assert [outcome.outcome for outcome in stopped] == ["halted", "halted"]
    flowing.set()
    assert (await rig.bus.outcome(items[0].call_id)).outcome == "completed"
    assert len(rig.port.requests) == 1


@pytest.mark.parametrize(
    ("effect", "reason", "second"),
    [
        ("read", "budget: calls, both are made", "completed"),
        ("non_idempotent", "budget: calls, both are made", "halted"),
        ("read", "budget: wall time, 1 s are over", "halted"),
        ("read", "pause", "halted"),
        ("read", "", "halted"),
    ],
)
async def test_a_spent_budget_leaves_what_was_confirmed_with_its_claim(rig: Rig, effect: str, reason: str, second: str) -> None:
    """Given back, it would be left over in the budget of which the run waits for more. What is only claimed must ask before it is sent. A run that
    waits for anything else sends nothing.
    """
    flowing = asyncio.Event()

    async def held(request: HttpRequest) -> HttpResponse:
        await flowing.wait()
        return await answering({"email": "a"})(request)

    rig.port.script = held
    find = find_tool(effect=effect, concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(2)]
    rig.hand_in(items)
    while not rig.port.requests or len(rig.store.receipts) < 2:
        await asyncio.sleep(0)
    rig.store.answer(HaltRun(run_id="run-1", action="halt", reason=reason))
    hint = Control(run_id="run-1", action="halt", reason=reason)
    await Handlers(rig.engine, rig.bus).control(Delivery(message=hint, body=b"", queue=""))
    flowing.set()
    assert [(await rig.bus.outcome(item.call_id)).outcome for item in items] == ["completed", second]


async def test_a_malformed_receipt_key_fails_its_call_alone(rig: Rig) -> None:
    find = find_tool()
    good = rig.item(find, {"domain": "a.example"})
    bad = msgspec.structs.replace(rig.item(find, {"domain": "b.example"}), receipt_key="not a key")
    outcomes = await rig.ask([bad, good])
    assert [outcome.outcome for outcome in outcomes] == ["failed", "completed"]


async def test_a_call_that_nobody_foresaw_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(ToolGatewaySettings())  # at full size: the traceback's log line takes a while
    find = find_tool()
    bad, good = rig.item(find, {"domain": "a.example"}), rig.item(find, {"domain": "b.example"})
    admit = rig.engine.dispatcher.admit
    calls = iter([True, False])

    def fragile(flight: Flight) -> None:
        if next(calls):
            raise KeyError("a mistake of ours")
        admit(flight)

    monkeypatch.setattr(rig.engine.dispatcher, "admit", fragile)
    outcomes = await rig.ask([bad, good])
    assert [outcome.outcome for outcome in outcomes] == ["failed", "completed"]
    assert not rig.engine.hand.flights
    await rig.stop()
