"""The table ``datasets``, apart from what only feeders touch (`feeding`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill_admission.datasets import Dataset, DatasetState
from rowmill_admission.store import SQL
from rowmill_admission.store.runs import json_of, problem_of
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.runs import OpenDataset, RowsCommitted

_definition = msgspec.json.Decoder(OpenDataset)


def dataset_of(row: Any) -> Dataset:
    """A row of ``datasets``, perhaps with the input's ``seal_rows``."""
    return Dataset(
        dataset_seq=row["dataset_seq"],
        run_id=row["run_id"],
        dataset=row["dataset"],
        input_id=row["input_id"],
        definition=_definition.decode(row["definition"]),
        state=row["state"],
        error=problem_of(row["error"]),
        counts=Counts(
            admitted=row["admitted"],
            completed=row["completed"],
            failed=row["failed"],
            cancelled=row["cancelled"],
            reused=row["reused"],
            duplicates=row["duplicates"],
            calls=row["calls"],
            cost=row["cost"],
        ),
        version=row["version"],
        first_error=problem_of(row["first_error"]),
        admission_done=row["admission_done"],
        sent=row["sent"],
        sent_bytes=row["sent_bytes"],
        row_limit=row["row_limit"],
        run_window=row["run_window"],
        reopened=row["reopened"],
        input_rows=row.get("seal_rows"),
    )


async def insert(connection: Connection, request: OpenDataset, *, page_rows: int, row_limit: int | None, run_window: int) -> float | None:
    """Store a dataset; returns when (seconds since the epoch), or None where (run, dataset) has one already."""
    at: float | None = await connection.fetchval(
        SQL["insert_dataset"], request.run_id, request.dataset, request.input_id, json_of(request), page_rows, row_limit, run_window
    )
    return at


async def by_name(connection: Connection, run_id: str, dataset: str) -> Dataset | None:
    row = await connection.fetchrow(SQL["dataset_by_name"], run_id, dataset)
    return None if row is None else dataset_of(row)


async def of_runs(connection: Connection, run_ids: Sequence[str]) -> list[Dataset]:
    """The datasets of these runs in the order in which they were opened."""
    return [dataset_of(row) for row in await connection.fetch(SQL["datasets_of_runs"], list(run_ids))]


async def any_open(connection: Connection, run_id: str) -> bool:
    found: bool = await connection.fetchval(SQL["any_open_dataset"], run_id)
    return found


async def lock(connection: Connection, seqs: Sequence[int]) -> list[Dataset]:
    """Lock datasets in order until the transaction ends."""
    return [dataset_of(row) for row in await connection.fetch(SQL["lock_datasets"], sorted(set(seqs)))]


async def close(connection: Connection, dataset: Dataset, state: DatasetState, error: Problem | None) -> tuple[Dataset, float]:
    """Close a locked dataset; rows that still stand in ``waits`` are terminal by other ways. Returns it as closed, and when."""
    row = await connection.fetchrow(SQL["close_dataset"], dataset.dataset_seq, state, None if error is None else json_of(error))
    await connection.execute(SQL["forget_waits_of"], dataset.dataset_seq)
    if row is None:
        raise LookupError(f"dataset {dataset.dataset_seq} is gone")
    return replace(dataset, state=state, error=error, input_rows=row["seal_rows"]), row["at"]


async def store_counts(connection: Connection, messages: Sequence[RowsCommitted]) -> list[Dataset]:
    """Store absolute counts (one message per dataset) where they are newer; returns the datasets that changed, locked."""
    rows = await connection.fetch(
        SQL["store_counts"],
        [message.run_id for message in messages],
        [message.dataset for message in messages],
        [message.version for message in messages],
        [message.counts.completed for message in messages],
        [message.counts.failed for message in messages],
        [message.counts.cancelled for message in messages],
        [message.counts.reused for message in messages],
        [message.counts.duplicates for message in messages],
        [message.counts.calls for message in messages],
        [message.counts.cost for message in messages],
        [None if message.first_error is None else json_of(message.first_error) for message in messages],
    )
    return [dataset_of(row) for row in rows]


async def note_heard(database: Database, run_id: str, dataset: str) -> None:
    await database.execute(SQL["note_heard"], run_id, dataset)


async def progress_due(database: Database, seqs: Collection[int], interval: float) -> list[tuple[Dataset, str]]:
    """Of these datasets, with their runs' plays, those that are open and of which nothing was told for ``interval`` seconds."""
    return [(dataset_of(row), row["play"]) for row in await database.fetch(SQL["progress_due"], sorted(seqs), interval)]


async def over(database: Database) -> list[int]:
    """Open datasets whose closing condition holds."""
    return [row["dataset_seq"] for row in await database.fetch(SQL["datasets_over"])]


async def silent(database: Database, silent_after: float, page_again_after: float) -> list[tuple[int, str, str]]:
    """(dataset_seq, run, dataset) of open datasets that the sheet-writer should be asked for."""
    rows = await database.fetch(SQL["datasets_silent"], silent_after, page_again_after)
    return [(row["dataset_seq"], row["run_id"], row["dataset"]) for row in rows]
