"""The table of windows (see `windows`): read and written as draws ask for it. Every call is one commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from rowmill.runtime.db import Database
from rowmill_contracts.shards import Sent
from rowmill_receipt_store.store import QUERIES
from rowmill_receipt_store.windows import Report, Window

_sent = msgspec.json.Decoder(list[Sent])


class WindowStore:
    """``clock_offset``: as `Store`'s."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.clock_offset = 0.0

    @property
    def _offset(self) -> timedelta:
        return timedelta(seconds=self.clock_offset)

    async def load(self, names: Sequence[str]) -> dict[str, Window]:
        """What is stored of the windows that are known."""
        rows = await self._database.fetch(QUERIES["windows"], self._offset, sorted(set(names)))
        return {
            row["name"]: Window(
                term=row["term"],
                number=row["number"],
                sent=_sent.decode(row["sent"]),
                permits=row["permits"],
                seconds=row["seconds"],
                elapsed=row["elapsed"],
            )
            for row in rows
        }

    async def save(self, holder: str, reports: Sequence[Report]) -> set[str]:
        """Store reports, a window only once. Answers the windows whose report was stored, since ``holder`` has their shard under the term named."""
        reports = sorted(reports, key=lambda one: one.draw.window)
        rows = await self._database.fetch(
            QUERIES["report_windows"],
            self._offset,
            holder,
            [one.draw.window for one in reports],
            [one.draw.shard for one in reports],
            [one.term for one in reports],
            [one.draw.number for one in reports],
            [msgspec.json.encode(one.sent) for one in reports],
            [one.draw.permits for one in reports],
            [one.draw.seconds for one in reports],
        )
        return {row["name"] for row in rows}
