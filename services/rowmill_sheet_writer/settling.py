"""Settling: rows that ended become cells, marks and counts in one commit, and it is said what to tell of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.runs import PageProgress, RowsCommitted
from rowmill_sheet_writer.counts import DatasetCounts, DatasetId, Raise
from rowmill_sheet_writer.pages import PageId, PageRecord
from rowmill_sheet_writer.settlement import pages_of, settle
from rowmill_sheet_writer.store import Transaction


@dataclass(frozen=True, slots=True)
class Settled:
    """What is told of one message after its commit. ``committed`` speaks of all messages of the commit for the dataset (None: no record of its
    rows). ``told``: rows that events speak of. ``unknown``, ``lost``: see `MessageOutcome`.
    """

    dataset_id: DatasetId
    committed: RowsCommitted | None
    told: list[SettledRow]
    unknown: list[SettledRow]
    lost: list[SettledRow]


async def settle_messages(transaction: Transaction, messages: Sequence[RowsSettled]) -> list[Settled]:
    """Store what these messages say, however often it was said before; index-aligned with the messages."""
    pages = await transaction.lock_pages(pages_of(messages))
    settlement = settle(pages, messages)
    for wave in settlement.writes:
        await transaction.write_rows(wave)
    await transaction.save_pages(pages.values())
    sheet_ids = {page_id.dataset_id: page.sheet_id for page_id, page in pages.items()}
    numbers = {outcome.dataset_id: message.number for outcome, message in zip(settlement.outcomes, messages, strict=True)}
    counts = await transaction.raise_counts(
        {dataset_id: Raise(sheet_ids[dataset_id], numbers[dataset_id], tally) for dataset_id, tally in settlement.tallies.items()}
    )
    counts |= await transaction.read_counts(sheet_ids.keys() - counts.keys())
    committed = {dataset_id: committed_message(dataset_id, counts[dataset_id], _progress(pages, dataset_id)) for dataset_id in sheet_ids}
    return [
        Settled(outcome.dataset_id, committed.get(outcome.dataset_id), outcome.told, outcome.unknown, outcome.lost) for outcome in settlement.outcomes
    ]


def committed_message(dataset_id: DatasetId, counts: DatasetCounts, pages: list[PageProgress]) -> RowsCommitted:
    """What admission is told: absolute, so that the newest message says all."""
    return RowsCommitted(
        run_id=dataset_id.run_id,
        dataset=dataset_id.dataset,
        counts=counts.counts,
        version=counts.version,
        pages=pages,
        first_error=counts.first_error,
    )


def _progress(pages: Mapping[PageId, PageRecord], dataset_id: DatasetId) -> list[PageProgress]:
    return [page.progress for page_id, page in pages.items() if page_id.dataset_id == dataset_id]
