"""The owner's look at reservations that nobody will settle: claims whose holder vanished before anything was sent (SPEC 4.7).

A claim that is over costs nothing once its key is claimed again, but perhaps nobody ever does. It is released, and its reservation refunded, in one
statement. Confirmed dispatches are left alone: they may have been sent.
"""

from __future__ import annotations

from datetime import timedelta

import structlog

from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Connection, Database
from rowmill_receipt_store.store import QUERIES

log = structlog.get_logger()


class Sweep:
    """``interval``: seconds between looks. ``patience``: seconds for which a lease has been over before it is given up: its holder may be late.
    ``page``: claims that one statement gives up at most. ``clock_offset``: as in `Store`.
    """

    def __init__(self, database: Database, clock: Clock, *, interval: float, patience: float, page: int) -> None:
        self._database = database
        self._clock = clock
        self._interval = interval
        self._patience = timedelta(seconds=patience)
        self._page = page
        self.clock_offset = 0.0

    async def run(self) -> None:
        """Look for ever, until cancelled."""
        while True:
            await self._clock.sleep(self._interval)
            try:
                await self.look()
            except Exception:  # whatever it is, the next look may succeed, and claims do not wait for it
                log.exception("sweep_failed")

    async def look(self) -> int:
        """Look at all that is reserved by claims and not sent, however much is charged besides. Answers how many claims were released."""
        await self._all("correct_unsent")
        released = await self._all("sweep")
        if released:
            log.info("unsent_claims_released", claims=released)
        return released

    async def _all(self, name: str) -> int:
        """Carry the statement out until it finds less than a page."""
        done = 0
        while True:
            found = await self._page_of(name)
            done += found
            if found < self._page:
                return done

    async def _page_of(self, name: str) -> int:
        arguments = (timedelta(seconds=self.clock_offset), self._patience, self._page)

        async def work(connection: Connection) -> int:
            await connection.execute(QUERIES["walk_in_order"])
            found: int = await connection.fetchval(QUERIES[name], *arguments)
            return found

        return await self._database.transact(work)
