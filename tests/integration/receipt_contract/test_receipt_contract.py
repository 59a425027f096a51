"""What the gateway relies on in a receipt-store, asked by messages: of the service on a real broker and database, and of the one in memory."""

from __future__ import annotations

import secrets
from decimal import Decimal

import pytest
from tests.integration.receipt_contract.conftest import FAILURE, Asker

from rowmill_contracts.budgets import Limits
from rowmill_contracts.presences import KeepPresence, PresenceKept
from rowmill_contracts.receipts import (
    Claim,
    HaltRun,
    RunHalted,
)

pytestmark = pytest.mark.servers


async def test_a_claim_that_is_confirmed_at_once_runs_under_a_dispatch_and_its_result_serves_others(store: Asker, key: str) -> None:
    granted = await store.claim(key, confirm=True, cost=Decimal("0.01"))
    assert (granted.state, granted.dispatch) == ("granted", 1)
    assert (await store.claim(key, confirm=True)).dispatch == 1
    held = await store.claim(key, "lease-2")
    assert held.state == "held"
    assert held.wait_ms > 0
    assert (await store.complete(key, 1, cost="0.01")).state == "stored"
    served = await store.claim(key, "lease-3", run_id=f"{store.run}-other", started_at=store.now - 5)
    assert (served.state, bytes(served.output), served.run_id, served.caller, served.cost) == (
        "completed",
        b'{"raw":1}',
        store.run,
        "leads/1",
        Decimal("0.01"),
    )


