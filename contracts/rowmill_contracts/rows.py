"""Rows on their way: looked up, sent, settled, read back."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec

from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, Message, message
from rowmill_contracts.runs import ColumnInfo, Force, Mode

RowMark = Literal["duplicate", "reused", "sent", "completed", "failed", "cancelled", "skipped"]
"""How a row of a page stands. ``skipped``: not admitted (``net_new``). Only ``sent`` is not terminal."""


class RowTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row to work. ``data``: the input row's JSON object, as staged. ``cells``: what the sheet has (see `SettledRow.meta`), with values
    under ``values``; only reusable cells are taken over. ``attempt`` is raised by admission alone; ``waits`` counts how often it parked.
    """

    key: str
    index: int
    page: int
    attempt: int = 1
    waits: int = 0
    data: msgspec.Raw = EMPTY_OBJECT
    known: msgspec.Raw = EMPTY_OBJECT
    asked: float | None = None


@message()
class RowTasks(Message, frozen=True, kw_only=True):
    """Rows for an executor with this code; else it passes the page on."""

    run_id: str
    number: int
    org: str
    play: str
    dataset: str
    started_at: float
    code_digest: str
    rows: list[RowTask]
    force: Force | None = None


class LookupRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: str
    index: int
    duplicate: bool = False
    data: msgspec.Raw = EMPTY_OBJECT


@message()
class LookupRows(Message, frozen=True, kw_only=True):
    """Write the page's record if there is none, and answer from the record."""

    run_id: str
    number: int
    org: str
    play: str
    dataset: str
    page: int
    started_at: float
    columns: list[ColumnInfo]
    rows: list[LookupRow]
    force: Force | None = None
    mode: Mode = "all"


class LookedRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``known`` (only where ``mark`` is ``sent``): ``{column: {"value": ..., "meta": {...}, "reusable": bool}}``."""

    mark: RowMark
    known: msgspec.Raw = EMPTY_OBJECT


@message()
class RowsLooked(Message, frozen=True, kw_only=True):
    """Index-aligned with the request's rows. ``error``: the page could not be looked up (a person must act)."""

    rows: list[LookedRow] = []
    counts: Counts = Counts()
    version: int = 0
    error: Problem | None = None


class SettledRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a row ended.

    ``input``: the input row's JSON object; ``values``: ``{column: value}`` of the persisted columns; ``meta``: ``{column: {"status", "version",
    "reads": [columns] | "*", "completed_at", "stale_at", "error", "provider", "cost", ...}}`` (SPEC 2.9). ``shadows``: an output column is
    named like an input column, so that ``input`` and ``values`` cannot simply be joined. ``calls`` and ``cost``: live calls that this row
    paid for, also if it was replayed since.
    """

    key: str
    index: int
    page: int
    attempt: int
    status: Literal["completed", "failed", "cancelled"]
    input: msgspec.Raw = EMPTY_OBJECT
    values: msgspec.Raw = EMPTY_OBJECT
    meta: msgspec.Raw = EMPTY_OBJECT
    shadows: bool = False
    error: Problem | None = None
    calls: int = 0
    cost: Decimal = Decimal(0)


@message()
class RowsSettled(Message, frozen=True, kw_only=True):
    run_id: str
    number: int
    org: str
    play: str
    dataset: str
    rows: list[SettledRow]


@message()
class ReadRows(Message, frozen=True, kw_only=True):
    """A slice of a run's rows in input order, duplicates included (with their twin's cells): indexes ``offset`` to ``offset + limit - 1``."""

    run_id: str
    dataset: str
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    meta: bool = False


class ReadRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``data`` joins the input columns and the persisted output columns."""

    index: int
    key: str
    mark: RowMark
    data: msgspec.Raw = EMPTY_OBJECT
    attempt: int = 0
    error: Problem | None = None
    meta: msgspec.Raw = EMPTY_OBJECT


@message()
class RowsRead(Message, frozen=True, kw_only=True):
    """May hold fewer rows than asked (cut at 1 MiB): go on at ``next_offset`` (None: no more rows)."""

    rows: list[ReadRow] = []
    next_offset: int | None = None
    error: Problem | None = None


@message()
class ReadCounts(Message, frozen=True, kw_only=True):
    """Answered by `RowsCommitted` with every page that has open rows, or by version 0 where nothing is recorded."""

    run_id: str
    dataset: str


@message()
class QuerySheets(Message, frozen=True, kw_only=True):
    """SQL over the sheet views, as a role that may only read them."""

    sql: str
    parameters: list[Any] = []
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


@message()
class SheetsQueried(Message, frozen=True, kw_only=True):
    columns: list[str] = []
    rows: list[msgspec.Raw] = []
    error: Problem | None = None


_columns_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""A row's columns, each value as its own text: numbers keep their digits."""


def joined(input_row: msgspec.Raw, values: msgspec.Raw, *, shadows: bool = False) -> msgspec.Raw:
    """Input columns and output columns as one JSON object, without decoding a value; where a name stands in both, the output wins."""
    if shadows:
        return msgspec.Raw(msgspec.json.encode({**_columns_of(input_row), **_columns_of(values)}))
    left, right = bytes(input_row).strip(), bytes(values).strip()
    if right == b"{}":
        return msgspec.Raw(left)
    if left == b"{}":
        return msgspec.Raw(right)
    return msgspec.Raw(left[:-1] + b"," + right[1:])
