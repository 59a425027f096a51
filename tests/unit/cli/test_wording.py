"""What a person reads of a run: words, no Python."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from typer.testing import CliRunner

from rowmill.cli import connecting
from rowmill.cli.main import app
from rowmill.cli.wording import hidden_told
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.runs import DatasetSummary, RunSummary

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
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: RUN if of == "admission" else None)
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


def test_a_resumed_run_is_printed_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    running = msgspec.structs.replace(RUN, state="running")
    monkeypatch.setattr(connecting, "asked", lambda _question, *, of: running)
    told = CliRunner().invoke(app, ["runs", "resume", "r1", "--json"])
    assert told.exit_code == 0, told.output
    assert msgspec.json.decode(told.stdout)["state"] == "running"


def test_input_columns_in_whose_place_others_were_computed_are_named() -> None:
    computed = DatasetSummary(dataset="leads", state="closed", counts=COUNTS, columns=["contact", "score", "_raw"], input_id="r1.leads")
    run = msgspec.structs.replace(RUN, datasets=[computed, DatasetSummary(dataset="more", state="closed", counts=COUNTS, columns=["domain"])])
    told = hidden_told(run, {"r1.leads": ["domain", "score", "_raw"], "r1.others": ["contact"]})
    assert told == ["the input's column 'score' is hidden: the play computes a column of that name"]
