"""Looking up: pages get their records, once; reused rows are stored with the run's input columns; every request is answered from the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import RowsLooked
from rowmill_contracts.runs import RowsCommitted
from rowmill_sheet_writer.counts import DatasetCounts, DatasetId, Raise, Tally
from rowmill_sheet_writer.deciding import Decision, Lookup, answer_rows, decide, send_instead
from rowmill_sheet_writer.events import Event, reused_events
from rowmill_sheet_writer.marks import DUPLICATE, REUSED
from rowmill_sheet_writer.pages import PageId, PageRecord
from rowmill_sheet_writer.reuse import StoredRow
from rowmill_sheet_writer.settlement import RowId
from rowmill_sheet_writer.settling import committed_message
from rowmill_sheet_writer.store import Transaction


@dataclass(frozen=True, slots=True)
class Looked:
    """A lookup with what is on record after its commit. ``stored``: the sheet's rows by key."""

    lookup: Lookup
    page: PageRecord
    stored: Mapping[bytes, StoredRow]
    counts: DatasetCounts

    @property
    def other_page(self) -> bool:
        """The page on record is not the one that was asked for: the input changed under the run."""
        return self.page.keys != self.lookup.keys or self.page.first_index != self.lookup.request.rows[0].index

    def answer(self) -> RowsLooked:
        if self.other_page:
            text = f"page {self.page.page_id.page} of dataset {self.page.page_id.dataset!r} is on record with other rows"
            return RowsLooked(error=Problem(code="page_changed", message=text))
        return RowsLooked(rows=answer_rows(self.lookup, self.page, self.stored), counts=self.counts.counts, version=self.counts.version)

    def committed(self) -> RowsCommitted | None:
        """What admission is told besides the answer: nothing of a page whose rows are all still to be worked, since the answer has the counts."""
        if self.other_page or (DUPLICATE not in self.page.letters and REUSED not in self.page.letters):
            return None
        return committed_message(self.page.page_id.dataset_id, self.counts, [self.page.progress])

    def events(self) -> list[Event]:
        return [] if self.other_page or REUSED not in self.page.letters else reused_events(self.lookup, self.page, self.stored)


async def look_up(transaction: Transaction, lookups: Sequence[Lookup]) -> list[Looked]:
    """Record the pages that have no record; index-aligned with the lookups, none of which is empty."""
    rows = await transaction.read_rows(RowId(lookup.sheet_id, key) for lookup in lookups for key in lookup.wanted())
    stored: dict[int, dict[bytes, StoredRow]] = {lookup.sheet_id: {} for lookup in lookups}
    for row_id, row in rows.items():
        stored[row_id.sheet_id][row_id.key] = row
    decisions = {lookup.page_id: decide(lookup, stored[lookup.sheet_id]) for lookup in lookups}
    numbers = {lookup.page_id: lookup.request.number for lookup in lookups}
    added = await transaction.add_pages(decision.record for decision in decisions.values())
    pages = {page_id: decisions[page_id].record for page_id in added}
    if len(added) < len(decisions):
        pages |= await transaction.lock_pages(decisions.keys() - added)
    await _renew(transaction, [(numbers[page_id], decisions[page_id]) for page_id in sorted(added)])
    counts = await _count(transaction, pages, added, numbers)
    return [Looked(lookup, pages[lookup.page_id], stored[lookup.sheet_id], counts[lookup.page_id.dataset_id]) for lookup in lookups]


async def _renew(transaction: Transaction, decisions: list[tuple[int, Decision]]) -> None:
    for number, decision in decisions:
        if decision.renewals:
            send_instead(decision, await transaction.renew_inputs(number, decision.record.sheet_id, decision.renewals))
    await transaction.save_pages(decision.record for _, decision in decisions)


async def _count(
    transaction: Transaction, pages: Mapping[PageId, PageRecord], added: set[PageId], numbers: Mapping[PageId, int]
) -> dict[DatasetId, DatasetCounts]:
    raised: dict[DatasetId, Raise] = {}
    for page_id in added:
        page = pages[page_id]
        change = raised.setdefault(page_id.dataset_id, Raise(page.sheet_id, numbers[page_id], Tally()))
        change.tally.admit(page.letters)
    counts = await transaction.raise_counts(raised)
    return counts | await transaction.read_counts({page_id.dataset_id for page_id in pages} - counts.keys())
