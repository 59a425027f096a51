"""Starting, staging, advancing and ending runs: what clients, admission and executors say to each other. What is asked of runs that exist is in
`rowmill_contracts.run_questions`.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec

from rowmill_contracts.budgets import Limits
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import NULL, Message, message

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]+$", max_length=64)]
"""Play, dataset and state names are routing-key words."""

Identity = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
"""An id that a client chose or that was made for it."""

RunState = Literal["queued", "running", "waiting", "completed", "failed", "cancelled"]
Force = Literal["tools", "failed", "steps", "all"]
Mode = Literal["all", "net_new"]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run may be asked for (SPEC 5.3)."""

    force: Force | None = None
    mode: Mode | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    budget: Decimal | Limits | None = None
    fixtures: str | None = None


# ---- public -----------------------------------------------------------------------------------------------------------------------------


@message()
class RunStart(Message, frozen=True, kw_only=True):
    """Start a run. The same ``run_id`` is one run, however often it is published.

    ``input`` fills the fields of the play's input model; ``rows`` (rows in the message) or ``input_ref`` (id of a staged input, or a map
    from field name to input id) fill its staged input.
    """

    play: Name
    run_id: Identity | None = None
    input: dict[str, Any] = {}
    rows: list[msgspec.Raw] | None = None
    input_ref: str | dict[str, str] | None = None
    options: RunOptions = RunOptions()
    org: Name | None = None


@message()
class RunStop(Message, frozen=True, kw_only=True):
    """Stop a run; for a run not known yet: it will start cancelled."""

    run_id: Identity
    reason: str = ""


@message()
class EventArrived(Message, frozen=True, kw_only=True):
    """Something outside happened that a play may wait for."""

    name: str
    key: str
    payload: msgspec.Raw = NULL
    event_id: Identity | None = None


@message()
class InputPage(Message, frozen=True, kw_only=True):
    """One page of a staged input; ``rows`` are JSON objects. A page may be published again, unchanged."""

    input_id: Identity
    page: Annotated[int, msgspec.Meta(ge=0)]
    rows: list[msgspec.Raw]


@message()
class InputSealed(Message, frozen=True, kw_only=True):
    """The staged input is whole: ``pages`` pages numbered from 0, ``rows`` rows.

    ``digest``, where given, is the hexadecimal SHA-256 over the pages' digests (32 bytes each) in order; a page's digest is the SHA-256
    over its rows' JSON texts, each followed by a line feed. See `rowmill_contracts.digests`.
    """

    input_id: Identity
    pages: Annotated[int, msgspec.Meta(ge=0)]
    rows: Annotated[int, msgspec.Meta(ge=0)]
    digest: str | None = None


# ---- internal: driving the play body ----------------------------------------------------------------------------------------------------


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One ``ctx`` call of a play body that is on record. ``position`` counts calls from 0 in body order."""

    position: int
    kind: str
    name: str
    request: str = ""
    result: msgspec.Raw = NULL


class StagedInput(msgspec.Struct, frozen=True, kw_only=True):
    """A staged input that a run was started with. ``field`` is empty where the client named none (the only ``Rows`` field)."""

    input_id: str
    field: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All an executor needs to replay a body. ``started_at``: seconds since the epoch, by the database's clock; ``number`` rises per run."""

    run_id: str
    number: int
    org: str
    play: str
    started_at: float
    input: msgspec.Raw = NULL
    inputs: list[StagedInput] = []
    options: RunOptions = RunOptions()
    calls: list[RecordedCall] = []
    code_digest: str | None = None


@message()
class AdvanceRun(Message, frozen=True, kw_only=True):
    """Run the body of this run from the top: something that it waits for may have changed."""

    run_id: str
    reason: str = ""


@message()
class TakeRun(Message, frozen=True, kw_only=True):
    """Ask for the run's lease (or, with ``read_only``, for its record alone, which capture needs)."""

    run_id: str
    lease_id: str = ""
    read_only: bool = False


