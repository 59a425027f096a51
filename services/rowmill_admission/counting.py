"""Counts from the sheet-writer: stored where newer, which makes room, tells progress and closes datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rowmill.runtime.db import Connection, Database
from rowmill_admission.datasets import Dataset
from rowmill_admission.endings import close_those_over
from rowmill_admission.owed import Postman
from rowmill_admission.store import datasets as dataset_store
from rowmill_contracts.runs import RowsCommitted


class Counting:
    """``on_counted``: called with each dataset that changed, after the commit."""

    def __init__(self, database: Database, postman: Postman, on_counted: Callable[[Dataset], None]) -> None:
        self._database = database
        self._postman = postman
        self._on_counted = on_counted

    async def store(self, messages: Sequence[RowsCommitted]) -> None:
        """Store the newest counts of each dataset; older versions than the stored one change nothing."""
        newest: dict[tuple[str, str], RowsCommitted] = {}
        for message in messages:
            name = (message.run_id, message.dataset)
            if name not in newest or newest[name].version < message.version:
                newest[name] = message

        async def work(connection: Connection) -> tuple[list[Dataset], list[str]]:
            changed = await dataset_store.store_counts(connection, [newest[name] for name in sorted(newest)])
            return changed, await close_those_over(connection, changed)

        changed, woken = await self._database.transact(work)
        self._postman.wake(woken)
        for dataset in changed:
            self._on_counted(dataset)
