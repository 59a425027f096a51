"""Calls through the engine: each answered once, under one receipt, and what failures lead to."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import FindIn, FindOut, Hold, Rig, answering, find_tool, in_turn, lost, raw_of

from rowmill import Batch, Bearer, HttpTool, Provider, secret
from rowmill_contracts.shards import LeaseShard
from rowmill_tool_gateway.flights import Flight
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings


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
    provider = Hold(rig)
    first = rig.item(find, {"domain": "a.example"})
    rig.hand_in([first])
    while not rig.port.requests:
        await asyncio.sleep(0)
    second = msgspec.structs.replace(first, call_id="again")
    rig.hand_in([second])
    provider.answer()
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


async def test_a_leg_of_a_waterfall_waits_for_its_turn_at_a_provider_that_is_closed_for_a_moment(rig: Rig) -> None:
    """However many stand before it: one refusal must not send hundreds of calls to the next provider, which may cost more."""
    find = find_tool(rate="1/s")
    rig.port.script = answering({}, status=429, Retry_After="2")
    now = rig.clock.now()
    await rig.ask([rig.item(find, {"domain": "first.example"}, asked=now, max_wait=60.0)])
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}, asked=now, max_wait=60.0) for n in range(200)])
    assert {outcome.outcome for outcome in outcomes} == {"deferred"}
    waits = [outcome.wait_ms / 1000 for outcome in outcomes]
    assert max(waits) <= 60.0, "and is asked for again when it is to be given up, should the provider not serve by then"
    assert sum(wait > 50.0 for wait in waits) > 100


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
    assert refused.failure.message.endswith(' is refused too"} (sent: secret KEY as Authorization: Bearer)')
    await rig.stop()


async def test_of_a_call_that_is_refused_it_is_said_that_its_provider_has_no_auth(rig: Rig) -> None:
    rig.port.script = answering({"error": "who?"}, status=401)
    [refused] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert refused.failure is not None
    assert refused.failure.message.endswith("(its provider has no auth=)")


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
