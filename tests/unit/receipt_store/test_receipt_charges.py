"""Budgets, charges, freshness, terms, outputs: the arithmetic of money and time."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rowmill.errors import MalformedMessage
from rowmill_contracts.receipts import Claim, ClaimReceipts, Complete, Completion, Confirm, Fail, FailedCall, LeaseRef, Renew
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store import requests
from rowmill_receipt_store.charges import Allowances, Former, former_charge, net_cost, running_totals
from rowmill_receipt_store.freshness import serves
from rowmill_receipt_store.outputs import rejection
from rowmill_receipt_store.shards import NO_TERM, spending_term, term_holds

CENT = Decimal("0.01")
KEY = "ab" * 32


def test_an_unsent_reservation_is_refunded_and_a_sent_one_stays() -> None:
    def fate(state: str, run_id: str = "other", cost: Decimal = CENT) -> Former | None:
        return former_charge(state=state, run_id=run_id, dispatch=2, reserved=CENT, by_run="run", cost=cost)

    assert fate("queued") == Former("other", 3, "refund", CENT)
    assert fate("queued", "run") == Former("run", 3, "replace", CENT)
    assert fate("queued", "run", Decimal(0)) == Former("run", 3, "refund", CENT)
    assert fate("running") == Former("other", 2, "unknown", CENT)
    assert fate("released") is fate("completed") is fate("failed") is None


def test_what_cost_nothing_leaves_no_charge() -> None:
    assert former_charge(state="queued", run_id="other", dispatch=0, reserved=Decimal(0), by_run="run", cost=CENT) is None


def test_a_run_that_claims_its_own_expired_reservation_again_pays_once() -> None:
    assert net_cost("run", CENT, Former("run", 1, "replace", CENT)) == 0
    assert net_cost("run", CENT, Former("other", 1, "refund", CENT)) == CENT
    assert net_cost("run", CENT, Former("run", 1, "unknown", CENT)) == CENT
    assert net_cost("run", CENT, None) == CENT


def test_budgets_serve_in_order_and_what_does_not_fit_leaves_the_rest() -> None:
    left = Allowances()
    left.know("run", Decimal("0.05"))
    left.know("run", Decimal(100))
    left.know("free", None)

    costs = [Decimal(n) * CENT for n in (3, 4, 2, 1, 0)]
    assert [left.take("run", cost, cost) for cost in costs] == [True, False, True, False, True]
    assert left.take("free", Decimal(10), Decimal(10))


def test_running_totals_are_kept_by_run() -> None:
    assert running_totals([("a", CENT), ("b", 2 * CENT), ("a", CENT), ("b", Decimal(0))]) == [CENT, 2 * CENT, 2 * CENT, 2 * CENT]


@pytest.mark.parametrize(
    ("completed_at", "reusable", "force", "fresh_for", "expected"),
    [
        (100.0, False, True, 0.0, True),
        (99.0, True, False, None, True),
        (99.0, True, False, 1.0, True),
        (99.0, True, False, 0.5, False),
        (99.0, True, True, None, False),
        (99.0, False, False, None, False),
    ],
    ids=["since the start", "older", "just fresh", "stale", "forced", "not reusable"],
)
def test_freshness_is_judged_at_the_runs_start(*, completed_at: float, reusable: bool, force: bool, fresh_for: float | None, expected: bool) -> None:
    assert serves(completed_at=completed_at, started_at=100.0, reusable=reusable, force=force, fresh_for=fresh_for) is expected


def test_terms() -> None:
    assert spending_term(None, 3) is None
    assert spending_term(1, 3) == 3
    assert spending_term(1, None) == NO_TERM
    assert term_holds(None, current=None, held=False)
    assert not term_holds(NO_TERM, current=1, held=True)


def test_outputs_are_stored_up_to_the_limit() -> None:
    assert rejection(b"x" * 10, tool="t", limit=10) is None
    assert rejection(memoryview("é".encode()), tool="t", limit=10) is None
    too_large = rejection(b"x" * 11, tool="hunter.find", limit=10)
    assert too_large is not None
    assert (too_large.tool, too_large.code, too_large.category) == ("hunter.find", "too_large", "too_large")
    undecodable = rejection(b'"\xff"', tool="t", limit=10)
    assert undecodable is not None
    assert (undecodable.code, undecodable.category) == ("not_decodable", "bad_answer")


@pytest.mark.parametrize("key", ["", "ab", "zz" * 32, "ab" * 33, KEY + " "])
def test_a_key_that_is_no_digest_is_malformed(key: str) -> None:
    with pytest.raises(MalformedMessage, match="SHA-256"):
        requests.leases(Renew(leases=[LeaseRef(key=KEY, lease_id="l"), LeaseRef(key=key, lease_id="l")]))


@pytest.mark.parametrize("cost", ["NaN", "Infinity", "-1"])
def test_a_cost_that_is_no_amount_is_malformed(cost: str) -> None:
    claim = Claim(key=KEY, lease_id="l", run_id="r", tool="t", effect="read", started_at=0, cost=Decimal(cost))
    completion = Completion(key=KEY, lease_id="l", dispatch=1, output=b"1", run_id="r", cost=Decimal(cost))  # type: ignore[arg-type]

    with pytest.raises(MalformedMessage, match="cost"):
        requests.wanted(ClaimReceipts(holder="h", claims=[claim]))
    with pytest.raises(MalformedMessage, match="cost"):
        requests.completed(Complete(completions=[completion]))


def test_confirmations_carry_their_term_and_batch() -> None:
    (lease,) = requests.leases(Confirm(leases=[LeaseRef(key=KEY, lease_id="l", run_id="r")], shard=3, term=None, batch_id="b"))

    assert (lease.shard, lease.term, lease.batch_id) == (3, NO_TERM, "b")


def test_a_failure_is_final_or_gives_the_lease_back_or_blocks() -> None:
    def becomes(*, final: bool, unknown: bool) -> str:
        failure = ToolFailure(tool="t", code="c", message="m")
        call = FailedCall(key=KEY, lease_id="l", dispatch=1, run_id="r", failure=failure, final=final, outcome_unknown=unknown)
        return requests.failed(Fail(failures=[call]))[0].becomes

    assert becomes(final=True, unknown=False) == "failed"
    assert becomes(final=False, unknown=False) == "released"
    assert becomes(final=True, unknown=True) == "outcome_unknown"
