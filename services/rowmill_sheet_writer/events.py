"""What the sheet writer tells others after a commit: rows that ended, in events of at most a page, under ids that a repetition makes again.

Pure. An event's id is a digest of run, dataset and its rows' (key, attempt), so that a message that is handled again publishes the same events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS
from rowmill_contracts.events import RowEvent, RowsCompleted, RowsFailed
from rowmill_contracts.rows import RowsSettled, SettledRow, joined
from rowmill_sheet_writer.deciding import Lookup, has_shadows
from rowmill_sheet_writer.marks import REUSED
from rowmill_sheet_writer.pages import PageRecord
from rowmill_sheet_writer.reuse import StoredRow

_ROW_OVERHEAD = 200
"""About what a row takes in an event besides its data."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event and its routing key on `rowmill.events`."""

    routing_key: str
    message: RowsCompleted | RowsFailed


@dataclass(frozen=True, slots=True)
class OwedEvent:
    """An event that was stored because nobody confirmed it."""

    event_id: str
    routing_key: str
    message_type: str
    run_id: str
    body: bytes


def settled_events(message: RowsSettled, rows: Iterable[SettledRow]) -> list[Event]:
    """Events for these rows of a message: completed ones, and those that failed or were cancelled."""
    completed: list[RowEvent] = []
    failed: list[RowEvent] = []
    for row in rows:
        event = RowEvent(
            key=row.key,
            index=row.index,
            attempt=row.attempt,
            status=row.status,
            data=joined(row.input, row.values, shadows=row.shadows),
            error=row.error,
        )
        (completed if row.status == "completed" else failed).append(event)
    run_id, play, dataset = message.run_id, message.play, message.dataset
    return [*_completed(run_id, play, dataset, completed), *_failed(run_id, play, dataset, failed)]


def reused_events(lookup: Lookup, record: PageRecord, stored: Mapping[bytes, StoredRow]) -> list[Event]:
    """Events for the page's reused rows, with the run's own input columns."""
    rows = []
    for position, row in enumerate(lookup.request.rows):
        known = stored.get(record.key_at(position)) if record.letters[position] == REUSED else None
        if known is not None:
            text, values = lookup.texts[position], known.values or "{}"
            shadows = known.shadows if text == known.input else has_shadows(text, values)
            data = joined(row.data, msgspec.Raw(values), shadows=shadows)
            rows.append(RowEvent(key=row.key, index=row.index, attempt=1, status="completed", reused=True, data=data))
    request = lookup.request
    return list(_completed(request.run_id, request.play, request.dataset, rows))


def _completed(run_id: str, play: str, dataset: str, rows: list[RowEvent]) -> Iterator[Event]:
    for page in in_pages(rows):
        event_id = event_id_of("completed", run_id, dataset, page)
        message = RowsCompleted(event_id=event_id, run_id=run_id, play=play, dataset=dataset, rows=page)
        yield Event(f"rows.completed.{play}.{dataset}", message)


def _failed(run_id: str, play: str, dataset: str, rows: list[RowEvent]) -> Iterator[Event]:
    for page in in_pages(rows):
        event_id = event_id_of("failed", run_id, dataset, page)
        message = RowsFailed(event_id=event_id, run_id=run_id, play=play, dataset=dataset, rows=page)
        yield Event(f"rows.failed.{play}.{dataset}", message)


def event_id_of(kind: str, run_id: str, dataset: str, rows: list[RowEvent]) -> str:
    digest = hashlib.sha256(f"{kind}\n{run_id}\n{dataset}".encode())
    for row in rows:
        digest.update(f"\n{row.key} {row.attempt}".encode())
    return digest.hexdigest()[:32]


def in_pages(rows: list[RowEvent]) -> Iterator[list[RowEvent]]:
    """Cut at `PAGE_ROWS` rows and about 1 MiB; a larger single row is alone."""
    page: list[RowEvent] = []
    size = 0
    for row in rows:
        row_size = len(memoryview(row.data)) + _ROW_OVERHEAD
        if page and (len(page) >= PAGE_ROWS or size + row_size > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(row)
        size += row_size
    if page:
        yield page