async def test_a_repeated_completion_is_stored_once(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    first = await store.complete(key, 1)
    again = await store.complete(key, 1)
    assert (first.state, again.state, again.completed_at) == ("stored", "stored", first.completed_at)


async def test_a_claim_without_confirm_is_confirmed_right_before_dispatch(store: Asker, key: str) -> None:
    queued = await store.claim(key, effect="non_idempotent")
    assert (queued.state, queued.dispatch) == ("granted", 0)
    first, again = await store.confirm(key), await store.confirm(key)
    assert (first.state, first.dispatch) == (again.state, again.dispatch) == ("confirmed", 1)
    assert (await store.confirm(key, "lease-2")).state == "lost"


@pytest.mark.parametrize("confirm", [True, False])
async def test_an_unsent_claim_is_given_back_and_another_gets_it(store: Asker, key: str, confirm: bool) -> None:
    granted = await store.claim(key, confirm=confirm)
    assert await store.release(key, granted.dispatch) == 1
    assert (await store.claim(key, "lease-2", confirm=True)).state == "granted"
    assert (await store.claim(key, "lease-1")).state == "held"


async def test_a_dispatch_that_is_not_final_goes_back_and_the_next_claim_dispatches_anew(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    assert (await store.fail(key, 1, final=False, charged=False)).state == "stored"
    again = await store.claim(key, "lease-2", confirm=True)
    assert (again.state, again.dispatch) == ("granted", 2)
    assert (await store.complete(key, 1)).state == "superseded"


async def test_a_failure_is_kept_for_its_run_alone(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    await store.fail(key, 1)
    failed = await store.claim(key, "lease-2", confirm=True)
    assert (failed.state, failed.failure) == ("failed", FAILURE)
    assert (await store.claim(key, "lease-3", run_id=f"{store.run}-other")).state == "granted"


async def test_a_call_that_was_given_up_unclaimed_has_failed_for_its_run_alone(store: Asker, key: str) -> None:
    claim = Claim(key=key, lease_id="", run_id=store.run, tool="hunter.find", effect="read", started_at=store.now)
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    failed = await store.claim(key, "lease-2", confirm=True)
    assert (failed.state, failed.failure) == ("failed", FAILURE)
    granted = await store.claim(key, "lease-3", run_id=f"{store.run}-other", confirm=True)
    assert (granted.state, granted.dispatch, granted.took_over) == ("granted", 1, False)
    await store.release(key, 1, "lease-3")
    await store.ask(HaltRun(run_id=store.run, action="resume", decision=2, retry=True), RunHalted)
    assert (await store.claim(key, "lease-4", confirm=True)).state == "granted"
    await store.release(key, 2, "lease-4")
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.claim(key, "lease-5", confirm=True)).state == "failed"


async def test_giving_a_call_up_touches_no_lease_and_no_output_of_another(store: Asker, key: str) -> None:
    assert (await store.claim(key, confirm=True)).dispatch == 1
    claim = Claim(key=key, lease_id="", run_id=store.run, tool="hunter.find", effect="read", started_at=store.now)
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.complete(key, 1)).state == "stored"
    assert (await store.claim(key, "lease-2")).state == "completed"


async def test_deaths_of_holders_count_against_a_call_and_condemn_it_only_where_it_was_alone(store: Asker, key: str) -> None:
    states, alone = [], False
    for number in range(20):
        holder = {"lease": f"lease-{number}", "presence": f"{store.run}-{number}"}
        await store.ask(KeepPresence(presence=holder["presence"]), PresenceKept)
        answer = await store.claim(key, confirm=True, counts_deaths=True, **holder)
        states.append("suspect" if answer.alone else answer.state)
        if answer.state == "failed":
            break
        assert bool(answer.dispatch) is not answer.alone
        if answer.alone:
            alone = number > 8
            assert (await store.confirm(key, holder["lease"], alone=alone)).state == "confirmed"
        await store.ask(KeepPresence(presence=holder["presence"], leave=True), PresenceKept)
    assert states == ["granted"] * 2 + ["suspect"] * 10 + ["failed"]
    assert answer.failure is not None
    assert answer.failure.code == "poison"
    assert (await store.claim(key, "later", confirm=True, run_id=f"{store.run}-other", counts_deaths=True)).alone


async def test_an_unknown_outcome_blocks_every_run_until_its_own_dispatch_completes(store: Asker, key: str) -> None:
    await store.claim(key, effect="non_idempotent")
    dispatch = (await store.confirm(key)).dispatch
    await store.fail(key, dispatch, outcome_unknown=True)
    assert (await store.claim(key, "lease-2", run_id=f"{store.run}-other", effect="non_idempotent")).state == "unknown"
    assert (await store.complete(key, dispatch)).state == "stored"
    assert (await store.claim(key, "lease-3", effect="non_idempotent")).state == "completed"


async def test_old_outputs_serve_only_where_they_may(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    await store.complete(key, 1)
    later = {"run_id": f"{store.run}-other", "started_at": store.now + 100}
    assert (await store.claim(key, "lease-2", only_cached=True, **later)).state == "completed"
    assert (await store.claim(key, "lease-2", only_cached=True, fresh_for=200.0, **later)).state == "completed"
    for rule_out in ({"force": True}, {"reusable": False}, {"fresh_for": 10.0}):
        assert (await store.claim(key, "lease-2", only_cached=True, **rule_out, **later)).state == "absent"


async def test_looking_claims_nothing(store: Asker, key: str) -> None:
    assert (await store.claim(key, only_cached=True)).state == "absent"
    assert (await store.claim(key, "lease-2")).state == "granted"


async def test_a_stopped_run_neither_claims_nor_confirms_and_stays_stopped(store: Asker, key: str) -> None:
    await store.claim(key)
    assert await store.halt("stop") == "stopped"
    assert (await store.confirm(key)).state == "halted"
    assert (await store.claim(secrets.token_hex(32))).state == "halted"
    assert await store.halt("resume") == "stopped"
    assert (await store.claim(key, "lease-2", run_id=f"{store.run}-other")).state == "granted"


async def test_calls_retries_and_wall_time_have_budgets_too(store: Asker, key: str) -> None:
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Limits(calls=1, retries=1), decision=1), RunHalted)
    await store.claim_and_confirm(key)
    held = await store.claim(secrets.token_hex(32))
    assert (held.state, held.reason.partition(",")[0]) == ("held", "budget: calls")
    await store.fail(key, 1, final=False)
    over = await store.claim(secrets.token_hex(32))
    assert (over.state, over.reason.partition(",")[0]) == ("over_budget", "budget: calls")
    assert (await store.claim_and_confirm(key, "lease-2")).dispatch == 2
    await store.fail(key, 2, "lease-2", final=False)
    spent = await store.claim(key, "lease-3", confirm=True)
    assert (spent.state, spent.reason.partition(",")[0]) == ("over_budget", "budget: retries")
    assert key[:12] in spent.reason
    late = Limits(wall_time=1)
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=late, deadline=store.now - 1, decision=2), RunHalted)
    over = await store.claim(key, "lease-3", confirm=True)
    assert (over.state, over.reason.partition(",")[0]) == ("over_budget", "budget: wall time")
    await store.ask(HaltRun(run_id=store.run, action="resume", decision=3), RunHalted)
    assert (await store.claim(key, "lease-3", confirm=True)).state == "granted"


async def test_a_claim_that_was_carried_out_in_time_and_is_heard_of_after_the_wall_time_is_not_sent(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    late = Limits(wall_time=1)
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=late, deadline=store.now - 1, decision=1), RunHalted)
    again = await store.claim(key, confirm=True)
    assert (again.state, again.reason.partition(",")[0]) == ("over_budget", "budget: wall time")
    assert await store.release(key, 0) == 1
    assert (await store.claim(key, "lease-2", run_id=f"{store.run}-other")).state == "granted"


