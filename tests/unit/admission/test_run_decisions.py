"""Runs and datasets as decisions: identities, leases, endings."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rowmill.runtime.deliveries import Rejected
from rowmill_admission import datasets, runs
from rowmill_admission.charges import charged
from rowmill_admission.datasets import Dataset
from rowmill_admission.decisions import checked, raised
from rowmill_admission.running import Runs
from rowmill_admission.runs import Identity, Run
from rowmill_contracts.budgets import MOST_SECONDS, Limits
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import EMPTY_OBJECT
from rowmill_contracts.events import DatasetEvent
from rowmill_contracts.runs import OpenDataset, ReleaseRun, RunOptions, RunStart

RUN = Run(run_id="r", number=1, org="o", play="p", state="running", input=EMPTY_OBJECT, inputs=[], options=RunOptions(), created=0.0)
DEFINITION = OpenDataset(run_id="r", term=1, dataset="d", input_id="i", columns=[], code_digest="c")


def dataset(definition: OpenDataset = DEFINITION, **fields: Any) -> Dataset:
    return Dataset(dataset_seq=1, run_id="r", dataset="d", input_id="i", definition=definition, **fields)


def test_a_run_is_named_by_its_id_else_its_message_else_its_body() -> None:
    assert runs.identity_of(RunStart(play="p", run_id="mine"), "m", b"{}") == Identity("mine", from_body=False)
    assert runs.identity_of(RunStart(play="p"), "m", b"{}") == Identity("m", from_body=False)
    by_body = runs.identity_of(RunStart(play="p"), "", b"{}")
    assert by_body.from_body
    assert by_body == runs.identity_of(RunStart(play="p"), "", b"{}")
    assert by_body != runs.identity_of(RunStart(play="p"), "", b"{ }")
    assert runs.identity_of(RunStart(play="p"), "m" * 500, b"{}").from_body


def test_the_same_id_is_the_same_run_for_ever_the_same_body_for_a_while() -> None:
    assert runs.run_id_for(Identity("x", from_body=False), None, 0, 600) == "x"
    assert runs.run_id_for(Identity("x", from_body=False), 1e9, 1, 600) is None
    assert runs.run_id_for(Identity("x", from_body=True), 599, 1, 600) is None
    assert runs.run_id_for(Identity("x", from_body=True), 601, 1, 600) == "x-2"


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (RUN, "taken"),
        (replace(RUN, state="queued"), "taken"),
        (replace(RUN, lease_live=True, lease_id="mine"), "again"),
        (replace(RUN, lease_live=True, lease_id="other"), "busy"),
        (replace(RUN, lease_live=False, lease_id="other"), "taken"),
        (replace(RUN, state="completed"), "over"),
        (replace(RUN, stop_reason="enough"), "over"),
        (replace(RUN, halt_reason="budget"), "over"),
    ],
)
def test_a_body_is_taken_by_one_at_a_time(run: Run, verdict: str) -> None:
    assert runs.take(run, "mine") == verdict


def test_only_the_newest_term_that_was_not_released_holds() -> None:
    run = replace(RUN, term=3, released_term=2)
    assert run.holds(3)
    assert not run.holds(2)
    assert not replace(run, released_term=3).holds(3)
    assert not replace(run, stop_reason="").holds(3)
    assert not replace(run, state="failed").holds(3)


def test_a_release_counts_once_and_only_from_the_holder() -> None:
    request = ReleaseRun(run_id="r", term=3, lease_id="mine", outcome="completed")
    run = replace(RUN, term=3, lease_id="mine", released_term=2)
    assert runs.release(run, request) == "now"
    assert runs.release(replace(run, released_term=3), request) == "before"
    assert runs.release(replace(run, term=4), request) == "stale"
    assert runs.release(replace(run, lease_id="other"), request) == "stale"
    assert runs.release(replace(run, state="failed"), request) == "stale"


def test_the_counts_of_a_run_are_its_datasets_together_and_what_it_was_charged() -> None:
    stored = [
        dataset(counts=Counts(admitted=2, completed=1, failed=1, calls=1, cost=Decimal("0.10"))),
        dataset(counts=Counts(admitted=1, reused=1, cost=Decimal("0.02"))),
    ]
    run = replace(RUN, charged=Decimal("0.32"), calls=5)
    assert runs.counts_of(run, stored) == Counts(admitted=3, completed=1, failed=1, reused=1, calls=5, cost=Decimal("0.32"))
    assert runs.counts_of(RUN, []) == Counts()


def test_what_is_told_of_a_runs_charges_counts_unless_something_newer_was_heard() -> None:
    run = replace(RUN, charged=Decimal(2), calls=2, charges_version=2)
    told = RunCharges(run_id="r", version=3, cost=Decimal(1), calls=1)
    assert charged(run, {"r": told}) == replace(run, charged=Decimal(1), calls=1, charges_version=3)
    assert charged(replace(run, charges_version=4), {"r": told}).charged == Decimal(2)
    assert charged(run, None) == charged(run, {}) == run


def test_a_dataset_whose_rows_do_not_add_up_is_named() -> None:
    assert runs.mismatch("d", Counts(admitted=2, completed=1, duplicates=1)) is None
    problem = runs.mismatch("d", Counts(admitted=3, completed=1))
    assert problem is not None
    assert "3 rows were admitted, but 1 ended" in problem.message


def test_a_dataset_is_over_when_admission_is_and_every_admitted_row_has_ended() -> None:
    counts = Counts(admitted=3, completed=1, failed=1, duplicates=1)
    assert dataset(counts=counts, admission_done=True).is_over
    assert not dataset(counts=counts).is_over
    assert not dataset(counts=msgspec.structs.replace(counts, admitted=4), admission_done=True).is_over
    assert not dataset(counts=counts, admission_done=True, state="closed").is_over
    assert dataset(admission_done=True).is_over


def test_a_dataset_of_which_every_worked_row_failed_is_failed() -> None:
    first = Problem(code="tool_failed", message="no luck", row=0)
    state, error = datasets.ending(dataset(counts=Counts(admitted=3, failed=2, duplicates=1), first_error=first))
    assert (state, error and error.code, error and error.row) == ("failed", "tool_failed", 0)
    assert datasets.ending(dataset(counts=Counts(admitted=3, failed=2, completed=1), first_error=first)) == ("closed", None)
    assert datasets.ending(dataset(counts=Counts())) == ("closed", None)
    assert datasets.ending(dataset(error=first, counts=Counts(completed=1))) == ("failed", first)


def test_while_a_dataset_goes_on_it_tells_why_a_row_failed_and_not_why_one_did_before_its_retry() -> None:
    first = Problem(code="wrong_answer", message="no luck", row=0)

    def said(failed: int) -> Problem | None:
        event = datasets.told(dataset(counts=Counts(admitted=3, failed=failed), first_error=first), "leads", "progress").message
        assert isinstance(event, DatasetEvent)
        return event.first_error

    assert (said(1), said(0)) == (first, None)


def test_admission_stops_at_the_first_failed_row_where_that_is_asked() -> None:
    first = Problem(code="tool_failed", message="no luck")
    failing = msgspec.structs.replace(DEFINITION, on_error="fail")
    assert datasets.stops_admission(dataset(counts=Counts(failed=1), first_error=first)) is None
    assert datasets.stops_admission(dataset(failing, counts=Counts(failed=1), first_error=first)) == first
    assert datasets.stops_admission(dataset(failing, counts=Counts(completed=1))) is None
    assert datasets.stops_admission(dataset(error=first)) == first


def test_total_rows_are_those_of_the_input_or_fewer_by_the_limit() -> None:
    assert dataset().total_rows is None
    assert dataset(input_rows=10).total_rows == 10
    assert dataset(input_rows=10, row_limit=3).total_rows == 3
    assert dataset(input_rows=2, row_limit=3).total_rows == 2


@pytest.mark.parametrize("kept", [None, Decimal(5), Limits(wall_time=MOST_SECONDS), Limits(wall_time=0.0), Limits(calls=10**15 - 1, retries=0)])
def test_a_budget_that_can_be_kept_is_taken(kept: Any) -> None:
    checked(kept)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (Decimal("NaN"), "amount"),
        (Limits(wall_time=1e12), "10 years"),
        (Limits(wall_time=1e300), "10 years"),
        (Limits(calls=2**63), "calls"),
        (Limits(calls=10**5000), "calls"),
        (Limits(retries=10**30), "retries"),
    ],
)
def test_a_budget_that_cannot_be_kept_starts_and_resumes_no_run(odd: Any, why: str) -> None:
    with pytest.raises(Rejected, match=why):
        checked(odd)
    with pytest.raises(Rejected, match=why):
        raised(Limits(calls=1), odd)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (RunOptions(limit=2**63), "limit of rows"),
        (RunOptions(limit=10**30), "limit of rows"),
        (RunOptions(budget=Limits(wall_time=1e12)), "10 years"),
    ],
)
async def test_a_start_that_cannot_be_kept_is_refused_before_anything_is_stored(options: RunOptions, why: str) -> None:
    nothing: Any = None
    delivery: Any = SimpleNamespace(message_id="m", body=b"{}")
    with pytest.raises(Rejected, match=why):
        await Runs(nothing, nothing, nothing, nothing, nothing).start(RunStart(play="p", run_id="r", options=options), delivery)
