"""What a dead letter's headers say of an error and of the message that died of it."""

from __future__ import annotations

import msgspec
import pytest

from rowmill.errors import UnavailableError
from rowmill.runtime.deliveries import NAMED_ROWS, death_headers, subject_headers
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import AdvanceRun, RunStart
from rowmill_contracts.tools import CallItem, ToolCalls


def raised(error: Exception) -> Exception:
    """The error with a traceback, the same each time."""

    def fails() -> None:
        raise error

    try:
        fails()
    except Exception as caught:
        return caught
    raise AssertionError


def headers(error: Exception) -> dict[str, object]:
    return death_headers(error, service="s", queue="q", exchange="e", key="k", attempts=1, first_failure=1.0, last_failure=2.5)


def test_letters_that_died_of_one_error_at_one_place_have_one_digest_and_others_another() -> None:
    digests = [headers(raised(error))["x-rowmill-traceback-digest"] for error in (KeyError("a"), KeyError("a"), KeyError("b"), ValueError("a"))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(("error", "named"), [(KeyError("a"), "KeyError"), (UnavailableError("away"), UnavailableError.code)])
def test_an_error_of_ours_is_named_by_its_code(error: Exception, named: str) -> None:
    assert headers(error)["x-rowmill-error-type"] == named


def test_an_error_that_says_a_lot_fits_into_a_header_and_times_are_whole_milliseconds() -> None:
    told = headers(ValueError("x" * 1_000_000))
    assert told["x-rowmill-error"] == "x" * 2000
    assert (told["x-rowmill-first-failure-ms"], told["x-rowmill-last-failure-ms"]) == (1000, 2500)


def tasks(count: int) -> RowTasks:
    rows = [RowTask(key=f"{number:04x}", index=number, page=0) for number in range(count)]
    return RowTasks(run_id="r", number=1, org="o", play="p", dataset="d", started_at=0, code_digest="c", rows=rows)


def test_rows_are_named_as_far_as_a_header_holds_them() -> None:
    told = subject_headers(tasks(NAMED_ROWS + 1))
    assert told["x-rowmill-row-keys"].split(",") == [f"{number:04x}" for number in range(NAMED_ROWS)]
    assert {name: told[f"x-rowmill-{name}"] for name in ("run-id", "play", "dataset")} == {"run-id": "r", "play": "p", "dataset": "d"}


def calls(*rows: str) -> ToolCalls:
    items = [CallItem(call_id=str(number), tool="p.t", receipt_key="k", input=msgspec.Raw(b"{}"), row=row) for number, row in enumerate(rows)]
    return ToolCalls(run_id="r", org="o", play="p", started_at=0, calls=items)


@pytest.mark.parametrize(
    ("rows", "dataset", "keys"),
    [
        (["people/aa", "people/bb", "people/aa"], "people", "aa,bb"),
        (["people/aa", "firms/bb"], None, "aa,bb"),
        (["", "people/aa"], "people", "aa"),
        ([""], None, None),
    ],
)
def test_calls_name_the_rows_that_asked_and_a_dataset_where_it_is_one(rows: list[str], dataset: str | None, keys: str | None) -> None:
    told = subject_headers(calls(*rows))
    assert (told.get("x-rowmill-dataset"), told.get("x-rowmill-row-keys")) == (dataset, keys)


def test_what_a_message_does_not_have_is_not_named() -> None:
    assert subject_headers(AdvanceRun(run_id="r")) == {"x-rowmill-run-id": "r"}
    assert subject_headers(RunStart(play="p", rows=[msgspec.Raw(b"{}")])) == {"x-rowmill-play": "p"}
