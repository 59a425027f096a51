"""Reading a run's rows back in input order: page records say which rows, the sheet holds their cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import EMPTY_OBJECT
from rowmill_contracts.rows import ReadRow, joined
from rowmill_sheet_writer.marks import CANCELLED, DEAD_LETTERED, FAILED, MARKS, SENT, end_at
from rowmill_sheet_writer.pages import PageRecord

_ROW_OVERHEAD = 150
"""About what a row takes in an answer besides its data."""


@dataclass(frozen=True, slots=True)
class StoredCells:
    """A sheet row as read back. ``status`` is None where the sheet has no such row."""

    status: str | None
    shadows: bool
    cells_kept: bool
    input: str | None
    values: str | None
    meta: str | None
    error: Problem | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row of a run stands."""

    page: PageRecord
    position: int

    @property
    def index(self) -> int:
        return self.page.first_index + self.position

    @property
    def key(self) -> bytes:
        return self.page.key_at(self.position)


def places(pages: Sequence[PageRecord], first: int, past: int) -> list[Place]:
    """The rows with indexes from ``first`` to below ``past`` that are on record."""
    return [
        Place(page, position)
        for page in pages
        for position in range(max(0, first - page.first_index), min(len(page.letters), past - page.first_index))
    ]


def read_row(place: Place, cells: StoredCells, *, meta: bool) -> ReadRow:
    """A row of the run. Cells that are not of its end are left out: of a row that has not ended, or that ended without any."""
    letter = place.page.letters[place.position]
    foreign = letter == SENT or (cells.cells_kept and letter in {FAILED, DEAD_LETTERED, CANCELLED})
    own_input = place.page.inputs.get(place.position)
    values = msgspec.Raw("{}" if foreign or cells.values is None else cells.values)
    input_row = own_input if own_input is not None else msgspec.Raw(cells.input or "{}")
    return ReadRow(
        index=place.index,
        key=place.key.hex(),
        mark=MARKS[letter],
        data=joined(input_row, values, shadows=cells.shadows or own_input is not None),
        attempt=end_at(place.page.letters, place.page.ends, place.position).attempt,
        error=cells.error if letter != SENT else None,
        meta=msgspec.Raw(cells.meta) if meta and not foreign and cells.meta is not None else EMPTY_OBJECT,
    )


def size_of(row: ReadRow) -> int:
    return len(memoryview(row.data)) + len(memoryview(row.meta)) + _ROW_OVERHEAD
