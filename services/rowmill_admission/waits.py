"""Rows that wait, as decisions. Pure; knows no table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from rowmill_admission.sending import Return
from rowmill_admission.store.waits import Turns, Wait
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS
from rowmill_contracts.rows import SettledRow
from rowmill_contracts.runs import ParkedRow, ProviderServes

BREATH_MS: Final = 200

RUNS_IN_A_STEP: Final = 5
"""Runs of which rows are called back together, where there are as many."""


MOST_ROWS: Final = 1_000_000
"""Rows that are called back at a time at most."""


def turns_of(message: ProviderServes) -> Turns:
    """Some rows of a run come together, since each page of which some come is looked up for them."""
    together = max(1, int(message.per_second * message.every))
    rows = max(0, message.at_once) + max(1, int(min(MOST_ROWS, message.per_second * message.seconds)))
    return Turns(
        per_second=message.per_second,
        at_once=message.at_once,
        together=together,
        of_a_run=max(1, together // RUNS_IN_A_STEP),
        rows=rows,
        sooner=message.sooner,
    )


def newest(rows: Iterable[ParkedRow]) -> list[ParkedRow]:
    """One wait per row, in row order: the one with the highest attempt, then number of waits."""
    by_index: dict[int, ParkedRow] = {}
    for row in rows:
        known = by_index.get(row.index)
        if known is None or (known.attempt, known.waits) < (row.attempt, row.waits):
            by_index[row.index] = row
    return [by_index[index] for index in sorted(by_index)]


def soon(rows: Iterable[ParkedRow]) -> list[ParkedRow]:
    """Rows that had to wait for what has happened meanwhile: they come back after a breath."""
    return [msgspec.structs.replace(row, wait_ms=BREATH_MS) for row in rows]


def returning(waits: Iterable[Wait], first_index: int) -> dict[int, Return]:
    """How released rows come back, by their place in the page that begins at ``first_index``."""
    return {wait.row_index - first_index: Return(waits=wait.waits, attempt=wait.attempt, asked=wait.asked) for wait in waits}


def still_out(rows: int, first_index: int, waits: Mapping[int, Wait]) -> dict[int, Return]:
    """Rows of a page that do not stand as waiting, by their place in it: what is published again when it has been out for too long."""
    out: dict[int, Return] = {}
    for place in range(rows):
        wait = waits.get(first_index + place)
        if wait is None:
            out[place] = Return(waits=0)
        elif wait.state == "released":
            out[place] = Return(waits=wait.waits, attempt=wait.attempt, asked=wait.asked)
    return out


def sleep_for(next_due: float | None, poll: float, shortest: float) -> float:
    """Seconds to sleep before looking again: to the next due row, but no longer than ``poll``.

    A row that is due and was not released waits for room, or for its run to be resumed; looking for it sooner would not help.
    """
    return poll if next_due is None or next_due <= 0 else min(poll, max(shortest, next_due))


def parts(rows: Sequence[SettledRow]) -> Iterable[list[SettledRow]]:
    """Cut settled rows into messages of at most a page."""
    part: list[SettledRow] = []
    size = 0
    for row in rows:
        length = memoryview(row.input).nbytes
        if part and (len(part) == PAGE_ROWS or size + length > PAGE_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    if part:
        yield part
