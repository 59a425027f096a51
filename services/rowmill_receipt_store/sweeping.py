"""The owner's look at reservations that nobody will settle: claims whose holder vanished before anything was sent (SPEC 4.7).

A claim that is over costs nothing once its key is claimed again, but perhaps nobody ever does. It is released, and its reservation refunded, in one
statement. Confirmed dispatches are left alone: they may have been sent.
"""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import structlog

from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Connection, Database
from rowmill_receipt_store.store import QUERIES

log = structlog.get_logger()

Place = tuple[str, bytes, int]
"""A charge: run, key, dispatch."""

START: Place = ("", b"", -1)


class Sweep:
    """``interval``: seconds between looks. ``patience``: seconds for which a lease has been over before it is given up: its holder may be late.
    ``page``: charges that one statement looks at; ``pages``: of them in one look, which goes on where the last one ended. ``clock_offset``: as in
    `Store`.
    """

    def __init__(self, database: Database, clock: Clock, *, interval: float, patience: float, page: int, pages: int) -> None:
        self._database = database
        self._clock = clock
        self._interval = interval
        self._patience = timedelta(seconds=patience)
        self._page = page
        self._pages = pages
        self._place = START
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
        """Look at the next pages of charges. Answers how many claims were released."""
        released = 0
        for _ in range(self._pages):
            row = await self._sweep()
            released += row["released"]
            self._place = START if row["run_id"] is None else (row["run_id"], row["key"], row["dispatch"])
            if self._place == START:
                break
        if released:
            log.info("unsent_claims_released", claims=released)
        return released

    async def _sweep(self) -> asyncpg.Record:
        arguments = (timedelta(seconds=self.clock_offset), self._patience, self._page, *self._place)

        async def work(connection: Connection) -> asyncpg.Record:
            await connection.execute(QUERIES["walk_in_order"])
            [row] = await connection.fetch(QUERIES["sweep"], *arguments)
            return row

        return await self._database.transact(work)
