"""Reuse: which stored cells of a row a run may take over, and with it whether the row must be sent at all (SPEC 2.4).

Pure. A cell may be reused iff it completed (or was skipped by its condition), its column's version is the same, it is not stale at the run's start,
nothing forces it, and the input columns that it read are unchanged. A read of an output column is not looked at here: a row is reused only if
all its cells are, so that what they read of each other is unchanged too; and of a row that is sent, the executor knows which columns came out
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from rowmill_contracts.envelope import EMPTY_OBJECT
from rowmill_contracts.runs import ColumnInfo, Force

REUSABLE_STATUSES: Final = frozenset({"completed", "cached", "skipped"})
"""``skipped``: the column's condition was false, which unchanged reads make it again. ``missed`` is not here: a later run tries again."""

FORCES_ALL_CELLS: Final = frozenset({"all", "tools", "steps"})


class CellFacts(msgspec.Struct, gc=False):
    """What of a cell's meta decides its reuse. Times: seconds since the epoch."""

    status: str = ""
    version: str = ""
    reads: list[str] | Literal["*"] = []
    stale_at: float | None = None


class StoredRow(msgspec.Struct, frozen=True, gc=False):
    """A sheet's row as it stands, with its JSON texts; None where nothing of the kind was ever written."""

    number: int
    attempt: int
    status: str
    shadows: bool
    input: str | None
    values: str | None
    meta: str | None

    @property
    def completed(self) -> bool:
        return self.status == "completed"


class KnownCell(msgspec.Struct, frozen=True, gc=False):
    """A stored cell as it goes with a row that is sent."""

    value: msgspec.Raw
    meta: msgspec.Raw
    reusable: bool


_decode_facts = msgspec.json.Decoder(dict[str, CellFacts]).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode

_NONE: Final[frozenset[str]] = frozenset()


class Reuse:
    """The rules for one run's dataset. ``started_at``: the run's start, seconds since the epoch."""

    def __init__(self, columns: Sequence[ColumnInfo], *, started_at: float, force: Force | None) -> None:
        self._started_at = started_at
        self._nothing = force in FORCES_ALL_CELLS
        persisted = [column for column in columns if column.persisted]
        self._columns = [column for column in persisted if not column.recompute]
        self._never_whole = len(self._columns) < len(persisted) or (bool(columns) and not persisted)
        # A column sees the outputs of the columns before it in place of input columns of the same name.
        self._outputs_before: dict[str, frozenset[str]] = {}
        self._unrecorded_before: dict[str, frozenset[str]] = {}
        outputs: set[str] = set()
        unrecorded: set[str] = set()
        for column in columns:
            self._outputs_before[column.name] = frozenset(outputs)
            self._unrecorded_before[column.name] = frozenset(unrecorded)
            outputs.add(column.name)
            if not column.persisted:
                unrecorded.add(column.name)

    def reusable(self, stored: StoredRow, new_input: str) -> frozenset[str]:
        """The columns whose stored cells may be reused for a row with this input."""
        read = self._read(stored, new_input)
        if read is None:
            return _NONE
        facts, changed = read
        return frozenset(column.name for column in self._columns if self._is_reusable(column, facts.get(column.name), changed))

    def reuses_row(self, stored: StoredRow, new_input: str) -> bool:
        """Whether every cell that the sheet keeps may be reused (where it keeps none of the columns, the row is worked anew)."""
        read = self._read(stored, new_input)
        if read is None or self._never_whole:
            return False
        facts, changed = read
        return all(self._is_reusable(column, facts.get(column.name), changed) for column in self._columns)

    def _read(self, stored: StoredRow, new_input: str) -> tuple[dict[str, CellFacts], frozenset[str]] | None:
        """What decides about the row's cells, and which of its input columns changed; None if nothing of it may be reused."""
        if self._nothing or stored.meta is None or stored.input is None:
            return None
        try:
            return _decode_facts(stored.meta), _NONE if new_input == stored.input else changed_columns(stored.input, new_input)
        except msgspec.DecodeError:
            return None  # written by something that this version does not understand

    def _is_reusable(self, column: ColumnInfo, cell: CellFacts | None, changed: frozenset[str]) -> bool:
        return (
            cell is not None
            and cell.version == column.version
            and cell.status in REUSABLE_STATUSES
            and (cell.stale_at is None or cell.stale_at > self._started_at)
            and self._reads_unchanged(column.name, cell, changed)
        )

    def _reads_unchanged(self, column: str, cell: CellFacts, changed: frozenset[str]) -> bool:
        unrecorded = self._unrecorded_before[column]
        if not changed and not unrecorded:
            return True
        if cell.reads == "*":
            return False
        if unrecorded and not unrecorded.isdisjoint(cell.reads):
            return False  # nobody knows what a column that is not persisted came to
        if not changed:
            return True
        outputs = self._outputs_before[column]
        return all(name not in changed or name in outputs for name in cell.reads)


def changed_columns(before: str, after: str) -> frozenset[str]:
    """The names of the input columns whose JSON text differs, or that only one of the rows has."""
    old, new = _decode_raw(before), _decode_raw(after)
    return frozenset(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def known_cells(stored: StoredRow, columns: Sequence[ColumnInfo], reusable: frozenset[str]) -> msgspec.Raw:
    """What the sheet has of these columns, as `LookedRow.known` wants it."""
    if stored.values is None or stored.meta is None:
        return EMPTY_OBJECT
    values, meta = _decode_raw(stored.values), _decode_raw(stored.meta)
    names = [column.name for column in columns if column.name in values and column.name in meta]
    if not names:
        return EMPTY_OBJECT
    return msgspec.Raw(_encode({name: KnownCell(value=values[name], meta=meta[name], reusable=name in reusable) for name in names}))
