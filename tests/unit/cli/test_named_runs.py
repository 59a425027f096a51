"""A command that names a run which exists comes back to it with what it was started with, or is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from rowmill.cli.named_runs import not_compared
from rowmill.errors import UsageError
from rowmill_contracts.counts import Counts
from rowmill_contracts.digests import plain_digest
from rowmill_contracts.run_questions import GivenInput, RunGiven, RunSummary
from rowmill_contracts.runs import InputSealed

STAGED = GivenInput(input_id="r1.leads", field="leads", pages=2, rows=600, digest="aa")
GIVEN = RunGiven(plain=plain_digest(b'{"b": [1, 2.5], "a": "x"}'), inputs=[STAGED], limit=10, force="tools")
RUN = RunSummary(run_id="r1", number=1, org="default", play="leads", state="completed", counts=Counts(cost=Decimal(0)), given=GIVEN)
SEAL = InputSealed(input_id="r1", pages=2, rows=600, digest="aa")
SAME: dict[str, Any] = {"play": "leads", "plain": {"a": "x", "b": [1, 2.5]}, "seals": {"leads": ("g.csv", SEAL)}, "limit": 10, "force": "tools"}


def _sealed(**changes: Any) -> dict[str, tuple[str, InputSealed]]:
    return {"leads": ("g.csv", msgspec.structs.replace(SEAL, **changes))}


def test_what_a_run_was_started_with_is_the_same_run_also_without_its_force() -> None:
    assert not_compared(RUN, **SAME) == []
    assert not_compared(RUN, **{**SAME, "force": None}) == []


def test_an_input_that_was_staged_for_no_field_is_compared_with_the_file_of_any() -> None:
    run = msgspec.structs.replace(RUN, given=msgspec.structs.replace(GIVEN, inputs=[msgspec.structs.replace(STAGED, field="")]))
    assert not_compared(run, **SAME) == []
    with pytest.raises(UsageError, match="works another file"):
        not_compared(run, **{**SAME, "seals": _sealed(digest="bb")})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"play": "other"}, "is one of the play 'leads', not of 'other'"),
        ({"plain": {"a": "y", "b": [1, 2.5]}}, "other values for the play's input"),
        ({"limit": None}, "was started with --limit 10, not without one"),
        ({"limit": 11}, "was started with --limit 10, not with --limit 11"),
        ({"force": "all"}, "was started with --force tools, not with --force all"),
        ({"seals": _sealed(digest="bb")}, "works another file, of 600 rows; g.csv, of 600 rows, is not what it works"),
        ({"seals": _sealed(rows=1, pages=1)}, "works another file, of 600 rows; g.csv, of 1 row, is not what it works"),
        ({"seals": {"others": ("g.csv", SEAL)}}, "without a staged input 'others'"),
    ],
)
def test_anything_else_is_refused_saying_which_run_it_is(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=r"^the run r1 exists \(completed\) and .*: name a new run with --run-id, or none$") as refused:
        not_compared(RUN, **{**SAME, **change})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "staged", [GivenInput(input_id="r1.leads", field="leads"), msgspec.structs.replace(STAGED, digest=None), msgspec.structs.replace(STAGED, pages=3)]
)
def test_where_nobody_can_tell_it_is_said_whose_rows_are_written(staged: GivenInput) -> None:
    run = msgspec.structs.replace(RUN, given=msgspec.structs.replace(GIVEN, inputs=[staged]))
    said = "the run r1 exists (completed), and whether it works what is in g.csv cannot be told: its own rows are worked and written"
    assert not_compared(run, **SAME) == [said]
    assert not_compared(msgspec.structs.replace(RUN, given=None), **SAME) == [said]
