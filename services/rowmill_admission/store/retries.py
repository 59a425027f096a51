"""The table ``retries``, and what a retry changes about a run and its datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill_admission.datasets import Dataset
from rowmill_admission.store import SQL
from rowmill_admission.store.runs import json_of
from rowmill_contracts.runs import OpenDataset

REASON: Final = "retry"
"""Why rows wait that are worked again, until the run's body has come to them."""


async def is_known(connection: Connection, run_id: str, identity: str, window: float | None) -> bool:
    """Whether this request has made its retry (``window``: within so many seconds)."""
    found: bool = await connection.fetchval(SQL["retry_known"], run_id, identity, window)
    return found


async def note(connection: Connection, run_id: str, identity: str) -> None:
    await connection.execute(SQL["note_retry"], run_id, identity)


async def forget(database: Database, retention: float) -> None:
    """Drop requests of runs that could be retried no more, ``retention`` seconds after they ended."""
    await database.execute(SQL["forget_retries"], retention)


async def begin(connection: Connection, run_id: str, datasets: Sequence[Dataset]) -> None:
    """A retry is being prepared, at the next attempt, of these locked datasets. The time since the run's end is none of its working time."""
    await connection.execute(SQL["begin_retry"], run_id)
    await connection.execute(SQL["note_reopened"], [each.dataset_seq for each in datasets])


async def are_too_old(connection: Connection, datasets: Sequence[Dataset], retention: float) -> bool:
    """Whether one of these datasets ended more than ``retention`` seconds ago, or its pages are forgotten, which a retry would publish again."""
    found: bool = await connection.fetchval(SQL["too_old_to_retry"], [each.dataset_seq for each in datasets], retention)
    return found


async def reopen(connection: Connection, run_id: str, datasets: Sequence[Dataset]) -> None:
    """Open these locked datasets again, forget what the body has on record since the first of them was closed, and let the locked run go on."""
    await connection.execute(SQL["reopen_datasets"], [each.dataset_seq for each in datasets])
    await connection.execute(SQL["forget_calls"], run_id, [each.dataset for each in datasets])
    await connection.execute(SQL["go_on_retrying"], run_id)


async def adopt(connection: Connection, dataset: Dataset, request: OpenDataset) -> None:
    """The run's body has come to a dataset that was reopened: its rows are due, and worked by the code that asks now, as far as they are not done."""
    definition = json_of(_with_code_of(dataset.definition, request))
    await connection.execute(SQL["adopt_dataset"], dataset.dataset_seq, definition)
    await connection.execute(SQL["end_retry_waits"], dataset.dataset_seq, REASON)
    await connection.execute(SQL["note_pages_published"], dataset.dataset_seq)
    await connection.execute(SQL["note_code"], dataset.run_id, request.code_digest)


def _with_code_of(stored: OpenDataset, request: OpenDataset) -> OpenDataset:
    return msgspec.structs.replace(stored, columns=request.columns, code_digest=request.code_digest)
