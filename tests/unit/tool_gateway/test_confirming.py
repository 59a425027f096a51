"""What is confirmed when: by its claim, or right before it is sent, where a budget pays for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal

import pytest
from tests.unit.tool_gateway.conftest import FindIn, FindOut, Hold, Rig, answering, find_tool

from rowmill import Batch, HttpTool, Provider
from rowmill.errors import AskTimeout
from rowmill_contracts.budgets import Budget, Limits
from rowmill_contracts.envelope import Message
from rowmill_contracts.receipts import ClaimReceipts, Confirm, HaltRun, Release
from rowmill_contracts.shards import LeaseShard
from rowmill_receipt_store.charges import taken_reason
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings

BUDGETS = [Decimal(1), Limits(calls=100), Limits(retries=100)]


def budgeted(rig: Rig, budget: Budget) -> None:
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=budget))


def confirms(rig: Rig) -> list[Confirm]:
    return [request for request in rig.bus.asked if isinstance(request, Confirm)]


@pytest.mark.parametrize("budget", BUDGETS, ids=["money", "calls", "retries"])
async def test_a_call_that_a_budget_pays_for_is_confirmed_right_before_it_is_sent(rig: Rig, budget: Budget) -> None:
    budgeted(rig, budget)
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    kinds = [type(request).__name__ for request in rig.bus.asked if not isinstance(request, LeaseShard)]
    assert kinds == ["ClaimReceipts", "Confirm", "Complete"]


@pytest.mark.parametrize("budget", [*BUDGETS, None, Limits(wall_time=100)], ids=["money", "calls", "retries", "none", "wall time"])
async def test_what_is_claimed_ahead_of_its_turn_is_not_confirmed_where_a_budget_pays_for_it(rig: Rig, budget: Budget) -> None:
    provider = Hold(rig)
    if budget is not None:
        budgeted(rig, budget)
    find = find_tool(effect="idempotent", concurrency=2)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(10)]
    rig.hand_in(items)
    async with asyncio.timeout(10):
        while provider.open < 2 or len(rig.store.receipts) < 3:
            await asyncio.sleep(0)
    states = Counter(receipt.state for receipt in rig.store.receipts.values())
    assert states["running"] == (2 if budget in BUDGETS else len(rig.store.receipts))
    provider.answer()
    assert {(await rig.bus.outcome(item.call_id)).outcome for item in items} == {"completed"}


async def test_requests_that_begin_together_are_confirmed_together_each_under_its_own_name(rig: Rig) -> None:
    budgeted(rig, Decimal(1))
    rig.port.script = answering(lambda body: {"items": [{"email": item["domain"]} for item in body["items"]]})
    find = find_tool(concurrency=20, batch=Batch(3, path="/v2/bulk", items="items", results="items"))
    items = [rig.item(find, {"domain": f"d{n}.example"}, row=f"leads/{n}") for n in range(30)]
    assert {outcome.outcome for outcome in await rig.ask(items)} == {"completed"}
    leases = [lease for request in confirms(rig) for lease in request.leases]
    assert len(leases) == 30
    assert len(confirms(rig)) < len(rig.port.requests)
    requests = Counter(lease.batch_id for lease in leases)
    assert sorted(requests.values()) == sorted((request.body or b"").count(b'"domain"') for request in rig.port.requests)


async def test_a_confirmation_that_is_not_answered_is_asked_for_again_and_sent_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    budgeted(rig, Decimal(1))
    carry_out, unanswered = rig.store.answer, 2

    def answer(request: Message) -> Message:
        nonlocal unanswered
        reply = carry_out(request)
        if isinstance(request, Confirm) and unanswered:
            unanswered -= 1
            raise AskTimeout("the answer is lost")
        return reply

    monkeypatch.setattr(rig.store, "answer", answer)
    find = find_tool(concurrency=20)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(20)]
    assert {outcome.outcome for outcome in await rig.ask(items)} == {"completed"}
    assert len(rig.port.requests) == 20
    assert rig.store.runs["run-1"].charged() == 20 * Decimal("0.01")


async def test_an_error_that_nobody_foresaw_ends_every_request_that_it_met_and_charges_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    budgeted(rig, Decimal(1))
    carry_out = rig.store.answer

    def answer(request: Message) -> Message:
        if isinstance(request, Confirm):
            raise ZeroDivisionError
        return carry_out(request)

    monkeypatch.setattr(rig.store, "answer", answer)
    find = find_tool(concurrency=20)
    outcomes = await rig.ask([rig.item(find, {"domain": f"d{n}.example"}) for n in range(5)])
    assert {(outcome.outcome, outcome.failure and outcome.failure.code) for outcome in outcomes} == {("failed", "gateway")}
    async with asyncio.timeout(10):
        while rig.store.runs["run-1"].charged():
            await asyncio.sleep(0)
    assert rig.port.requests == []


async def test_a_budget_pays_for_all_that_it_has_though_more_is_asked_and_claimed_ahead(rig: Rig) -> None:
    """Who finds the budget taken by claims that are not sent waits for what they become."""
    budgeted(rig, Limits(calls=7))
    provider = Hold(rig)
    find = find_tool(concurrency=2)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(12)]
    rig.hand_in(items)
    async with asyncio.timeout(10):
        while provider.open < 2 or not any(receipt.state == "queued" for receipt in rig.store.receipts.values()):
            await asyncio.sleep(0)
    provider.answer()
    outcomes = [await rig.bus.outcome(item.call_id) for item in items]
    assert [outcome.outcome for outcome in outcomes].count("completed") == 7
    assert {outcome.outcome for outcome in outcomes} <= {"completed", "halted", "deferred"}
    assert len(rig.port.requests) == 7


def losing_the_shard(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, to: str = "", halting: bool = False) -> None:
    """The first confirmation is carried out, and the shard is not ours any more when its answer comes: another has it, or nobody knows. ``halting``:
    the run is halted by then, too.
    """
    carry_out, lost = rig.store.answer, False

    def answer(request: Message) -> Message:
        nonlocal lost
        reply = carry_out(request)
        if isinstance(request, Confirm) and not lost:
            lost = True
            rig.engine.shards.refused(request.shard or 0)
            if to:
                shard = rig.store.shards[request.shard or 0]
                shard.ended_term, shard.term, shard.holder, shard.expires = shard.term, shard.term + 1, to, rig.clock.now() + 1000
            if halting:
                rig.store.runs["run-1"].state = "halted"
        return reply

    monkeypatch.setattr(rig.store, "answer", answer)


async def test_what_is_confirmed_when_its_lane_is_lost_goes_once_the_lane_is_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back, its part of the budget would be left over though the run is told by then that it is spent."""
    budgeted(rig, Limits(calls=5))
    losing_the_shard(rig, monkeypatch, halting=True)
    assert [outcome.outcome for outcome in await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])] == ["completed"]
    assert len(rig.port.requests) == 1
    assert not any(isinstance(request, Release) for request in rig.bus.asked)


