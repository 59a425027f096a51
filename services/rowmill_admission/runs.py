"""A run's state and lease as decisions: who may take, write and release a body, and what ends a run. Pure; knows no table and no message queue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from rowmill.runtime.clock import new_id
from rowmill_admission.owed import Owed
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import NULL
from rowmill_contracts.events import RunEvent
from rowmill_contracts.runs import AdvanceRun, ReleaseRun, RunOptions, RunStart, RunState, StagedInput
from rowmill_contracts.topology import EVENTS, EXECUTOR_ADVANCE

if TYPE_CHECKING:
    from rowmill_admission.datasets import Dataset

OVER: Final = frozenset({"completed", "failed", "cancelled"})
"""States that a run does not leave."""

MAX_IDENTITY: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as stored. ``lease_live``: an executor holds its body now; ``stop_reason`` not None: a RunStop is stored. Times: seconds since the
    epoch by the database's clock. ``attempt``: of the rows that are worked now; ``retrying``: a retry is being prepared. ``code_digest``: of a
    run that was retried, the code that works it since. ``charged``, ``calls``: what it was charged, as the receipt-store told it last, under that
    ``charges_version``.
    """

    run_id: str
    number: int
    org: str
    play: str
    state: RunState
    input: msgspec.Raw
    inputs: list[StagedInput]
    options: RunOptions
    created: float
    finished: float | None = None
    waiting_for: str | None = None
    output: msgspec.Raw = field(default_factory=lambda: NULL)
    error: Problem | None = None
    stop_reason: str | None = None
    halt_reason: str | None = None
    term: int = 0
    lease_id: str | None = None
    lease_live: bool = False
    released_term: int = 0
    advance_wanted: bool = False
    attempt: int = 1
    retrying: bool = False
    code_digest: str | None = None
    charged: Decimal = Decimal(0)
    calls: int = 0
    charges_version: int = 0

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def stopped(self) -> bool:
        return self.stop_reason is not None

    def holds(self, term: int) -> bool:
        """Whether effects of that term are accepted: it is the newest, it was not released, and the run goes on."""
        return not self.over and not self.stopped and term == self.term and self.released_term < term


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two ``RunStart`` the same run. ``from_body``: only the body's digest, which counts for a limited time."""

    text: str
    from_body: bool


def identity_of(start: RunStart, message_id: str, body: bytes) -> Identity:
    """The run id that the client chose, else the message's id, else the body's digest: a redelivery is always the same run."""
    if start.run_id is not None:
        return Identity(start.run_id, from_body=False)
    if 0 < len(message_id) <= MAX_IDENTITY:
        return Identity(message_id, from_body=False)
    return Identity(hashlib.sha256(body).hexdigest()[:32], from_body=True)


def run_id_for(identity: Identity, age_of_last: float | None, earlier: int, window: float) -> str | None:
    """The id for a new run, or None where the message repeats the last one.

    ``age_of_last``: seconds since the newest run of this identity was stored (None: there is none); ``earlier``: how many there are.
    """
    if age_of_last is None:
        return identity.text
    if not identity.from_body or age_of_last < window:
        return None
    return f"{identity.text}-{earlier + 1}"


def take(run: Run, lease_id: str) -> Literal["taken", "again", "busy", "over"]:
    """Whether a body may be taken. ``again``: the same request repeated, whose lease still lives: same term."""
    if run.over or run.stopped or run.halt_reason is not None:
        return "over"
    if run.lease_live:
        return "again" if run.lease_id == lease_id else "busy"
    return "taken"


def release(run: Run, request: ReleaseRun) -> Literal["now", "before", "stale"]:
    """Whether a release takes effect ``now``, did so ``before`` (the request is repeated), or comes from an older term."""
    if request.term != run.term or request.lease_id != run.lease_id:
        return "stale"
    if run.released_term == run.term:
        return "before"
    return "stale" if run.over else "now"


def advance(run_id: str, reason: str) -> Owed:
    return Owed(run_id, AdvanceRun(run_id=run_id, reason=reason), EXECUTOR_ADVANCE)


def told(
    run: Run,
    state: RunState,
    counts: Counts,
    *,
    output: msgspec.Raw = NULL,
    error: Problem | None = None,
    waiting_for: str | None = None,
) -> Owed:
    """The event that says that the run's state changed."""
    event = RunEvent(
        event_id=new_id(),
        run_id=run.run_id,
        play=run.play,
        state=state,
        counts=counts,
        cost=counts.cost,
        output=output,
        error=error,
        waiting_for=waiting_for,
    )
    return Owed(run.run_id, event, f"run.{state}.{run.play}", EVENTS)


def needs_retry(run: Run, dataset: Dataset) -> bool:
    """Whether a dataset of a run that is over has something to be worked again: failed rows, rows that were cancelled because the run failed, or rows
    that were not admitted because of an error.
    """
    return dataset.counts.failed > 0 or dataset.error is not None or (run.state == "failed" and dataset.counts.cancelled > 0)


def mismatch(dataset: str, counts: Counts) -> Problem | None:
    """The accounting rule of a closed dataset (SPEC 2.8): every admitted row ended in exactly one way."""
    if counts.terminal == counts.admitted:
        return None
    ended = (
        f"{counts.completed} completed, {counts.failed} failed, {counts.cancelled} cancelled, {counts.reused} reused, {counts.duplicates} duplicates"
    )
    return Problem(code="accounting", message=f"dataset {dataset!r}: {counts.admitted} rows were admitted, but {counts.terminal} ended ({ended})")


def counts_of(run: Run, stored: Sequence[Dataset]) -> Counts:
    """A run's counts: its rows are the sum over its datasets, its calls and cost what it was charged, which its rows do not add up to: calls fail,
    are tried again, are made by its body.
    """
    counts = [each.counts for each in stored]
    return Counts(
        admitted=sum(each.admitted for each in counts),
        completed=sum(each.completed for each in counts),
        failed=sum(each.failed for each in counts),
        cancelled=sum(each.cancelled for each in counts),
        reused=sum(each.reused for each in counts),
        duplicates=sum(each.duplicates for each in counts),
        calls=run.calls,
        cost=run.charged,
    )
