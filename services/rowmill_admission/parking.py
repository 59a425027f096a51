"""Parked rows: kept while they wait, published again when due and within the room, settled as cancelled once their run was stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Final

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Connection, Database
from rowmill_admission import halting, waits
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.owed import Postman
from rowmill_admission.page_cutting import page_again
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.runs import OVER
from rowmill_admission.sending import KeyedPage, PageFailed, PageSender, Return
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import feeding
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_admission.store.feeding import Fed, SentPage
from rowmill_admission.store.waits import Wait
from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.runs import RowsParked
from rowmill_contracts.topology import SHEETS_SETTLE

log = structlog.get_logger()

SHORTEST_SLEEP: Final = 0.005
"""Seconds between two looks at the waits at least."""


class Parking:
    """Storing waits, and the loop that ends them."""

    def __init__(self, database: Database, bus: Bus, sender: PageSender, desk: RoomDesk, postman: Postman, settings: AdmissionSettings) -> None:
        self._database = database
        self._bus = bus
        self._sender = sender
        self._desk = desk
        self._postman = postman
        self._settings = settings
        self._parked = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._release_for_ever(), name="waits")

    async def stop(self) -> None:
        if self._loop is not None:
            await cancel_all([self._loop])

    async def store(self, parked: RowsParked) -> None:
        """Keep rows while they wait. ``halted`` rows have no due time, and their run waits with them until it is resumed or stopped."""

        async def work(connection: Connection) -> list[str]:
            dataset = await dataset_store.by_name(connection, parked.run_id, parked.dataset)
            if dataset is None or dataset.state != "open":
                return []
            rows = waits.newest(parked.rows)
            if not parked.halted:
                await wait_store.add(connection, dataset.dataset_seq, rows, parked.reason)
                return []
            run = await run_store.lock(connection, parked.run_id)
            goes_on = run is not None and run.halt_reason is None and not run.stopped
            if goes_on and await run_store.resumed_within(connection, parked.run_id, self._settings.halt_grace):
                await wait_store.add(connection, dataset.dataset_seq, waits.soon(rows), parked.reason)
                return []
            await wait_store.add(connection, dataset.dataset_seq, rows, parked.reason, halted=True)
            return [] if run is None else await halting.halt_run(connection, run, parked.reason)

        self._postman.wake(await self._database.transact(work))
        self._parked.set()

    def nudge(self) -> None:
        """Rows may have become due."""
        self._parked.set()

    # ---- releasing --------------------------------------------------------------------------------------------------------------------

    async def _release_for_ever(self) -> None:
        while True:
            more = False
            pause = self._settings.wait_poll
            try:
                self._parked.clear()
                more = await self.release()
                if not more:
                    pause = waits.sleep_for(await wait_store.next_due(self._database), pause, SHORTEST_SLEEP)
            except UnavailableError as error:
                log.warning("waits_postponed", error=str(error))
            except Exception:
                log.exception("waits_failed")
            if not more:
                await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        """Until the next row is due, or one with an earlier time was parked."""
        try:
            async with asyncio.timeout(seconds):
                await self._parked.wait()
        except TimeoutError:
            return

    async def release(self) -> bool:
        """Publish what is due and fits in the room; settle what has nothing to wait for. True where there may be more."""
        limit = self._settings.release_rows
        found = await wait_store.release_ended(self._database, limit)
        due = await wait_store.next_due(self._database)
        if due is not None and due <= 0:
            self._desk.refresh(await feeding.flights(self._database))  # rows that wait have left the room, whoever last looked
            room = min(limit, self._desk.free())
            if room > 0:
                found += await wait_store.release_due(self._database, room)
        if not found:
            return False
        await self.publish(found)
        self._desk.refresh(await feeding.flights(self._database))
        return len(found) >= limit

    async def release_stuck(self) -> None:
        """Publish rows whose publisher died between marking and publishing them."""
        await self.publish(await wait_store.release_stuck(self._database, self._settings.release_rows, self._settings.releasing_limit))

    async def publish(self, found: Sequence[Wait]) -> None:
        """Publish rows that were marked as being released, or settle them where their run has ended; then mark them as released."""
        ordered = sorted(found, key=lambda wait: (wait.dataset_seq, wait.row_index))
        for dataset_seq, of_dataset in itertools.groupby(ordered, key=lambda wait: wait.dataset_seq):
            fed = await feeding.fed(self._database, dataset_seq)
            if fed is None:
                continue
            by_page: dict[int, list[Wait]] = {}
            for wait in of_dataset:
                by_page.setdefault(wait.page, []).append(wait)
            for sent in await feeding.sent_pages(self._database, dataset_seq, list(by_page)):  # others are their feeder's still
                await self._publish_page(fed, sent, by_page[sent.page])

    async def _publish_page(self, fed: Fed, sent: SentPage, of_page: list[Wait]) -> None:
        standing = fed.standing
        if standing.stop_reason is not None or standing.run_state in OVER:
            await self._settle(fed, sent, of_page)
        else:
            try:
                await self.send_again(fed, sent, waits.returning(of_page, sent.first_index))
            except PageFailed as failed:
                log.warning("page_not_sent_again", run_id=standing.dataset.run_id, page=sent.page, error=failed.problem.message)
                await self._settle(fed, sent, of_page, failed.problem)
        await wait_store.released(self._database, standing.dataset.dataset_seq, of_page)

    async def send_again(self, fed: Fed, sent: SentPage, returning: dict[int, Return]) -> None:
        """Publish rows of a page again, with what the sheet knows of them now; those that have ended meanwhile are left out.

        Raises:
            PageFailed: the page cannot be looked up any more.

        """
        cut = await page_again(self._database, fed.standing.dataset.input_id, sent)
        keyed = KeyedPage(cut, await self._sender.keys(fed, cut), frozenset(sent.duplicates))
        await self._sender.publish(fed, await self._sender.look_up(fed, keyed), returning)

    async def _settle(self, fed: Fed, sent: SentPage, of_page: list[Wait], problem: Problem | None = None) -> None:
        """End rows that will not go on: cancelled with their run, or failed where their page cannot be looked up any more."""
        cut = await page_again(self._database, fed.standing.dataset.input_id, sent)
        rows = [
            SettledRow(
                key=wait.key,
                index=wait.row_index,
                page=wait.page,
                attempt=wait.attempt,
                status="cancelled" if problem is None else "failed",
                error=problem,
                input=cut.rows[wait.row_index - sent.first_index],
            )
            for wait in of_page
        ]
        dataset = fed.standing.dataset
        for part in waits.parts(rows):
            message = RowsSettled(run_id=dataset.run_id, number=fed.number, org=fed.org, play=fed.play, dataset=dataset.dataset, rows=part)
            await self._bus.publish(message, SHEETS_SETTLE)