async def test_a_halted_run_is_told_why(store: Asker, key: str) -> None:
    await store.claim(key)
    await store.ask(HaltRun(run_id=store.run, action="halt", reason="budget: calls", decision=1), RunHalted)
    assert (await store.claim(secrets.token_hex(32))).reason == "budget: calls"
    assert (await store.confirm(key)).reason == "budget: calls"


async def test_a_cost_above_its_reservation_is_booked_and_halts_the_run_once(store: Asker, key: str) -> None:
    await store.halt("resume", budget="1")
    other = secrets.token_hex(32)
    for each in (key, other):
        await store.claim_and_confirm(each, cost=Decimal("0.01"))
    await store.complete(key, 1, cost="0.07")
    halted = await store.claim(secrets.token_hex(32))
    assert (halted.state, halted.reason) == ("halted", f"budget: money, receipt {key[:12]} cost 0.07, more than the 0.01 reserved for it")
    await store.halt("resume")
    await store.complete(other, 1, cost="0.02")
    assert (await store.claim(secrets.token_hex(32), cost=Decimal("0.92"))).state == "over_budget"
    assert (await store.claim(secrets.token_hex(32), cost=Decimal("0.91"))).state == "granted"


async def test_who_heard_no_dispatch_number_gives_back_what_was_confirmed(store: Asker, key: str) -> None:
    await store.halt("resume", budget="0.01")
    await store.claim(key, effect="non_idempotent", cost=Decimal("0.01"))
    await store.confirm(key)
    assert await store.release(key, 0) == 1
    assert await store.release(key, 0) == 0
    assert (await store.claim(key, "lease-2", effect="non_idempotent", cost=Decimal("0.01"))).state == "granted"


async def test_a_late_copy_of_an_older_decision_changes_nothing(store: Asker, key: str) -> None:
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Decimal(1), decision=1), RunHalted)
    await store.ask(HaltRun(run_id=store.run, action="halt", budget=Decimal(1), reason="pause", decision=2), RunHalted)
    late = await store.ask(HaltRun(run_id=store.run, action="resume", budget=Decimal(1), decision=1), RunHalted)
    assert (late.state, late.superseded, late.reason) == ("halted", True, "pause")
    assert (await store.claim(key)).state == "halted"
    newer = await store.ask(HaltRun(run_id=store.run, action="resume", decision=3), RunHalted)
    assert (newer.state, newer.superseded) == ("running", False)
    assert (await store.claim(key, cost=Decimal(5))).state == "granted"


async def test_a_budget_is_reserved_spent_and_refunded(store: Asker, key: str) -> None:
    await store.halt("resume", budget="0.02")
    keys = [secrets.token_hex(32) for _ in range(4)]
    cost = Decimal("0.01")
    assert (await store.claim_and_confirm(keys[0], cost=cost)).state == "granted"
    assert (await store.claim_and_confirm(keys[1], cost=cost)).state == "granted"
    await store.complete(keys[0], 1, cost="0.01")
    assert (await store.claim_and_confirm(keys[2], cost=cost)).state == "held"
    await store.release(keys[1], 1)
    assert (await store.claim_and_confirm(keys[2], cost=cost)).state == "granted"
    await store.fail(keys[2], 1)
    assert (await store.claim_and_confirm(keys[3], cost=cost)).state == "over_budget"
    assert (await store.claim(key)).state == "granted"


async def test_what_a_budget_pays_for_is_confirmed_right_before_it_is_sent(store: Asker) -> None:
    free, money, calls, late, tried = (secrets.token_hex(32) for _ in range(5))
    assert (await store.claim(free, confirm=True, cost=Decimal("0.01"))).dispatch == 1
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Decimal(1), decision=1), RunHalted)
    assert (await store.claim(money, confirm=True)).dispatch == 1, "it costs nothing"
    assert (await store.claim(tried, confirm=True, cost=Decimal("0.01"))).dispatch == 0
    assert (await store.confirm(tried)).dispatch == 1
    for decision, limits in enumerate((Limits(calls=9), Limits(retries=9)), 2):
        await store.ask(HaltRun(run_id=store.run, action="resume", budget=limits, decision=decision), RunHalted)
        assert (await store.claim(calls, f"lease-{decision}", confirm=True)).dispatch == 0
        assert (await store.claim(secrets.token_hex(32), confirm=True, counted=False)).dispatch == 1, "it is none of its calls"
        await store.release(calls, 0, f"lease-{decision}")
    wall_time = Limits(wall_time=100)
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=wall_time, deadline=store.now + 100, decision=4), RunHalted)
    assert (await store.claim(late, confirm=True, cost=Decimal("0.01"))).dispatch == 1


