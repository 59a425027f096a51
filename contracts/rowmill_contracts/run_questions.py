"""What clients ask of runs that exist, and ask them to do; admission answers."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

import msgspec

from rowmill_contracts.budgets import Limits
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import NULL, Message, message
from rowmill_contracts.runs import Force, RunState


class DatasetSummary(msgspec.Struct, frozen=True, kw_only=True):
    dataset: str
    state: Literal["open", "closed", "failed"]
    counts: Counts
    total_rows: int | None = None
    columns: list[str] = []
    input_id: str = ""


class GivenInput(msgspec.Struct, frozen=True, kw_only=True):
    """A staged input of a run. ``field`` is empty where the client named none. What its seal says is None until it is whole: ``pages``, ``rows``, and
    where the client gave it the ``digest`` (see `InputSealed`).
    """

    input_id: str
    field: str = ""
    pages: int | None = None
    rows: int | None = None
    digest: str | None = None


class RunGiven(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was started with. ``plain``: `plain_digest` of its `RunStart`'s ``input``."""

    plain: str
    inputs: list[GivenInput] = []
    limit: int | None = None
    force: Force | None = None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run as `rowmill runs` shows it. Times are seconds since the epoch. ``charges_known`` false: its calls and cost are what was last heard, since
    the receipt-store does not answer. ``retrying``: it is over, and its retry is being prepared. ``budget``: as it stands now. ``rows_waiting``: of a
    run that is asked for by its id, how many of its rows wait outside any process for their turn at a provider or for it to serve, by its name.
    ``given``: of such a run, too, what it was started with.
    """

    run_id: str
    number: int
    org: str
    play: str
    state: RunState
    counts: Counts
    waiting_for: str | None = None
    created_at: float = 0
    started_at: float | None = None
    finished_at: float | None = None
    error: Problem | None = None
    output: msgspec.Raw = NULL
    datasets: list[DatasetSummary] = []
    charges_known: bool = True
    retrying: bool = False
    budget: Decimal | Limits | None = None
    rows_waiting: dict[str, int] = {}
    given: RunGiven | None = None


@message()
class ListRuns(Message, frozen=True, kw_only=True):
    """Newest first. ``before``: run numbers below it, for the next page."""

    org: str | None = None
    play: str | None = None
    state: RunState | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    before: int | None = None


@message()
class RunsListed(Message, frozen=True, kw_only=True):
    runs: list[RunSummary]


@message()
class AskOldestRun(Message, frozen=True, kw_only=True):
    """Since when is a run not over, or could be retried? Every run that is stored by now is looked at, also those whose commit was under way."""


@message()
class OldestRun(Message, frozen=True, kw_only=True):
    """When the oldest run started that is not over, or could be retried, seconds since the epoch by the database's clock; None: there is none."""

    started_at: float | None = None


@message()
class GetRun(Message, frozen=True, kw_only=True):
    run_id: str


@message()
class PauseRun(Message, frozen=True, kw_only=True):
    """Let a run wait until it is resumed: what is sent is recorded, nothing new is. Answered by `RunShown`, once the receipt-store knows."""

    run_id: str


@message()
class ResumeRun(Message, frozen=True, kw_only=True):
    """Let a halted run go on, with another ``budget`` of each kind that is given; nothing changes for a run that is over. Answered by `RunShown`."""

    run_id: str
    budget: Decimal | Limits | None = None


@message()
class RunShown(Message, frozen=True, kw_only=True):
    """``run``: None where there is no such run. ``refused``: why it was not done, to a person."""

    run: RunSummary | None = None
    refused: str = ""
