"""Calls of runs that must not spend: stopped, halted, out of budget, or asked to pay."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from tests.unit.tool_gateway.conftest import Hold, Rig, answering, find_tool

from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.events import Control
from rowmill_contracts.receipts import HaltRun
from rowmill_tool_gateway.handlers import Handlers


async def test_a_402_halts_and_keeps_no_failure(rig: Rig) -> None:
    rig.port.script = answering({"error": "pay"}, status=402)
    [outcome] = await rig.ask([rig.item(find_tool(), {"domain": "a.example"})])
    assert (outcome.outcome, outcome.reason) == ("halted", 'payment: provider hunter answered 402: {"error":"pay"}')
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


async def test_a_hint_that_a_run_stopped_gives_back_what_is_claimed_and_not_sent(rig: Rig) -> None:
    provider = Hold(rig)
    find = find_tool(concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(3)]
    rig.hand_in(items)
    while not rig.port.requests or len(rig.store.receipts) < 2:
        await asyncio.sleep(0)
    rig.store.answer(HaltRun(run_id="run-1", action="stop"))
    rig.engine.dispatcher.give_back("run-1", confirmed=True)
    stopped = [await rig.bus.outcome(item.call_id) for item in items[1:]]
    assert [outcome.outcome for outcome in stopped] == ["halted", "halted"]
    provider.answer()
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
    provider = Hold(rig)
    find = find_tool(effect=effect, concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(2)]
    rig.hand_in(items)
    while not rig.port.requests or len(rig.store.receipts) < 2:
        await asyncio.sleep(0)
    rig.store.answer(HaltRun(run_id="run-1", action="halt", reason=reason))
    hint = Control(run_id="run-1", action="halt", reason=reason)
    await Handlers(rig.engine, rig.bus).control(Delivery(message=hint, body=b"", queue=""))
    provider.answer()
    assert [(await rig.bus.outcome(item.call_id)).outcome for item in items] == ["completed", second]