@pytest.mark.parametrize("limits", [Limits(calls=2), Limits(money=Decimal("0.02"))], ids=["calls", "money"])
async def test_a_budget_is_spent_by_what_has_ended(store: Asker, limits: Limits) -> None:
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=limits, decision=1), RunHalted)
    one, two, more = (secrets.token_hex(32) for _ in range(3))
    cost = Decimal("0.01")
    for key in (one, two):
        assert (await store.claim(key, confirm=True, cost=cost)).state == "granted"
    waits = await store.claim(more, confirm=True, cost=cost)
    assert (waits.state, waits.run_id) == ("held", store.run)
    assert waits.reason.startswith("budget: money" if limits.money else "budget: calls")
    assert 0 < waits.wait_ms <= 1000
    await store.confirm(one)
    assert (await store.claim(more, confirm=True, cost=cost)).state == "held"
    await store.release(two, 0)
    assert (await store.claim(more, confirm=True, cost=cost)).state == "granted"
    await store.confirm(more)
    assert (await store.claim(two, "lease-2", confirm=True, cost=cost)).state == "held"
    await store.complete(one, 1, cost="0.01")
    await store.fail(more, 1)
    assert (await store.claim(two, "lease-2", confirm=True, cost=cost)).state == "over_budget"


async def test_what_a_call_costs_less_than_was_reserved_for_it_pays_for_others(store: Asker) -> None:
    """Else a run whose calls cost less than they may would wait for a person with most of its budget left."""
    await store.halt("resume", budget="0.10")
    sent, more = secrets.token_hex(32), secrets.token_hex(32)
    await store.claim_and_confirm(sent, cost=Decimal("0.06"))
    waits = await store.claim(more, cost=Decimal("0.06"))
    assert (waits.state, waits.reason.partition(",")[0]) == ("held", "budget: money")
    await store.complete(sent, 1, cost="0.01")
    assert (await store.claim(more, cost=Decimal("0.06"))).state == "granted"


async def test_a_call_that_comes_back_after_it_was_confirmed_leaves_its_part_of_the_budget_to_others(store: Asker) -> None:
    """Its gateway lost the lane before it was sent."""
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Limits(calls=1), decision=1), RunHalted)
    lost, more = secrets.token_hex(32), secrets.token_hex(32)
    await store.claim_and_confirm(lost)
    assert (await store.claim(more)).state == "held"
    await store.release(lost, 1)
    assert (await store.claim(more)).state == "granted"


async def test_a_lease_is_its_runs_own(store: Asker, key: str) -> None:
    """Who asks for another run under the same lease id would have that run pay."""
    await store.claim(key, confirm=True)
    other = {"run_id": f"{store.run}-other"}
    held = await store.claim(key, confirm=True, **other)
    assert (held.state, held.run_id, held.reason) == ("held", store.run, "")
    await store.release(key, 0)
    granted = await store.claim(key, "lease-2", confirm=True, **other)
    assert (granted.state, granted.dispatch) == ("granted", 2)


async def test_who_does_not_fit_a_budget_anyway_is_told_so_once_nothing_is_under_way(store: Asker, key: str) -> None:
    """A run waits for its owner because of one dear call only when all that it can pay for is done."""
    await store.halt("resume", budget="0.02")
    dear = Decimal("0.03")
    await store.claim_and_confirm(key, cost=Decimal("0.01"))
    assert (await store.claim(secrets.token_hex(32), cost=dear)).state == "held"
    await store.complete(key, 1, cost="0.01")
    assert (await store.claim(secrets.token_hex(32), cost=dear)).state == "over_budget"
    assert (await store.claim(secrets.token_hex(32), cost=Decimal("0.01"))).state == "granted"


async def test_failures_of_before_a_retry_answer_no_call_of_it_and_outputs_do(store: Asker, key: str) -> None:
    good, unknown = secrets.token_hex(32), secrets.token_hex(32)
    await store.claim(key, confirm=True)
    await store.fail(key, 1)
    await store.claim(good, confirm=True)
    await store.complete(good, 1)
    await store.claim(unknown, confirm=True, effect="non_idempotent")
    await store.fail(unknown, 1, outcome_unknown=True)
    assert (await store.claim(key, "lease-2")).state == "failed"
    retried = HaltRun(run_id=store.run, action="resume", decision=2, retry=True)
    await store.ask(retried, RunHalted)
    granted = await store.claim(key, "lease-3", confirm=True)
    assert (granted.state, granted.dispatch) == ("granted", 2)
    await store.fail(key, 2, "lease-3")
    await store.ask(retried, RunHalted)  # a late copy of it forgets nothing more
    assert (await store.claim(key, "lease-4")).state == "failed"
    assert (await store.claim(good, "lease-4", effect="non_idempotent")).state == "completed"
    assert (await store.claim(unknown, "lease-4", effect="non_idempotent")).state == "unknown"