@message()
class RunTaken(Message, frozen=True, kw_only=True):
    """``busy``: another executor holds a live lease. ``over``: the run has ended or waits for an operator. ``unknown``: no such run."""

    outcome: Literal["taken", "busy", "over", "unknown"]
    term: int = 0
    lease_seconds: float = 0
    run: RunRecord | None = None


@message()
class RenewRun(Message, frozen=True, kw_only=True):
    run_id: str
    term: int
    lease_id: str


@message()
class RecordCalls(Message, frozen=True, kw_only=True):
    """Put ``ctx`` calls of the body on record; refused where the term is not the current one."""

    run_id: str
    term: int
    calls: list[RecordedCall]


@message()
class ReleaseRun(Message, frozen=True, kw_only=True):
    """The body ended (``completed``, ``failed``) or was dropped at a call that must wait (``waiting``, with what it waits for)."""

    run_id: str
    term: int
    lease_id: str
    outcome: Literal["waiting", "completed", "failed"]
    waiting_for: str | None = None
    output: msgspec.Raw = NULL
    error: Problem | None = None


@message()
class TermAnswer(Message, frozen=True, kw_only=True):
    """Whether the sender still holds the run at that term, and with it whether the request took effect."""

    held: bool
    stopped: bool = False


class ColumnInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What others must know of a column: its name, version, and what rules out reuse of its cells."""

    name: str
    version: str
    recompute: bool = False
    recompute_on_error: bool = False
    persisted: bool = True


@message()
class OpenDataset(Message, frozen=True, kw_only=True):
    """Open a dataset over a sealed (or still arriving) input. The first one stored for (run, dataset) decides; asked again, it answers.

    ``key``: column names; None: the whole row. ``key_function``: the key is an author's function, asked of executors by `KeyPage`.
    """

    run_id: str
    term: int
    dataset: Name
    input_id: str
    columns: list[ColumnInfo]
    code_digest: str
    key: list[str] | None = None
    key_function: bool = False
    source_row_identity: bool = False
    mode: Mode = "all"
    on_error: Literal["isolate", "fail"] = "isolate"
    concurrency: int | None = None


@message()
class DatasetOpened(Message, frozen=True, kw_only=True):
    """``open``: wait, an `AdvanceRun` follows. ``closed``: every admitted row is terminal. ``failed``: see ``error``. ``stale``: old term."""

    outcome: Literal["open", "closed", "failed", "stale"]
    counts: Counts = Counts()
    error: Problem | None = None


class ParkedRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row that waits outside any process. ``waits`` counts its waits, this one included; ``wait_ms`` None: until something happens.
    ``provider``: who keeps it waiting, if one does; it comes back as soon as that one serves again. ``away``: it does not serve now.
    """

    key: str
    index: int
    page: int
    attempt: int
    waits: int
    wait_ms: int | None = None
    asked: float | None = None
    provider: str = ""
    away: bool = False


@message()
class ProviderServes(Message, frozen=True, kw_only=True):
    """A provider that had kept rows waiting serves again. A hint: rows that wait for it come back, their runs in turn and of each run the oldest
    first: ``at_once`` of them now (below 0: they begin so many turns later) and then ``per_second``, in steps of so many seconds (``every``).
    It speaks of the next ``seconds``, and is told anew before they are over. ``sooner``: it had not been away, but has nothing to do while rows wait
    for their turn: none of them comes later for it, and rows that were not admitted yet do not wait for them.
    """

    org: str
    provider: str
    per_second: Annotated[float, msgspec.Meta(gt=0)]
    at_once: int = 1
    every: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    sooner: bool = False


@message()
class RowsParked(Message, frozen=True, kw_only=True):
    run_id: str
    dataset: str
    reason: str
    rows: list[ParkedRow]
    halted: bool = False


class PageProgress(msgspec.Struct, frozen=True, kw_only=True):
    """``open`` rows of the page were sent and have not ended."""

    page: int
    open: int


@message()
class RowsCommitted(Message, frozen=True, kw_only=True):
    """Absolute counts of a dataset; the highest ``version`` wins. ``pages``: absolute too, for the pages that this commit changed."""

    run_id: str
    dataset: str
    counts: Counts
    version: int
    pages: list[PageProgress] = []
    first_error: Problem | None = None
