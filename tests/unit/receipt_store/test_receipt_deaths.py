"""How deaths of gateways are counted on a receipt: the call that ends them is condemned, and nobody who was merely there."""

from __future__ import annotations

import pytest
from tests.unit.receipt_store.test_receipt_leases import decide, receipt, wanted

from rowmill_contracts.receipts import ClaimAnswer
from rowmill_receipt_store.deaths import USUAL
from rowmill_receipt_store.leases import Again, Condemned, Grant, Wanted, granted

BOUND = USUAL.suspected_after + USUAL.deaths_alone


def gateway(**facts: bool) -> Wanted:
    """A claim of a gateway, which knows how to send a suspect alone."""
    return wanted(confirm=True, counts_deaths=True, **facts)


def test_deaths_beside_others_make_a_suspect_and_no_more() -> None:
    deaths = 0
    for _ in range(100):
        decision = decide(gateway(), receipt("running", over=True, deaths=deaths))
        assert isinstance(decision, Grant)
        deaths = decision.deaths
    assert deaths == USUAL.suspected_after


def test_deaths_alone_condemn() -> None:
    deaths, alone, deliveries = 0, False, 0
    while isinstance(decision := decide(gateway(), receipt("running", over=True, deaths=deaths, alone=alone)), Grant):
        deaths, alone, deliveries = decision.deaths, decision.suspect, deliveries + 1
    assert isinstance(decision, Condemned)
    assert decision.deaths == deliveries + 1 == BOUND
    assert (decision.failure.code, decision.failure.tool) == ("poison", "hunter.find")
    assert f"{BOUND} times" in decision.failure.message


def test_a_suspect_is_granted_and_not_confirmed_where_that_was_asked_for() -> None:
    decision = decide(gateway(), receipt("running", over=True, deaths=USUAL.suspected_after - 1))
    assert isinstance(decision, Grant)
    assert not decision.confirms
    assert granted(decision, 7) == ClaimAnswer(state="granted", lease_id="ours", took_over=True, alone=True)


def test_a_suspect_stays_one_while_nothing_is_sent() -> None:
    for state in ("queued", "released", "failed"):
        decision = decide(gateway(), receipt(state, over=True, deaths=USUAL.suspected_after))
        assert isinstance(decision, Grant)
        assert (decision.deaths, decision.suspect) == (USUAL.suspected_after, True)
    again = decide(wanted(counts_deaths=True), receipt("queued", lease_id="ours", run_id="run", deaths=USUAL.suspected_after))
    assert isinstance(again, Again)
    assert again.answer.alone


def test_a_later_run_sends_a_condemned_call_once_more() -> None:
    decision = decide(gateway(), receipt("failed", over=True, deaths=BOUND))
    assert isinstance(decision, Grant)
    assert decision.suspect
    assert isinstance(decide(gateway(), receipt("running", over=True, deaths=BOUND, alone=True)), Condemned)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_who_does_not_know_how_to_send_alone_neither_counts_nor_is_told(state: str) -> None:
    decision = decide(wanted(confirm=True), receipt(state, over=True, deaths=BOUND, alone=True))
    assert isinstance(decision, Grant)
    assert (decision.deaths, decision.suspect, decision.confirms) == (BOUND, False, True)


def test_looking_condemns_nobody() -> None:
    look = wanted(only_cached=True, counts_deaths=True)
    assert decide(look, receipt("running", over=True, deaths=BOUND, alone=True)) == ClaimAnswer(state="absent")


def test_a_live_lease_is_no_death() -> None:
    assert decide(gateway(), receipt("running", deaths=BOUND, alone=True)) == ClaimAnswer(state="held", wait_ms=250, run_id="other-run")