def releases(rig: Rig) -> list[str]:
    return [lease.key for request in rig.bus.carried_out if isinstance(request, Release) for lease in request.leases]


async def test_of_a_call_that_may_not_be_repeated_nothing_is_kept_when_its_lane_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever met it would have to say that its outcome is unknown."""
    budgeted(rig, Limits(calls=5))
    losing_the_shard(rig, monkeypatch)
    item = rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})
    assert [outcome.outcome for outcome in await rig.ask([item])] == ["completed"]
    assert releases(rig) == [item.receipt_key]
    assert len(rig.port.requests) == 1
    assert rig.store.runs["run-1"].charged() == Decimal("0.01")


async def test_what_is_confirmed_goes_back_as_soon_as_another_is_known_to_have_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05, hand=200.0))
    budgeted(rig, Limits(calls=5))
    losing_the_shard(rig, monkeypatch, to="another")
    item = rig.item(find_tool(effect="idempotent"), {"domain": "a.example"})
    rig.hand_in([item])
    async with asyncio.timeout(5):
        while not releases(rig):
            await asyncio.sleep(0.001)
    assert rig.store.receipts[item.receipt_key].state == "released"
    assert rig.store.runs["run-1"].charged() == 0
    assert rig.port.requests == []
    await rig.stop()


async def test_what_is_confirmed_only_when_asked_again_is_sent_under_the_term_of_then(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another had the lane for a moment in between."""
    budgeted(rig, Limits(calls=5))
    carry_out, lost = rig.store.answer, False

    def answer(request: Message) -> Message:
        nonlocal lost
        if isinstance(request, Confirm) and not lost:
            lost = True
            shard = rig.store.shards[request.shard or 0]
            shard.ended_term, shard.term = shard.term, shard.term + 1
            rig.engine.shards.refused(request.shard or 0)
            raise AskTimeout("nobody answers")
        return carry_out(request)

    monkeypatch.setattr(rig.store, "answer", answer)
    item = rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})
    assert [outcome.outcome for outcome in await rig.ask([item])] == ["completed"]
    assert releases(rig) == []
    assert len(rig.port.requests) == 1


