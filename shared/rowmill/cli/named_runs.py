"""What a command that names a run may do with one that exists: come back to it, with what it was started with. Nothing else is the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rowmill.cli.wording import numbered
from rowmill.errors import UsageError
from rowmill_contracts.digests import plain_digest
from rowmill_contracts.run_questions import GivenInput, RunSummary
from rowmill_contracts.runs import InputSealed


def not_compared(
    run: RunSummary, *, play: str, plain: Mapping[str, Any], seals: Mapping[str, tuple[str, InputSealed]], limit: int | None, force: str | None
) -> list[str]:
    """A sentence for each file of which nobody can tell whether it is what the run works. A ``force`` that is not repeated makes no other run.

    ``seals``: of each staged input by its field, the name of its file and its seal.

    Raises:
        UsageError: the run was started with something else; says with what, and that another name is needed.

    """
    if run.play != play:
        raise _other(run, f"is one of the play {run.play!r}, not of {play!r}")
    if run.given is None:  # an admission of before
        return [_unknown(run, name) for name, _ in seals.values()]
    if run.given.limit != limit:
        had = "without a limit" if run.given.limit is None else f"with --limit {run.given.limit}"
        raise _other(run, f"was started {had}, not {'without one' if limit is None else f'with --limit {limit}'}")
    if force is not None and run.given.force != force:
        raise _other(
            run, f"was started {'without --force' if run.given.force is None else f'with --force {run.given.force}'}, not with --force {force}"
        )
    if run.given.plain != plain_digest(msgspec.json.encode(dict(plain))):
        raise _other(run, "was started with other values for the play's input")
    by_field = {each.field: each for each in run.given.inputs}
    told = []
    for field, (name, seal) in seals.items():
        known = by_field.get(field) or by_field.get("")
        if known is None:
            raise _other(run, f"was started without a staged input {field!r}")
        same = _is_same(known, seal)
        if same is False:
            raise _other(
                run, f"works another file, of {numbered(known.rows or 0, 'row')}; {name}, of {numbered(seal.rows, 'row')}, is not what it works"
            )
        if same is None:
            told.append(_unknown(run, name))
    return told


def _is_same(known: GivenInput, seal: InputSealed) -> bool | None:
    """None: it cannot be told, as it is not whole yet, came without a digest, or was cut into other pages."""
    if known.rows is None:
        return None
    if known.rows != seal.rows:
        return False
    if known.digest is None or known.pages != seal.pages:
        return None
    return known.digest == seal.digest


def _other(run: RunSummary, why: str) -> UsageError:
    return UsageError(f"the run {run.run_id} exists ({run.state}) and {why}; nothing was started: name a new run with --run-id, or none")


def _unknown(run: RunSummary, name: str) -> str:
    return f"the run {run.run_id} exists ({run.state}), and whether it works what is in {name} cannot be told: its own rows are worked and written"
