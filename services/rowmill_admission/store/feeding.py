"""What feeders keep: leases on ``datasets``, how far they are, the table ``pages``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill_admission.datasets import Dataset
from rowmill_admission.store import SQL
from rowmill_admission.store.datasets import dataset_of
from rowmill_admission.store.runs import json_of, problem_of
from rowmill_contracts.counts import Problem
from rowmill_contracts.runs import RunOptions, RunState

_options = msgspec.json.Decoder(RunOptions)


@dataclass(frozen=True, slots=True)
class Lease:
    dataset_seq: int
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the next page begins: its number, its first row's index in the run's input, and where that row lies."""

    page: int = 0
    index: int = 0
    input_page: int = 0
    input_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a feeder must know of its dataset while it works."""

    dataset: Dataset
    term: int
    run_state: RunState
    stop_reason: str | None
    halt_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What a feeder begins with. ``started_at``: the run's start, ``resumed_at``: when it was last resumed (0: never), seconds since the epoch."""

    standing: Standing
    place: Place
    page_rows: int
    number: int
    org: str
    play: str
    options: RunOptions
    started_at: float
    resumed_at: float
    input_state: Literal["open", "sealed", "failed"] | None
    input_error: Problem | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPage:
    """A page as published: how to cut it again, its size in bytes, and what later pages find duplicates by."""

    page: int
    first_index: int
    rows: int
    input_page: int
    input_offset: int
    duplicates: list[int]
    sent: int
    size: int
    digests: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one commit of a feeder stores. ``admitted``, ``sent``, ``sent_bytes``: of the dataset so far, these pages included."""

    pages: Sequence[SentPage]
    place: Place
    admitted: int
    sent: int
    sent_bytes: int
    done: bool = False
    error: Problem | None = None


@dataclass(frozen=True, slots=True)
class StoredFlight:
    dataset_seq: int
    run_id: str
    org: str
    window: int
    sent: int
    sent_bytes: int
    ended: int
    waiting: int
    called_back: bool


class LeaseLost(Exception):
    """Another feeder has the dataset; nothing of this commit is stored."""


def _standing(row: Any) -> Standing:
    return Standing(
        dataset=dataset_of(row),
        term=row["feeder_term"],
        run_state=row["run_state"],
        stop_reason=row["stop_reason"],
        halt_reason=row["halt_reason"],
    )


async def take(
    database: Database,
    feeder_id: str,
    seconds: float,
    *,
    but_for: Collection[int],
    input_ids: Sequence[str] | None = None,
    run_id: str | None = None,
) -> list[int]:
    """Take the lease of every dataset that needs a feeder (of these inputs, of this run), but for those named."""
    of_inputs = None if input_ids is None else list(input_ids)
    rows = await database.fetch(SQL["take_feeders"], feeder_id, seconds, of_inputs, run_id, sorted(but_for))
    return [row["dataset_seq"] for row in rows]


async def fed(database: Database, dataset_seq: int) -> Fed | None:
    row = await database.fetchrow(SQL["fed"], dataset_seq)
    if row is None:
        return None
    return Fed(
        standing=_standing(row),
        place=Place(page=row["next_page"], index=row["next_index"], input_page=row["input_page"], input_offset=row["input_offset"]),
        page_rows=row["page_rows"],
        number=row["number"],
        org=row["org"],
        play=row["play"],
        options=_options.decode(row["options"]),
        started_at=row["started_at"],
        resumed_at=row["resumed_at"],
        input_state=row["input_state"],
        input_error=problem_of(row["input_error"]),
    )


async def renew(database: Database, leases: Sequence[Lease], seconds: float) -> list[Standing]:
    """Renew the leases that are still ours; those that do not come back are lost."""
    rows = await database.fetch(SQL["renew_feeders"], [lease.dataset_seq for lease in leases], [lease.term for lease in leases], seconds)
    return [_standing(row) for row in rows]


async def release(database: Database, leases: Sequence[Lease]) -> None:
    """Let others take them at once."""
    await database.execute(SQL["release_feeders"], [lease.dataset_seq for lease in leases], [lease.term for lease in leases])


async def store_progress(database: Database | Connection, lease: Lease, progress: Progress, seconds: float) -> Standing:
    """Store pages and how far the feeder is, in one statement (a commit of its own, or the caller's), and renew the lease. Repeated, it
    changes nothing.

    Raises:
        LeaseLost: the term is not the current one, or admission is finished already.

    """
    pages = progress.pages
    row = await database.fetchrow(
        SQL["store_progress"],
        lease.dataset_seq,
        lease.term,
        progress.place.page,
        progress.place.index,
        progress.place.input_page,
        progress.place.input_offset,
        progress.admitted,
        progress.sent,
        progress.sent_bytes,
        progress.done,
        None if progress.error is None else json_of(progress.error),
        seconds,
        [page.page for page in pages],
        [page.first_index for page in pages],
        [page.rows for page in pages],
        [page.input_page for page in pages],
        [page.input_offset for page in pages],
        ["{" + ",".join(map(str, page.duplicates)) + "}" for page in pages],
        [page.sent for page in pages],
        [page.size for page in pages],
        [page.digests for page in pages],
    )
    if row is None:
        raise LeaseLost
    return _standing(row)


async def digests(database: Database, dataset_seq: int) -> AsyncIterator[bytes]:
    """The stored digests of a dataset's keys, back to back, in pieces."""
    page = 0
    while True:
        rows = await database.fetch(SQL["digests_of"], dataset_seq, page)
        if not rows:
            return
        for row in rows:
            yield row["digests"]
        page = rows[-1]["page"] + 1


async def flights(database: Database, back_for: float) -> list[StoredFlight]:
    """Every open dataset with rows in flight. ``back_for``: seconds for which rows that were called back count as such once they were due."""
    return [
        StoredFlight(
            row["dataset_seq"],
            row["run_id"],
            row["org"],
            row["run_window"],
            row["sent"],
            row["sent_bytes"],
            row["ended"],
            row["waiting"],
            row["called_back"],
        )
        for row in await database.fetch(SQL["flights"], back_for)
    ]


async def sent_pages(database: Database, dataset_seq: int, pages: Sequence[int]) -> list[SentPage]:
    """Those of these pages that were published, without their digests."""
    return [
        SentPage(
            page=row["page"],
            first_index=row["first_index"],
            rows=row["rows"],
            input_page=row["input_page"],
            input_offset=row["input_offset"],
            duplicates=row["duplicates"],
            sent=row["sent"],
            size=row["bytes"],
        )
        for row in await database.fetch(SQL["sent_pages"], dataset_seq, list(pages))
    ]


async def pages_to_send_again(database: Database, dataset_seq: int, open_pages: Sequence[int], after: float) -> list[int]:
    """Of these open pages those whose last publication is too long ago, which counts as repeated now."""
    return [row["page"] for row in await database.fetch(SQL["pages_to_send_again"], dataset_seq, list(open_pages), after)]


async def open_among(database: Database, dataset_seqs: Collection[int]) -> set[int]:
    """Those of these datasets that are open."""
    return {row["dataset_seq"] for row in await database.fetch(SQL["open_among"], sorted(dataset_seqs))}


async def forget_closed(database: Database, age: float, retry_age: float) -> None:
    """Drop the pages of datasets that closed ``age`` seconds ago; ``retry_age`` of those with rows that could be retried."""
    await database.execute(SQL["forget_closed"], age, retry_age)
