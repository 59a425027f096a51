"""Who may have a receipt's lease, and what is answered instead."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill_contracts.receipts import Claim, ClaimAnswer, ClaimReceipts
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.charges import Account, Former, Spend
from rowmill_receipt_store.leases import (
    Again,
    Condemned,
    Doubt,
    FailureOnRecord,
    Found,
    Grant,
    Output,
    Receipt,
    Wanted,
    decide_claim,
    stored_at,
    was_failed,
    why_unconfirmed,
)

KEY = b"k" * 32
STARTED = 1000.0
FAILURE = ToolFailure(tool="hunter.find", code="404", message="not found")


def wanted(
    *,
    confirm: bool = False,
    only_cached: bool = False,
    shard: int | None = None,
    term: int | None = None,
    counts_deaths: bool = False,
    **claim: Any,
) -> Wanted:
    facts: dict[str, Any] = {"lease_id": "ours", "run_id": "run", "tool": "hunter.find", "effect": "read", "started_at": STARTED}
    return Wanted(
        KEY,
        Claim(key=KEY.hex(), **(facts | claim)),
        ClaimReceipts(holder="gateway", claims=[], confirm=confirm, only_cached=only_cached, shard=shard, term=term, counts_deaths=counts_deaths),
    )


def receipt(state: str, **changes: Any) -> Receipt:
    facts: dict[str, Any] = {
        "revision": 7,
        "state": state,
        "dispatch": 2,
        "lease_id": "theirs",
        "run_id": "other-run",
        "tool": "hunter.find",
        "effect": "read",
        "held": Spend(),
        "took_over": False,
        "over": False,
        "remaining": 8.0,
        "output": None,
    }
    return Receipt(**(facts | changes))


def output(completed_at: float, body: bytes | None = b'{"raw":1}') -> Output:
    return Output(body, no_result=False, cost=Decimal("0.01"), completed_at=completed_at, dispatch=2, run_id="payer", caller="leads/a")


def decide(claim: Wanted, found: Receipt | None, **facts: Any) -> ClaimAnswer | Grant | Doubt | Condemned | Again:
    return decide_claim(claim, Found(receipt=found, **facts), held_poll=0.25)


def test_a_key_never_claimed_is_granted() -> None:
    decision = decide(wanted(cost=Decimal("0.01")), None)

    spend = Spend(Decimal("0.01"), calls=1)
    assert decision == Grant(wanted(cost=Decimal("0.01")), 0, 0, took_over=False, former=None, spend=spend, net=spend)


def test_another_dispatch_of_a_call_that_its_run_has_tried_is_a_retry() -> None:
    first, again = decide(wanted(), receipt("released")), decide(wanted(), receipt("released"), tried=True)

    assert isinstance(first, Grant)
    assert isinstance(again, Grant)
    assert (first.spend, again.spend) == (Spend(calls=1), Spend(retries=1))


def test_a_live_lease_is_never_stolen_not_even_by_force() -> None:
    for state in ("queued", "running"):
        assert decide(wanted(force=True), receipt(state)) == ClaimAnswer(state="held", wait_ms=250, run_id="other-run")


def test_who_waits_asks_again_when_the_lease_may_be_over() -> None:
    assert decide(wanted(), receipt("queued", remaining=0.1)) == ClaimAnswer(state="held", wait_ms=100, run_id="other-run")


@pytest.mark.parametrize("effect", ["read", "idempotent", "non_idempotent"])
def test_an_unsent_claim_that_is_over_is_free_whatever_the_effect(effect: str) -> None:
    decision = decide(wanted(), receipt("queued", over=True, effect=effect))

    assert isinstance(decision, Grant)
    assert (decision.revision, decision.dispatch, decision.took_over) == (7, 2, False)


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_a_sent_request_that_is_over_is_taken_over_where_it_may_be_repeated(effect: str) -> None:
    decision = decide(wanted(), receipt("running", over=True, effect=effect))

    assert isinstance(decision, Grant)
    assert decision.took_over


def test_a_sent_request_that_must_not_be_repeated_becomes_unknown() -> None:
    assert decide(wanted(effect="read"), receipt("running", over=True, effect="non_idempotent")) == Doubt(7)


def test_an_unknown_outcome_blocks_its_key_even_by_force() -> None:
    found = receipt("outcome_unknown", last_failure=FAILURE)

    assert decide(wanted(force=True), found) == ClaimAnswer(state="unknown", run_id="other-run", failure=FAILURE)


def test_that_an_earlier_dispatch_may_have_had_its_effect_is_passed_on() -> None:
    decision = decide(wanted(), receipt("queued", over=True, took_over=True))

    assert isinstance(decision, Grant)
    assert decision.took_over


def test_the_same_lease_is_the_same_claim() -> None:
    queued = receipt("queued", lease_id="ours", run_id="run")
    running = receipt("running", lease_id="ours", run_id="run", took_over=True)

    assert decide(wanted(), queued) == Again(ClaimAnswer(state="granted", lease_id="ours"))
    assert decide(wanted(confirm=True), running) == Again(ClaimAnswer(state="granted", lease_id="ours", dispatch=2, took_over=True))


def test_the_same_claim_asked_with_confirmation_is_confirmed() -> None:
    decision = decide(wanted(confirm=True, cost=Decimal(2)), receipt("queued", lease_id="ours", run_id="run", held=Spend(Decimal(2), 1)))

    assert isinstance(decision, Grant)
    assert not decision.net
    assert decision.former == Former("run", 3, "replace", Spend(Decimal(2), 1))


@pytest.mark.parametrize("state", ["released", "failed", "completed"])
def test_a_late_copy_of_a_claim_that_ended_gets_no_lease(state: str) -> None:
    answer = decide(wanted(), receipt(state, lease_id="ours"))

    assert isinstance(answer, ClaimAnswer)
    assert answer.state == "held"


def test_a_fresh_output_serves() -> None:
    answer = decide(wanted(), receipt("completed", output=output(900.0)))

    assert isinstance(answer, ClaimAnswer)
    assert (answer.state, bytes(answer.output), answer.run_id, answer.caller) == ("completed", b'{"raw":1}', "payer", "leads/a")
    assert (answer.cost, answer.completed_at) == (Decimal("0.01"), 900.0)


def test_a_stale_or_forced_output_is_refreshed() -> None:
    found = receipt("completed", output=output(900.0))

    for claim in (wanted(fresh_for=50.0), wanted(force=True), wanted(reusable=False)):
        assert isinstance(decide(claim, found), Grant)


def test_what_was_completed_since_the_run_started_serves_even_by_force() -> None:
    found = receipt("completed", output=output(1001.0))

    for claim in (wanted(fresh_for=0.0), wanted(force=True), wanted(reusable=False, effect="non_idempotent")):
        answer = decide(claim, found)
        assert isinstance(answer, ClaimAnswer)
        assert answer.state == "completed"


def test_the_former_output_serves_beside_a_refresh_under_way_or_of_unknown_outcome() -> None:
    for state in ("queued", "running", "outcome_unknown"):
        answer = decide(wanted(), receipt(state, output=output(900.0)))
        assert isinstance(answer, ClaimAnswer)
        assert answer.state == "completed"


def test_an_output_without_room_in_this_answer_is_there_for_the_asking() -> None:
    assert decide(wanted(), receipt("completed", output=output(900.0, body=None))) == ClaimAnswer(state="held", wait_ms=0)


def test_a_failure_answers_its_run_even_by_force() -> None:
    on_record = FailureOnRecord(FAILURE, 2)

    assert decide(wanted(), receipt("failed"), failure=on_record) == ClaimAnswer(state="failed", failure=FAILURE, run_id="run")
    assert isinstance(decide(wanted(), receipt("failed")), Grant)
    assert decide(wanted(force=True), receipt("running"), failure=on_record) == decide(wanted(), receipt("failed"), failure=on_record)


def test_a_stopped_or_halted_run_is_told_so_whatever_is_stored() -> None:
    for state in ("halted", "stopped"):
        assert decide(wanted(), receipt("completed", output=output(900.0)), run_state=state, run_reason="pause") == ClaimAnswer(
            state="halted", reason="pause"
        )


@pytest.mark.parametrize(
    ("term", "current", "held"),
    [(3, 4, True), (None, 4, True), (4, 4, False), (4, None, False), (5, 4, True)],
    ids=["older", "none", "given up", "unknown shard", "newer"],
)
def test_a_claim_under_a_term_that_does_not_hold_is_refused(term: int | None, current: int | None, held: bool) -> None:
    assert decide(wanted(shard=1, term=term), None, shard_term=current, shard_held=held) == ClaimAnswer(state="refused")


def test_a_claim_under_the_newest_term_is_not_refused() -> None:
    assert isinstance(decide(wanted(shard=1, term=4), None, shard_term=4, shard_held=True), Grant)


def test_looking_claims_nothing() -> None:
    look = wanted(only_cached=True)

    assert decide(look, None) == ClaimAnswer(state="absent")
    assert decide(look, receipt("queued", over=True)) == ClaimAnswer(state="absent")
    assert decide(look, receipt("released")) == ClaimAnswer(state="absent")
    assert decide(look, receipt("running")) == ClaimAnswer(state="held", wait_ms=250, run_id="other-run")
    served = decide(look, receipt("completed", output=output(900.0)))
    assert isinstance(served, ClaimAnswer)
    assert served.state == "completed"


def test_why_a_lease_was_not_confirmed() -> None:
    ours = Found(receipt=receipt("queued", lease_id="ours"), shard_term=4, shard_held=True)

    assert why_unconfirmed("ours", 4, ours) is None
    assert why_unconfirmed("ours", None, ours) is None
    assert why_unconfirmed("ours", 3, ours) == "refused"
    assert why_unconfirmed("mine", 4, ours) == "lost"
    assert why_unconfirmed("ours", 4, msgspec.structs.replace(ours, receipt=receipt("released", lease_id="ours"))) == "lost"
    assert why_unconfirmed("ours", 4, msgspec.structs.replace(ours, run_state="stopped")) == "halted"
    assert why_unconfirmed("ours", 4, msgspec.structs.replace(ours, account=Account(wall_time=1.0, late=True))) == "halted"
    assert why_unconfirmed("ours", None, Found()) == "lost"


def test_a_repeated_completion_is_known_by_its_dispatch_even_beside_a_refresh() -> None:
    refreshing = Found(receipt=receipt("running", dispatch=3, output=output(900.0)))

    assert stored_at("ours", 2, refreshing) == 900.0
    assert stored_at("ours", 3, refreshing) is None
    assert stored_at("ours", 1, Found()) is None
    completed = Found(receipt=receipt("completed", lease_id="ours", output=output(900.0)))
    assert stored_at("ours", 2, completed) == 900.0
    assert stored_at("mine", 2, completed) is None


def test_a_repeated_failure_is_known_by_its_lease_or_on_record() -> None:
    for state in ("failed", "released", "outcome_unknown"):
        found = Found(receipt=receipt(state, lease_id="ours"))
        assert was_failed("ours", 2, found)
        assert was_failed("ours", 0, found)
        assert not was_failed("ours", 1, found)
        assert not was_failed("mine", 2, found)
    assert was_failed("ours", 1, Found(receipt=receipt("running"), failure=FailureOnRecord(FAILURE, 1)))
    assert not was_failed("ours", 2, Found(receipt=receipt("completed", lease_id="ours")))
    assert not was_failed("ours", 2, Found())
