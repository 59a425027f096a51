"""What must hold of a run besides its rows: that everybody counts the same, and that whatever is open is waited for by someone. Pure.

``patience``: seconds that something may be under way before it counts as stuck; the services repair what was lost every 30 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from rowmill.doctor.books import Books, differing
from rowmill.doctor.findings import Finding
from rowmill_contracts.counts import Counts

OVER: Final = frozenset({"completed", "failed", "cancelled"})
PAGE_AGAIN_MINUTES: Final = 15

_ADMISSION: Final = "Look whether admission runs (`rowmill doctor`) and what its log says; it repairs this every 30 s."


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A row of ``admission.runs``. ``unheld_for``: seconds since its body's lease ran out, or since anything changed."""

    run_id: str
    state: str
    waiting_for: str | None
    stopped: bool
    halt_reason: str | None
    leased: bool
    unheld_for: float

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A row of ``admission.datasets`` with the sheet-writer's counts. ``due_since``: seconds that the first waiting row is overdue; None: none has
    a time. ``unfed_for``, ``silent_for``: seconds since its feeder's lease ran out, since admission heard of it.
    """

    dataset: str
    state: str
    admission_done: bool
    counts: Counts
    version: int
    written: Counts | None
    written_version: int
    input_state: str | None
    unfed_for: float
    silent_for: float
    waiting: int
    due_since: float | None
    books: Books


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A receipt's lease that has run out. ``key``: hexadecimal."""

    key: str
    tool: str
    state: str
    holder: str
    expired_for: float


@dataclass(frozen=True, kw_only=True)
class Owing:
    """Messages of a type that are to be sent, the oldest of them for ``age`` seconds."""

    message_type: str
    messages: int
    age: float


@dataclass(frozen=True, kw_only=True)
class Charged:
    """What the run was charged: by its charges, of which ``counted`` are one call each, by what is ``told`` of it with its ``calls``, by the account
    of its budget (None: it has none), and by what admission ``heard`` last.
    """

    charged: Decimal | None
    counted: int
    told: Decimal
    calls: int
    version: int
    account: Decimal | None
    heard: Decimal
    heard_calls: int
    heard_version: int


def charges(found: Charged) -> list[Finding]:
    """That the cost and the calls that are shown of a run are what it was charged."""
    charged = found.charged or Decimal(0)
    wrong = []
    if found.told != charged:
        wrong.append(f"The run is said to have cost {found.told}, and its charges add up to {charged}.")
    if found.account is not None and found.account != charged:
        wrong.append(f"The account of the run's budget says {found.account}, and its charges add up to {charged}.")
    if found.calls < found.counted:
        wrong.append(f"The run is said to have made {found.calls} calls, and {found.counted} are charged.")
    if found.heard_version > found.version:
        wrong.append(f"Admission has charges of version {found.heard_version}, and the receipt-store made only {found.version}.")
    elif found.heard_version == found.version > 0 and (found.heard, found.heard_calls) != (found.told, found.calls):
        wrong.append(f"Admission heard of {found.heard_calls} calls that cost {found.heard}, and was told of {found.calls} that cost {found.told}.")
    advice = "This should never happen: were both services' tables restored from the same backup? Else keep the database as it is and report it."
    return [Finding("charges", problem, advice) for problem in wrong]


def accounts(dataset: DatasetFacts, patience: float) -> list[Finding]:
    """That admission and the sheet-writer count the same, and that every admitted row of a closed dataset has ended."""
    found = dataset.books.findings(dataset.written)
    written = dataset.written or Counts()
    name = f"Dataset {dataset.dataset!r}"
    if dataset.version > dataset.written_version:
        problem = f"{name}: admission has counts of version {dataset.version}, and the sheet-writer made only {dataset.written_version}."
        found.append(Finding("counts", problem, "This should never happen: were both services' tables restored from the same backup?"))
    elif dataset.version < dataset.written_version:
        if dataset.silent_for > patience:
            advice = "Replay dead letters of admission.counts.v1, if there are any." if dataset.state != "open" else _ADMISSION
            found.append(Finding("counts", f"{name}: admission has not heard the newest counts: {differing(dataset.counts, written)}.", advice))
    elif dataset.version and (dataset.admission_done or dataset.state != "open") and dataset.counts != written:
        found.append(Finding("counts", f"{name}: admission and the sheet-writer count otherwise: {differing(dataset.counts, written)}.", _ADMISSION))
    if dataset.state == "closed" and dataset.counts.terminal != dataset.counts.admitted:
        found.append(
            Finding("counts", f"{name} is closed with {dataset.counts.admitted} rows admitted and {dataset.counts.terminal} ended.", _ADMISSION)
        )
    return found