@pytest.mark.leaping
async def test_a_budget_pays_for_what_calls_cost_not_for_what_they_may_cost_at_once(rig: Rig) -> None:
    """Twenty at once may cost all of it, and cost a fifth."""
    budgeted(rig, Decimal(1))

    @Provider("texts", base_url="http://127.0.0.1:1", concurrency=20).post(
        "/v2/find", effect="read", cost=Decimal("0.05"), actual_cost=lambda _: Decimal("0.01")
    )
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    provider = Hold(rig)
    items = [rig.item(Find, {"domain": f"d{n}.example"}, row=f"leads/{n}") for n in range(60)]
    rig.hand_in(items)
    async with asyncio.timeout(10):
        while provider.open < 20:
            await asyncio.sleep(0)
    provider.answer()
    assert Counter([(await rig.bus.outcome(item.call_id)).outcome for item in items]) == {"completed": 60}
    assert rig.store.runs["run-1"].charged() == Decimal("0.60")


@pytest.mark.leaping
async def test_who_waits_for_claims_of_its_own_run_is_told_so(rig: Rig) -> None:
    budgeted(rig, Limits(calls=2))
    provider = Hold(rig)
    rig.hand_in([rig.item(find_tool(concurrency=1), {"domain": f"d{n}.example"}, row=f"leads/{n}") for n in range(2)])
    async with asyncio.timeout(10):
        while not provider.open or {receipt.state for receipt in rig.store.receipts.values()} != {"queued", "running"}:
            await asyncio.sleep(0)

    @Provider("elsewhere", base_url="http://127.0.0.1:1").post("/v2/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    [waits] = await rig.ask([rig.item(Find, {"domain": "a.example"}, row="leads/3")])
    provider.answer()
    assert (waits.outcome, waits.reason) == ("deferred", taken_reason("calls"))


@pytest.mark.leaping
async def test_who_waits_for_a_budget_in_hand_goes_as_soon_as_a_call_of_its_run_leaves_something_over(rig: Rig) -> None:
    """Nobody waits until it would ask again: of forty calls, of which two may go at a time, none is sent away, though together they last a tenth of a
    second, and a call waits in hand for a quarter here.
    """
    rig.store.budget_poll = 1.0
    budgeted(rig, Decimal(1))

    @Provider("texts", base_url="http://127.0.0.1:1", concurrency=20).post(
        "/v2/find", effect="read", cost=Decimal("0.45"), actual_cost=lambda _: Decimal("0.002")
    )
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    give = answering({"email": "a@example"})

    async def slowly(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0.005)
        return await give(request)

    rig.port.script = slowly
    outcomes = await rig.ask([rig.item(Find, {"domain": f"d{n}.example"}, row=f"leads/{n}") for n in range(40)])
    assert Counter(outcome.outcome for outcome in outcomes) == {"completed": 40}


@pytest.mark.leaping
async def test_a_follower_of_another_run_does_not_wait_for_its_leaders_budget(rig: Rig) -> None:
    """Whose call is on its way meanwhile, for as long as it may take."""
    budgeted(rig, Limits(calls=1))
    provider = Hold(rig)
    slow = rig.item(find_tool(concurrency=1), {"domain": "slow.example"})
    rig.hand_in([slow])
    async with asyncio.timeout(10):
        while not provider.open:
            await asyncio.sleep(0.01)

    @Provider("elsewhere", base_url="http://127.0.0.1:1").post("/v2/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        extract = {"email": ["email"]}  # noqa: RUF012 - as authors write it

    waits, follower = (rig.item(Find, {"domain": "a.example"}, row=row) for row in ("leads/1", "leads/2"))
    rig.hand_in([waits])
    async with asyncio.timeout(10):
        while not any(isinstance(asked, ClaimReceipts) and asked.claims[0].key == waits.receipt_key for asked in rig.bus.asked):
            await asyncio.sleep(0.01)
    rig.hand_in([follower], run="run-2")
    async with asyncio.timeout(10):
        while provider.open < 2:
            await asyncio.sleep(0.01)
    told = await rig.bus.outcome(waits.call_id)
    assert (told.outcome, told.reason) == ("deferred", taken_reason("calls"))
    provider.answer()
    assert (await rig.bus.outcome(follower.call_id)).outcome == "completed"


async def test_a_run_takes_no_lease_that_another_may_have_and_pays_for_its_own_call(rig: Rig) -> None:
    """The answer to the first run's claim was lost, and its row was sent away."""
    first = rig.item(find_tool(effect="idempotent"), {"domain": "a.example"})
    second = rig.item(find_tool(effect="idempotent"), {"domain": "a.example"})
    assert first.receipt_key == second.receipt_key
    for run in ("run-1", "run-2"):
        rig.store.answer(HaltRun(run_id=run, action="resume"))
    rig.bus.silent = {ClaimReceipts}
    rig.hand_in([first])
    await rig.bus.outcome(first.call_id)
    assert rig.store.receipts[first.receipt_key].state == "running"
    rig.bus.silent = set()
    assert [outcome.outcome for outcome in await rig.ask([second], run="run-2")] == ["completed"]
    assert [rig.store.runs[run].charged() for run in ("run-1", "run-2")] == [0, Decimal("0.01")]
