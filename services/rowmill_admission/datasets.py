"""A dataset's life as decisions: when it is over, how it ended, what `OpenDataset` is answered. Pure; knows no table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rowmill.runtime.clock import new_id
from rowmill_admission.owed import Owed
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import DatasetEvent
from rowmill_contracts.retries import NOT_RETRIED
from rowmill_contracts.run_questions import DatasetSummary
from rowmill_contracts.runs import DatasetOpened, OpenDataset
from rowmill_contracts.topology import EVENTS

DatasetState = Literal["open", "closed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset as stored.

    ``counts``: the newest from the sheet-writer, with ``admitted`` as the feeder knows it (final once ``admission_done``). ``sent``: rows that
    ever went to executors. ``error``: why admission stopped early. ``reopened``: a retry was asked for, and its rows wait for the run's body to come
    to it again. ``input_rows``: rows of the sealed input, where it was read along.
    """

    dataset_seq: int
    run_id: str
    dataset: str
    input_id: str
    definition: OpenDataset
    state: DatasetState = "open"
    error: Problem | None = None
    counts: Counts = field(default_factory=Counts)
    version: int = 0
    first_error: Problem | None = None
    admission_done: bool = False
    sent: int = 0
    sent_bytes: int = 0
    row_limit: int | None = None
    run_window: int = 0
    reopened: bool = False
    input_rows: int | None = None

    @property
    def ended(self) -> int:
        """Rows that had been sent and are terminal."""
        return self.counts.completed + self.counts.failed + self.counts.cancelled

    @property
    def is_over(self) -> bool:
        """Open still, with every row admitted that will be, and each of them terminal."""
        return self.state == "open" and self.admission_done and self.counts.terminal >= self.counts.admitted

    @property
    def total_rows(self) -> int | None:
        """Rows that the run is asked for: those of the input, or fewer by its limit. None: not known yet."""
        if self.input_rows is None:
            return None
        return self.input_rows if self.row_limit is None else min(self.input_rows, self.row_limit)


def ending(dataset: Dataset) -> tuple[DatasetState, Problem | None]:
    """How a dataset that is over ended: failed if admission was stopped by an error, or if every row that was worked failed (SPEC 2.7)."""
    if dataset.error is not None:
        return "failed", dataset.error
    counts = dataset.counts
    if counts.failed > 0 and counts.completed + counts.reused + counts.cancelled == 0:
        first = dataset.first_error or Problem(code="rows_failed", message="no error is on record")
        return "failed", Problem(
            code=first.code,
            message=f"every row of dataset {dataset.dataset!r} failed; the first: {first.message}",
            column=first.column,
            row=first.row,
            tool=first.tool,
            traceback_digest=first.traceback_digest,
        )
    return "closed", None


def stops_admission(dataset: Dataset) -> Problem | None:
    """The error that ends admission: with ``on_error="fail"`` the first failed row."""
    if dataset.error is not None:
        return dataset.error
    if dataset.definition.on_error == "fail" and dataset.counts.failed > 0:
        return dataset.first_error or Problem(code="row_failed", message=f"a row of dataset {dataset.dataset!r} failed")
    return None


def not_retried(dataset: Dataset) -> Problem | None:
    """Of a dataset whose run has ended: why what was to be worked again of it stays failed. None: no retry was asked for, or the body came to it."""
    if not dataset.reopened:
        return None
    return Problem(code=NOT_RETRIED, message=f"its run was retried, and ended before its body came to dataset {dataset.dataset!r}; it can be retried")


def opened(dataset: Dataset) -> DatasetOpened:
    """The answer to `OpenDataset`, first time or again."""
    return DatasetOpened(outcome=dataset.state, counts=dataset.counts, error=dataset.error if dataset.state == "failed" else None)


def told(dataset: Dataset, play: str, state: Literal["opened", "progress", "closed"], *, at: float = 0, charges: RunCharges | None = None) -> Owed:
    """The event that says how far the dataset is. ``at``: seconds since the epoch. ``charges``: of its run."""
    event = DatasetEvent(
        event_id=new_id(),
        run_id=dataset.run_id,
        play=play,
        dataset=dataset.dataset,
        state=state,
        counts=dataset.counts,
        at=at,
        total_rows=dataset.total_rows,
        run_calls=None if charges is None else charges.calls,
        run_cost=None if charges is None else charges.cost,
        first_error=dataset.first_error if dataset.counts.failed else None,
    )
    return Owed(dataset.run_id, event, f"dataset.{state}.{play}.{dataset.dataset}", EVENTS)


def summary(dataset: Dataset) -> DatasetSummary:
    """The dataset as clients are shown it."""
    return DatasetSummary(
        dataset=dataset.dataset,
        state=dataset.state,
        counts=dataset.counts,
        total_rows=dataset.total_rows,
        columns=[column.name for column in dataset.definition.columns],
        input_id=dataset.input_id,
    )
