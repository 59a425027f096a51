"""What a person reads of a run: words, no Python."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import cast

import msgspec
import pytest
from typer.testing import CliRunner

from rowmill.budgets import as_typed, budget_typed
from rowmill.cli import connecting
from rowmill.cli.main import app
from rowmill.cli.running import _waiting as waiting_told
from rowmill.cli.runs import _retried as retried
from rowmill.cli.wording import failed_told, hidden_told, kept_budget_told, retry_code_told
from rowmill.client.jobs import Job
from rowmill.client.outages import Outage
from rowmill_contracts.budgets import Budget, Limits
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import CodeShown
from rowmill_contracts.run_questions import DatasetSummary, RunSummary
from rowmill_contracts.runs import RunState

COUNTS = Counts(admitted=3, completed=1, failed=1, duplicates=1, calls=2, cost=Decimal("0.03"))
RUN = RunSummary(
    run_id="r1",
    number=1,
    org="default",
    play="leads",
    state="failed",
    counts=COUNTS,
    created_at=1.0,
    error=Problem(code="boom", message="kein Müller", column="contact", row=2),
    output=msgspec.Raw('{"city":"Köln"}'.encode()),
    datasets=[DatasetSummary(dataset="leads", state="closed", counts=COUNTS)],
)


def test_a_run_is_shown_in_words_and_what_it_has_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: (RUN, []) if of == "admission" else None)
    told = CliRunner().invoke(app, ["runs", "get", "r1"])
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines() == [
        "run          r1",
        "org          default",
        "play         leads",
        "state        failed",
        "rows         3 admitted, 1 completed, 1 failed, 0 cancelled, 0 reused, 1 duplicate",
        "calls        2 made live, cost 0.03",
        "created      1970-01-01T00:00:01+00:00",
        "error        kein Müller (boom, column contact, row 3)",
        'output       {"city": "Köln"}',
        "dataset      leads (closed): 3 admitted, 1 completed, 1 failed, 0 cancelled, 0 reused, 1 duplicate",
    ]


def test_a_run_whose_rows_wait_names_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: (RUN, [Outage("clearbit", 412, "http_503", None)]))
    told = CliRunner().invoke(app, ["runs", "get", "r1"])
    assert "provider     waiting for provider clearbit: answers 503, asked again now and then; 412 rows wait" in told.stdout.splitlines()
    told = CliRunner().invoke(app, ["runs", "get", "r1", "--json"])
    assert msgspec.json.decode(told.stdout)["outages"] == [{"provider": "clearbit", "rows": 412, "why": "http_503", "until": None}]


def test_a_resumed_run_is_printed_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    running = msgspec.structs.replace(RUN, state="running")
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: running)
    told = CliRunner().invoke(app, ["runs", "resume", "r1", "--json"])
    assert told.exit_code == 0, told.output
    assert msgspec.json.decode(told.stdout)["state"] == "running"


@pytest.mark.parametrize(("state", "stopping"), [("running", True), ("completed", False)])
def test_a_run_that_is_stopped_is_printed_as_json_with_whether_it_had_not_ended(
    state: RunState, stopping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: msgspec.structs.replace(RUN, state=state))
    told = CliRunner().invoke(app, ["runs", "stop", "r1", "--json"])
    assert told.exit_code == 0, told.output
    document = msgspec.json.decode(told.stdout)
    assert (document["run_id"], document["state"], document["stopping"]) == ("r1", state, stopping)


def test_a_paused_run_is_printed_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: msgspec.structs.replace(RUN, state="waiting", waiting_for="pause"))
    told = CliRunner().invoke(app, ["runs", "pause", "r1", "--json"])
    assert told.exit_code == 0, told.output
    assert [msgspec.json.decode(told.stdout)[name] for name in ("run_id", "state", "waiting_for")] == ["r1", "waiting", "pause"]


def test_input_columns_in_whose_place_others_were_computed_are_named() -> None:
    computed = DatasetSummary(dataset="leads", state="closed", counts=COUNTS, columns=["contact", "score", "_raw"], input_id="r1.leads")
    run = msgspec.structs.replace(RUN, datasets=[computed, DatasetSummary(dataset="more", state="closed", counts=COUNTS, columns=["domain"])])
    told = hidden_told(run, {"r1.leads": ["domain", "score", "_raw"], "r1.others": ["contact"]})
    assert told == ["the input's column 'score' is hidden: the play computes a column of that name"]


@pytest.mark.parametrize(
    ("failed", "codes", "said"),
    [
        (0, {}, None),
        (1, {}, "1 row failed; `rowmill runs retry r1` works it again, while `rowmill up` runs"),
        (
            3,
            {"timeout": 1, "http_400": 2},
            "3 rows failed: http_400 (2), timeout (1); `rowmill runs retry r1` works them again, while `rowmill up` runs",
        ),
        (9, {"d": 1, "c": 1, "b": 1, "a": 6}, "9 rows failed: a (6), b (1), c (1), and others; "),
        (9, {"a": 6}, "9 rows failed: a (6), and others; "),
        (
            1,
            {"outcome_unknown": 1},
            "1 row failed: outcome_unknown (1); `rowmill runs retry r1` works it again, while `rowmill up` runs; first `rowmill receipts settle` ",
        ),
    ],
)
def test_why_rows_failed_and_what_to_do_is_one_line(failed: int, codes: dict[str, int], said: str | None) -> None:
    run = msgspec.structs.replace(RUN, counts=msgspec.structs.replace(COUNTS, failed=failed))
    told = failed_told(run, codes)
    assert told is None if said is None else (told or "").startswith(said)
    assert failed_told(msgspec.structs.replace(run, state="cancelled"), codes) is None


@pytest.mark.parametrize(
    ("has", "given", "said"),
    [
        (Decimal("0.5"), Decimal("0.50"), None),
        (Limits(money=Decimal(5), calls=10), Limits(calls=10), None),
        (Decimal("0.50"), Decimal(30), "a budget of 0.50, which --budget 30 does not change here; `rowmill runs resume r1 --budget 30` does"),
        (None, Limits(calls=9, wall_time=60.0), "no budget, which --budget calls=9 --budget wall-time=60s does not change here"),
    ],
)
def test_a_run_that_exists_keeps_its_budget_and_whoever_gives_another_is_told(has: Budget, given: Budget, said: str | None) -> None:
    told = kept_budget_told(msgspec.structs.replace(RUN, state="waiting", budget=has), given)
    assert told is None if said is None else said in (told or "")


def test_the_words_of_a_budget_say_it_again() -> None:
    limits = Limits(money=Decimal("5.00"), calls=1000, retries=0, wall_time=5400.0)
    assert as_typed(limits) == ["5.00", "calls=1000", "retries=0", "wall-time=5400s"]
    assert budget_typed(as_typed(limits)) == limits


def test_a_run_that_waits_to_be_paid_says_for_whom_and_how_it_goes_on() -> None:
    run = msgspec.structs.replace(RUN, state="waiting", waiting_for='halted:payment: provider firmo answered 402: {"error": "pay, please: 5"}')
    said = waiting_told(run)
    assert said.startswith('run r1 waits for payment: provider firmo answered 402: {"error": "pay, please: 5"}; what it has is stored')
    assert "pay the provider, then `rowmill runs resume r1` while `rowmill up` runs" in said


@pytest.mark.parametrize(("state", "said"), [("completed", True), ("running", False)])
async def test_by_which_code_a_run_is_retried_is_said_before_it_is(state: RunState, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run = msgspec.structs.replace(RUN, state=state)
    stderr: list[str] = []

    class Over:
        async def status(self) -> RunSummary:
            return run

        async def retry(self) -> RunSummary:
            stderr.append(capsys.readouterr().err)
            return run

    async def loaded(play: str) -> list[CodeShown]:
        return [CodeShown(service=play, process=name, play=play, digest="d", loaded_at=at) for name, at in (("p1", 2000.0), ("p2", 1000.0))]

    assert await retried(cast("Job", Over()), loaded) == (run, run)
    at = time.strftime("%H:%M:%S", time.localtime(1000.0))
    line = f"rowmill: rows are worked again by the code that the services loaded at {at}; if you edited yours since, start `rowmill up` again\n"
    assert stderr == [line if said else ""]
    assert "loaded when they started; if" in retry_code_told([])
