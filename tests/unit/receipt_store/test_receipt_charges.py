"""Budgets, charges, freshness, terms, outputs: the arithmetic of money and time."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rowmill.errors import MalformedMessage
from rowmill_contracts.receipts import Claim, ClaimReceipts, Complete, Completion, Confirm, Fail, FailedCall, LeaseRef, Renew
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store import requests
from rowmill_receipt_store.charges import (
    UNLIMITED,
    Account,
    Allowances,
    Former,
    Kind,
    Spend,
    former_charge,
    net_spend,
    running_totals,
    spent_reason,
)
from rowmill_receipt_store.freshness import serves
from rowmill_receipt_store.outputs import rejection
from rowmill_receipt_store.shards import NO_TERM, spending_term, term_holds

CENT = Decimal("0.01")
ONE = Spend(CENT, calls=1)
KEY = "ab" * 32


def test_an_unsent_reservation_is_refunded_and_a_sent_one_stays() -> None:
    def fate(state: str, run_id: str = "other") -> Former | None:
        return former_charge(state=state, run_id=run_id, dispatch=2, held=ONE, by_run="run")

    assert fate("queued") == Former("other", 3, "refund", ONE)
    assert fate("queued", "run") == Former("run", 3, "replace", ONE)
    assert fate("running") == Former("other", 2, "unknown", ONE)
    assert fate("released") is fate("completed") is fate("failed") is None


def test_what_was_charged_nothing_leaves_no_charge() -> None:
    assert former_charge(state="queued", run_id="other", dispatch=0, held=Spend(), by_run="run") is None
    assert former_charge(state="queued", run_id="other", dispatch=0, held=Spend(retries=1), by_run="run") is not None


def test_a_run_that_claims_its_own_expired_reservation_again_pays_once() -> None:
    assert not net_spend("run", ONE, Former("run", 1, "replace", ONE))
    assert net_spend("run", Spend(), Former("run", 1, "replace", ONE)) == Spend(-CENT, -1)
    assert net_spend("run", ONE, Former("other", 1, "refund", ONE)) == ONE
    assert net_spend("run", ONE, Former("run", 1, "unknown", ONE)) == ONE
    assert net_spend("run", ONE, None) == ONE


def test_budgets_serve_in_order_and_what_does_not_fit_leaves_the_rest() -> None:
    left = Allowances()
    left.know("run", Account(money=CENT * 9, money_left=CENT * 5))
    left.know("run", Account(money=Decimal(100), money_left=Decimal(100)))
    left.know("free", UNLIMITED)

    costs = [Spend(Decimal(n) * CENT) for n in (3, 4, 2, 1, 0)]
    assert [left.take("run", cost, cost) for cost in costs] == [None, "money", None, "money", None]
    assert left.take("free", Spend(Decimal(10), 9, 9), Spend(Decimal(10), 9, 9)) is None


def test_each_kind_of_budget_is_named_where_it_does_not_pay() -> None:
    left = Allowances()
    left.know("run", Account(money=CENT, money_left=CENT, calls=2, calls_left=2, retries=1, retries_left=1))
    left.know("late", Account(wall_time=60.0, late=True))
    call, again = Spend(calls=1), Spend(retries=1)

    assert [left.take("run", spend, spend) for spend in (call, again, again, call, call)] == [None, None, "retries", None, "calls"]
    assert left.take("run", ONE, ONE) == "calls"
    assert left.take("run", Spend(CENT, retries=1), Spend(CENT)) is None, "a claim that replaces its run's own reservation adds nothing"
    assert left.take("late", Spend(), Spend()) == "wall_time"


def test_the_reason_names_the_budget_and_the_receipt() -> None:
    account = Account(money=5 * CENT, money_left=CENT, calls=7, calls_left=0, retries=3, retries_left=0, wall_time=90.0, late=True)
    kinds: list[Kind] = ["money", "calls", "retries", "wall_time"]
    assert [spent_reason(kind, account, Spend(2 * CENT), "abc123") for kind in kinds] == [
        "budget: money, 0.01 of 0.05 is left and receipt abc123 may cost 0.02",
        "budget: calls, all 7 are made and receipt abc123 would be one more",
        "budget: retries, all 3 are made and receipt abc123 would be tried again",
        "budget: wall time, 90 s are over and receipt abc123 is not sent",
    ]


def test_running_totals_are_kept_by_run() -> None:
    nets = [("a", ONE), ("b", Spend(2 * CENT, retries=1)), ("a", ONE), ("b", Spend())]
    assert running_totals(nets) == [ONE, Spend(2 * CENT, 0, 1), Spend(2 * CENT, 2), Spend(2 * CENT, 0, 1)]


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
