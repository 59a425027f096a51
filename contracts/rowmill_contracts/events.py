"""Events anyone may listen to, on the topic exchange `rowmill.events`: at least once, after the commit that they speak of."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec

from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, NULL, Message, message
from rowmill_contracts.runs import RunState


class RowEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """(run, dataset, key, attempt) identifies a row in an event, whatever page it comes in."""

    key: str
    index: int
    attempt: int
    status: Literal["completed", "failed", "cancelled"]
    reused: bool = False
    data: msgspec.Raw = EMPTY_OBJECT
    error: Problem | None = None


@message()
class RowsCompleted(Message, frozen=True, kw_only=True):
    """Routing key ``rows.completed.<play>.<dataset>``."""

    event_id: str
    run_id: str
    play: str
    dataset: str
    rows: list[RowEvent]


@message()
class RowsFailed(Message, frozen=True, kw_only=True):
    """Routing key ``rows.failed.<play>.<dataset>``; cancelled rows come here too, with their status."""

    event_id: str
    run_id: str
    play: str
    dataset: str
    rows: list[RowEvent]


@message()
class RunEvent(Message, frozen=True, kw_only=True):
    """Routing key ``run.<state>.<play>``."""

    event_id: str
    run_id: str
    play: str
    state: RunState
    counts: Counts = Counts()
    cost: Decimal = Decimal(0)
    output: msgspec.Raw = NULL
    error: Problem | None = None
    waiting_for: str | None = None


@message()
class DatasetEvent(Message, frozen=True, kw_only=True):
    """Routing key ``dataset.<state>.<play>.<dataset>``, state ``opened``, ``progress`` (at most every 250 ms) or ``closed``.
    ``run_calls``, ``run_cost``: what the whole run was charged by then, in events of its progress; None: not known. ``first_error``: that of the
    first of its rows that was seen to have failed; None: none has.
    """

    event_id: str
    run_id: str
    play: str
    dataset: str
    state: Literal["opened", "progress", "closed"]
    counts: Counts
    at: float
    total_rows: int | None = None
    run_calls: int | None = None
    run_cost: Decimal | None = None
    first_error: Problem | None = None


@message()
class Control(Message, frozen=True, kw_only=True):
    """A hint on the fanout `rowmill.control`: the run was stopped or halted, for that ``reason``; nothing depends on its arrival."""

    run_id: str
    action: Literal["stop", "halt", "resume"]
    reason: str = ""


@message()
class AskCode(Message, frozen=True, kw_only=True):
    """A question on the fanout `rowmill.control`: each executor and gateway that hears it answers with `CodeShown` on ``reply_to``."""

    play: str


@message()
class CodeShown(Message, frozen=True, kw_only=True):
    """The code that a process has. ``digest``: of the play's module and the project's modules that it imports; None: it does not have that play.
    ``loaded_at``: when it was loaded, in seconds since the epoch.
    """

    service: str
    process: str
    play: str
    digest: str | None
    loaded_at: float


@message()
class AskLanes(Message, frozen=True, kw_only=True):
    """A question on the fanout `rowmill.control`: each gateway that hears it answers with `LanesShown` on ``reply_to``."""

    org: str | None = None
    provider: str | None = None


class LaneView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane as the gateway sees it at this moment.

    ``held``: the gateway has the lane's shard, which is the right to spend. ``closed_seconds``: until it sends again. ``unavailable_seconds``: for
    how long the provider has not served. ``probing``: it was unreachable, and one request at a time finds out whether it is back.
    ``permits``: requests that its rate allows within the next second, None where it has none. ``in_flight``: requests open now, of
    ``concurrency`` at most. ``waiting``: calls in hand whose request is not open. ``oldest_asked``: when the first of them was first asked for, in
    seconds since the epoch. ``why``: the code of the failure for which the provider does not serve, such as ``http_503``; empty where it serves, or
    where this gateway has not seen one itself.
    """

    org: str
    provider: str
    shard: int
    held: bool
    concurrency: int
    in_flight: int = 0
    waiting: int = 0
    oldest_asked: float | None = None
    closed_seconds: float | None = None
    unavailable_seconds: float | None = None
    probing: bool = False
    rate: str | None = None
    permits: int | None = None
    why: str = ""


@message()
class LanesShown(Message, frozen=True, kw_only=True):
    """One gateway's answer. ``storing``: it can store outcomes, without which it sends nothing (SPEC 3.9)."""

    gateway: str
    lanes: list[LaneView]
    storing: bool = True
