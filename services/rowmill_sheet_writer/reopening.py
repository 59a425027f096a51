"""Reopening: failed rows of a dataset that is closed are out again, at a new attempt, a few pages in one commit."""

from __future__ import annotations

from typing import Final

from rowmill_contracts.retries import ReopenRows, RowsReopened
from rowmill_contracts.runs import ParkedRow
from rowmill_sheet_writer.counts import DatasetId, Raise, Tally
from rowmill_sheet_writer.marks import CANCELLED, DEAD_LETTERED, FAILED
from rowmill_sheet_writer.store import Transaction

PAGES: Final = 10
"""Pages that are reopened in one commit and named in one answer: up to 5 000 rows, half a megabyte."""


async def reopen(transaction: Transaction, request: ReopenRows) -> RowsReopened:
    """Reopen what is not open at that attempt yet, and name all that is. Admission hears of the counts by the answer alone: nothing is told."""
    dataset_id = DatasetId(request.run_id, request.dataset)
    letters = FAILED + DEAD_LETTERED + (CANCELLED if request.cancelled else "")
    tally = Tally()
    pages = await transaction.lock_pages_to_reopen(dataset_id, request.page, letters, PAGES)
    rows = [
        ParkedRow(key=page.key_at(position).hex(), index=page.first_index + position, page=page.page_id.page, attempt=request.attempt, waits=0)
        for page in pages
        for position in page.reopen(request.attempt, letters, tally)
    ]
    changed = [page for page in pages if page.changed]
    if changed:
        await transaction.save_pages(changed)
        counts = await transaction.raise_counts({dataset_id: Raise(changed[0].sheet_id, request.number, tally)})
    else:
        counts = await transaction.read_counts([dataset_id])
    if dataset_id not in counts:
        return RowsReopened()
    found = counts[dataset_id]
    following = pages[-1].page_id.page + 1 if len(pages) == PAGES else None
    return RowsReopened(rows=rows, next_page=following, counts=found.counts, version=found.version)
