"""How commands say what they count."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rowmill_contracts.budgets import Budget
    from rowmill_contracts.counts import Counts, Problem
    from rowmill_contracts.events import CodeShown
    from rowmill_contracts.run_questions import RunSummary

MOST_CODES = 3
"""Of how many errors a person is told why rows failed."""
MOST_LETTERS = 300
"""Of an error's message, while its run goes on."""


def rows_told(counts: Counts) -> str:
    """How rows ended, such as ``3 admitted, 2 completed, 0 failed, 0 cancelled, 0 reused, 1 duplicate``."""
    return (
        f"{counts.admitted} admitted, {counts.completed} completed, {counts.failed} failed, {counts.cancelled} cancelled, "
        f"{counts.reused} reused, {numbered(counts.duplicates, 'duplicate')}"
    )


def charged_told(run: RunSummary) -> str:
    """What a run was charged, such as ``2 made live, cost 0.03``."""
    heard = "" if run.charges_known else " (as last heard: the receipt-store does not answer)"
    return f"{run.counts.calls} made live, cost {run.counts.cost}{heard}"


def kept_budget_told(run: RunSummary, given: Budget) -> str | None:
    """What becomes of a budget that is given for a run that exists; None: it has that one."""
    from rowmill.budgets import as_typed  # noqa: PLC0415 - commands load what they need
    from rowmill_contracts.budgets import Limits, limits_of  # noqa: PLC0415

    stands, asked = limits_of(run.budget), limits_of(given)
    if all(getattr(asked, kind) in {None, getattr(stands, kind)} for kind in Limits.__struct_fields__):
        return None
    if run.state in {"completed", "failed", "cancelled"}:
        return f"the run {run.run_id} exists and is over ({run.state}): --budget changes nothing of it"
    has = f"a budget of {', '.join(as_typed(run.budget))}" if run.budget is not None else "no budget"
    wanted = " ".join(f"--budget {word}" for word in as_typed(given))
    return f"the run {run.run_id} exists, with {has}, which {wanted} does not change here; `rowmill runs resume {run.run_id} {wanted}` does"


def other_code_told(play: str, digest: str, loaded: Iterable[CodeShown]) -> str | None:
    """A sentence where services have other code of a play than this digest's, which is that of the files as they are; None: they have the same. Times
    are those of this machine's zone.
    """
    others = [each for each in loaded if each.digest != digest]
    if not others:
        return None
    at = time.strftime("%H:%M:%S", time.localtime(min(each.loaded_at for each in others)))
    if any(each.digest is None for each in others):
        return f"services that run since {at} do not have the play {play!r}; restart `rowmill up` to have it"
    return f"the services run code of {at}; restart `rowmill up` to use your changes"


def retry_code_told(loaded: Iterable[CodeShown]) -> str:
    """By which code rows are worked again, as far as services say what they have; times are those of this machine's zone."""
    at = min((each.loaded_at for each in loaded), default=None)
    when = "when they started" if at is None else f"at {time.strftime('%H:%M:%S', time.localtime(at))}"
    return f"rows are worked again by the code that the services loaded {when}; if you edited yours since, start `rowmill up` again"


def why_told(code: str) -> str:
    """Why a provider does not serve, by the code of the failure that was seen last; empty: nobody knows."""
    if code.startswith("http_"):
        return f"answers {code.removeprefix('http_')}"
    return {"": "does not serve", "connection_failed": "cannot be reached", "payment": "asks to be paid"}.get(code, f"fails with {code}")


def numbered(count: int, thing: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def problem_told(problem: Problem) -> str:
    """An error as a sentence, with its code and where it happened: rows are counted from 1, as in the input."""
    row = None if problem.row is None else problem.row + 1
    where = [f"{name} {value}" for name, value in (("column", problem.column), ("row", row), ("tool", problem.tool)) if value is not None]
    return f"{problem.message} ({', '.join([problem.code, *where])})"


def first_error_told(problem: Problem) -> str:
    """Why rows began to fail, on one line that is not too long for a look."""
    from rowmill.said import on_one_line  # noqa: PLC0415 - commands load what they need

    short = on_one_line(problem.message, MOST_LETTERS)
    return f"a row failed: {problem_told(msgspec.structs.replace(problem, message=short))}; others of the same code are only counted"


def failed_told(run: RunSummary, codes: Mapping[str, int]) -> str | None:
    """How many rows of a run failed, of which errors most, and what can be done; None: none did. ``codes``: failed rows by their error's code, as
    far as that is known.
    """
    failed = run.counts.failed
    if not failed or run.state not in {"completed", "failed"}:
        return None
    most = sorted(codes.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"{code} ({count})" for code, count in most[:MOST_CODES]]
    why = f": {', '.join(listed)}{', and others' if len(most) > MOST_CODES or sum(codes.values()) < failed else ''}" if listed else ""
    it = "it" if failed == 1 else "them"
    settle = "; first `rowmill receipts settle` those whose outcome is unknown (`rowmill receipts list --state unknown`)"
    return (
        f"{numbered(failed, 'row')} failed{why}; `rowmill runs retry {run.run_id}` works {it} again, while `rowmill up` runs"
        f"{settle if 'outcome_unknown' in codes else ''}"
    )


def hidden_told(run: RunSummary, inputs: Mapping[str, Collection[str]]) -> list[str]:
    """A sentence for each column of a staged input in whose place a dataset computed another. ``inputs``: columns by the input's id."""
    hidden = dict.fromkeys(
        name for dataset in run.datasets for name in dataset.columns if name in inputs.get(dataset.input_id, ()) and not name.startswith("_")
    )
    return [f"the input's column {name!r} is hidden: the play computes a column of that name" for name in hidden]
