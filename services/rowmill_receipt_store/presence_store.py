"""The table of presences. Every call is one commit, and may come twice."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from rowmill.runtime.db import Database
from rowmill_contracts.presences import KeepPresence, PresenceKept
from rowmill_receipt_store.store import QUERIES


class PresenceStore:
    """``lease``: seconds for which a process counts as there after it said so. ``grace``: seconds for which others ask for a silent one's leases
    before it has ended. ``clock_offset``: as in `Store`.
    """

    def __init__(self, database: Database, *, lease: float, grace: float) -> None:
        self._database = database
        self._lease = timedelta(seconds=lease)
        self._grace = timedelta(seconds=grace)
        self.clock_offset = 0.0

    @property
    def _offset(self) -> timedelta:
        return timedelta(seconds=self.clock_offset)

    async def keep(self, request: KeepPresence) -> PresenceKept:
        """A process is there, or goes."""
        if request.leave:
            await self._database.execute(QUERIES["leave_presence"], self._offset, request.presence)
            return PresenceKept(held=False)
        row = await self._database.fetchrow(QUERIES["keep_presence"], self._offset, self._lease, request.presence)
        if row is None:
            return PresenceKept(held=False)
        if row["new"]:  # as seldom as processes start
            await self._database.execute(QUERIES["forget_presences"], self._offset)
        return PresenceKept(held=True, seconds=self._lease.total_seconds())

    async def contest(self, presences: Iterable[str]) -> bool:
        """Others ask for leases of these, which have lapsed. Whether one of them has ended now."""
        rows = await self._database.fetch(QUERIES["end_presences"], self._offset, self._grace, sorted(set(presences)))
        return any(row["ended"] for row in rows)
