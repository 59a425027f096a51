"""Why rows fail is said while they do, and the rate is that of rows which end now."""

from __future__ import annotations

import time

import pytest

from rowmill.cli.progress import Progress
from rowmill.cli.wording import MOST_CODES, MOST_LETTERS
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import DatasetEvent


def counted(failed: int, error: Problem | None = None, *, completed: int = 0, dataset: str = "leads") -> DatasetEvent:
    counts = Counts(admitted=300, completed=completed, failed=failed)
    return DatasetEvent(event_id="e", run_id="r1", play="leads", dataset=dataset, state="progress", counts=counts, at=1.0, first_error=error)


def why(captured: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in captured.readouterr().err.splitlines() if "a row failed" in line]


def test_the_first_error_of_a_code_is_said_once_as_it_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.dataset(counted(0))
    assert why(capsys) == []
    error = Problem(code="wrong_answer", message='no [/field]\nin {"a": [1]}', column="contact", row=2, tool="firmo.find")
    progress.dataset(counted(1, error))
    told = 'no [/field] in {"a": [1]} (wrong_answer, column contact, row 3, tool firmo.find)'
    assert why(capsys) == [f"rowmill: leads: a row failed: {told}; others of the same code are only counted"]
    progress.dataset(counted(137, error))
    progress.dataset(counted(1, error, dataset="more"))
    assert why(capsys) == []


def test_only_a_few_codes_are_said_and_of_each_as_much_as_can_be_looked_over(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for number in range(MOST_CODES + 1):
        progress.dataset(counted(1, Problem(code=f"code{number}", message="x" * 2000), dataset=f"d{number}"))
    lines = why(capsys)
    assert len(lines) == MOST_CODES
    assert all(f"{'x' * MOST_LETTERS}… (code" in line for line in lines)


def test_rows_that_had_ended_before_the_command_came_are_none_of_its_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    progress.run_started("r1")
    progress.dataset(counted(10, completed=200))
    assert "failed 10, reused 0, 0 rows/s" in capsys.readouterr().err
    now += 10.0
    progress.dataset(counted(10, completed=250))
    assert "failed 10, reused 0, 5 rows/s" in capsys.readouterr().err
