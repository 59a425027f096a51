"""Settlement: what a batch of settled messages does to page records, cells and counts.

Pure. Messages of one batch may speak of the same page or row; they take effect one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_sheet_writer.counts import DatasetId, Tally
from rowmill_sheet_writer.marks import DEAD_LETTERED, letter_of
from rowmill_sheet_writer.pages import PageId, PageRecord, key_bytes


class RowId(NamedTuple):
    """Sorts in the order in which sheet rows are locked."""

    sheet_id: int
    key: bytes


class RowWrite(NamedTuple):
    """A row to be written to a sheet, unless what stands there is newer."""

    number: int
    row: SettledRow


@dataclass(slots=True)
class MessageOutcome:
    """What follows from one message. ``told``: its rows whose end is the one on record, so that events speak of them. ``unknown``: rows that no
    page record has.
    """

    dataset_id: DatasetId
    pages: set[PageId] = field(default_factory=set)
    told: list[SettledRow] = field(default_factory=list)
    unknown: list[SettledRow] = field(default_factory=list)

    @property
    def lost(self) -> list[SettledRow]:
        """Unknown rows whose results would vanish: all but those that were failed because their message had died."""
        return [row for row in self.unknown if letter_of(row) != DEAD_LETTERED]


@dataclass(slots=True)
class Settlement:
    """``writes``: waves of rows, each row at most once in a wave, since one statement can write a row only once. ``tallies``: per dataset whose
    page records changed.
    """

    outcomes: list[MessageOutcome] = field(default_factory=list)
    writes: list[dict[RowId, RowWrite]] = field(default_factory=list)
    tallies: dict[DatasetId, Tally] = field(default_factory=dict)


def pages_of(messages: Iterable[RowsSettled]) -> set[PageId]:
    return {PageId(message.run_id, message.dataset, row.page) for message in messages for row in message.rows}


def settle(pages: Mapping[PageId, PageRecord], messages: Sequence[RowsSettled]) -> Settlement:
    """Change the page records, and say what else is to be stored and told.

    Raises:
        MalformedMessage: a row key is not one.

    """
    settlement = Settlement()
    for message in messages:
        dataset_id = DatasetId(message.run_id, message.dataset)
        outcome = MessageOutcome(dataset_id)
        settlement.outcomes.append(outcome)
        tally = settlement.tallies.get(dataset_id) or Tally()
        for row in message.rows:
            page_id = PageId(message.run_id, message.dataset, row.page)
            page = pages.get(page_id)
            key = key_bytes(row.key)
            settling = page.settle(row, key, tally) if page is not None else "unknown"
            if page is None or settling == "unknown":
                outcome.unknown.append(row)
                continue
            outcome.pages.add(page_id)
            if settling == "superseded":
                continue
            outcome.told.append(row)
            if settling == "changed":
                settlement.tallies[dataset_id] = tally
                _add_write(settlement.writes, RowId(page.sheet_id, key), RowWrite(message.number, row))
    return settlement


def _add_write(waves: list[dict[RowId, RowWrite]], row_id: RowId, write: RowWrite) -> None:
    for wave in waves:
        if row_id not in wave:
            wave[row_id] = write
            return
    waves.append({row_id: write})
