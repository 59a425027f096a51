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
    """Routing key ``dataset.<state>.<play>.<dataset>``, state ``opened``, ``progress`` (at most every 250 ms) or ``closed``."""

    event_id: str
    run_id: str
    play: str
    dataset: str
    state: Literal["opened", "progress", "closed"]
    counts: Counts
    at: float
    total_rows: int | None = None


@message()
class Control(Message, frozen=True, kw_only=True):
    """A hint on the fanout `rowmill.control`: the run was stopped or halted; nothing depends on its arrival."""

    run_id: str
    action: Literal["stop", "halt", "resume"]