def waits(run: RunFacts, datasets: Sequence[DatasetFacts], patience: float, *, queued: int | None) -> list[Finding]:
    """That what is open is waited for by someone. ``queued``: messages in queues that rows travel by; None: not known."""
    found: list[Finding] = []
    opened = [dataset for dataset in datasets if dataset.state == "open"]
    for dataset in opened:
        found += _open_dataset(run, dataset, patience, queued=queued)
    if run.over or run.stopped or run.halt_reason is not None or run.leased or run.unheld_for <= patience:
        return found
    what = run.waiting_for or ""
    if run.state != "waiting":
        problem = f"The run is {run.state}, and for {run.unheld_for:.0f} s no executor has held it."
        found.append(Finding("waiting", problem, "Look whether an executor runs that has its play (`rowmill doctor`)."))
    elif what.startswith("dataset:") and not opened:
        problem = f"The run waits for {what}, and no dataset of it is open."
        found.append(Finding("waiting", problem, _ADMISSION))
    elif not what:
        found.append(Finding("waiting", "The run waits, and nothing says for what.", "Stop it, and start it again: what is paid for stays paid."))
    return found


def _open_dataset(run: RunFacts, dataset: DatasetFacts, patience: float, *, queued: int | None) -> list[Finding]:
    name = f"Dataset {dataset.dataset!r}"
    found: list[Finding] = []
    counts = dataset.counts
    if dataset.admission_done and counts.terminal >= counts.admitted and dataset.silent_for > patience:
        found.append(Finding("waiting", f"{name} is open although all of its {counts.admitted} rows have ended.", _ADMISSION))
    if not dataset.admission_done and dataset.input_state in {"sealed", "failed"} and dataset.unfed_for > patience:
        found.append(Finding("leases", f"{name} has rows to admit, and for {dataset.unfed_for:.0f} s nobody has fed it.", _ADMISSION))
    if dataset.due_since is not None and dataset.due_since > patience and run.halt_reason is None:
        problem = f"{name}: rows that waited have been due for {dataset.due_since:.0f} s."
        found.append(Finding("waiting", problem, _ADMISSION))
    lost = dataset.books.open - dataset.waiting
    if lost > 0 and queued == 0 and dataset.silent_for > patience:
        problem = f"{name}: {lost} rows were sent out and have not ended, and no queue holds a message that could be theirs."
        advice = f"Their pages are sent again {PAGE_AGAIN_MINUTES} minutes after they were sent; if that does not help, look at the executors' logs."
        found.append(Finding("messages", problem, advice))
    return found


def leases(found: Sequence[Lease], patience: float) -> list[Finding]:
    """That no receipt is in the hand of someone who is gone."""
    stuck = [lease for lease in found if lease.expired_for > patience]
    return [
        Finding(
            "leases",
            f"Receipts of the run that are {state} under leases that ran out: {len(of_state)}, the first {of_state[0].expired_for:.0f} s ago "
            f"(tool {of_state[0].tool}, held by {of_state[0].holder}, key {of_state[0].key}).",
            "Nothing was sent for them; the next call of the same key takes each over."
            if state == "queued"
            else "The next call of the same key settles each; `rowmill receipts` shows them and settles them by hand.",
        )
        for state in ("queued", "running")
        if (of_state := [lease for lease in stuck if lease.state == state])
    ]


def owing(found: Sequence[Owing], patience: float, *, owner: str) -> list[Finding]:
    """That what a commit called for has been sent."""
    return [
        Finding(
            "messages",
            f"Owed by {owner} for {each.age:.0f} s, and not sent: {each.messages} {each.message_type}.",
            f"They go out as soon as {owner} and the broker run; look at both (`rowmill doctor`).",
        )
        for each in found
        if each.age > patience
    ]
