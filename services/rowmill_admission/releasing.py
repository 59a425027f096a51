"""What ends the waiting of rows: published again when due and within the room, settled as cancelled once their run was stopped."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Final

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Database
from rowmill_admission import waits
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.datasets import not_retried
from rowmill_admission.page_cutting import page_again
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.runs import OVER
from rowmill_admission.sending import KeyedPage, PageFailed, PageSender, Return
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import feeding
from rowmill_admission.store import waits as wait_store
from rowmill_admission.store.feeding import Fed, SentPage
from rowmill_admission.store.waits import Wait
from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_contracts.topology import SHEETS_SETTLE

log = structlog.get_logger()

SHORTEST_SLEEP: Final = 0.005
"""Seconds between two looks at the waits at least."""
LOOKS: Final = 10
"""How often it is looked for what somebody began to publish and did not, while one may publish."""


class Releasing:
    """The loop that looks for rows whose waiting is over. Each dataset's rows are published by a task of their own, one at a time, so that a
    dataset whose pages cannot be looked up (or keyed, where only an executor with its code can) holds up no other.
    """

    def __init__(self, database: Database, bus: Bus, sender: PageSender, desk: RoomDesk, clock: Clock, settings: AdmissionSettings) -> None:
        self._database = database
        self._bus = bus
        self._sender = sender
        self._desk = desk
        self._clock = clock
        self._settings = settings
        self._nudged = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._publishing: dict[int, asyncio.Task[None]] = {}
        self._failed: set[tuple[int, int]] = set()
        """(dataset, page) of which publishing failed the last time, or took too long; of open datasets."""
        self._stuck_looked_for = -math.inf

    def start(self) -> None:
        self._loop = asyncio.create_task(self._release_for_ever(), name="waits")

    async def stop(self) -> None:
        """Rows that are being published stay marked so; another instance publishes them."""
        await cancel_all([*([] if self._loop is None else [self._loop]), *self._publishing.values()])

    def nudge(self) -> None:
        """Rows were parked, or may have become due."""
        self._nudged.set()

    async def _release_for_ever(self) -> None:
        while True:
            more = False
            pause = self._settings.wait_poll
            try:
                self._nudged.clear()
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
                await self._nudged.wait()
        except TimeoutError:
            return

    async def release(self) -> bool:
        """Begin to publish what is due and fits in the room, and to settle what has nothing to wait for. True where there may be more."""
        await self._release_stuck()
        limit = self._settings.release_rows
        busy = self._publishing.keys()
        found = await wait_store.release_ended(self._database, limit, but_for=busy)
        due = await wait_store.next_due(self._database)
        kept = 0
        if due is not None and due <= 0:
            await self._desk.look()  # rows that wait have left the room, whoever last looked
            room = min(limit, self._desk.free())
            released = await wait_store.release_due(self._database, room, but_for=busy) if room > 0 else []
            kept = limit if room < limit and len(released) == room else 0  # there may be more, which go before new ones
            found += released
        self._desk.keep_free(kept)
        if not found:
            return False
        self._begin(found)
        await self._desk.look()
        return len(found) >= limit

    async def _release_stuck(self) -> None:
        """Publish rows whose publisher died, or gave up, between marking and publishing them. Those of a dataset that is being published come when it
        is not, which may be for a moment only: so before what is due, and much more often than publishing may take.
        """
        settings, now = self._settings, self._clock.monotonic()
        if now < self._stuck_looked_for + settings.releasing_limit / LOOKS:
            return
        self._stuck_looked_for = now
        if self._failed:
            known = {dataset_seq for dataset_seq, _ in self._failed}
            over = known - await feeding.open_among(self._database, known)
            self._failed -= {page for page in self._failed if page[0] in over}
        self._begin(await wait_store.release_stuck(self._database, settings.release_rows, settings.releasing_limit, but_for=self._publishing.keys()))

    def _begin(self, found: Sequence[Wait]) -> None:
        ordered = sorted(found, key=lambda wait: (wait.dataset_seq, wait.row_index))
        for dataset_seq, of_dataset in itertools.groupby(ordered, key=lambda wait: wait.dataset_seq):
            if dataset_seq not in self._publishing:  # else they are stuck, and found again
                self._publishing[dataset_seq] = asyncio.create_task(self._publish(dataset_seq, list(of_dataset)), name=f"waits {dataset_seq}")

    async def _publish(self, dataset_seq: int, rows: Sequence[Wait]) -> None:
        """Publish rows that were marked as being released, or settle them where their run has ended; then mark them as released."""
        try:
            async with asyncio.timeout(self._settings.releasing_limit):
                fed = await feeding.fed(self._database, dataset_seq)
                if fed is None:
                    return
                by_page: dict[int, list[Wait]] = {}
                for wait in rows:
                    by_page.setdefault(wait.page, []).append(wait)
                sent_pages = await feeding.sent_pages(self._database, dataset_seq, list(by_page))  # others are their feeder's still
                for sent in sorted(sent_pages, key=lambda sent: self._order(dataset_seq, sent.page, by_page[sent.page])):
                    await self._publish_in_turn(fed, sent, by_page[sent.page])
        except (UnavailableError, TimeoutError) as error:
            log.warning("waits_postponed", dataset_seq=dataset_seq, rows=len(rows), error=str(error) or "no answer in time")
        except Exception:
            log.exception("waits_failed", dataset_seq=dataset_seq)
        finally:
            del self._publishing[dataset_seq]
            self._nudged.set()

    def _order(self, dataset_seq: int, page: int, of_page: list[Wait]) -> tuple[bool, float]:
        """The page whose call was asked for first is first; those that were not published the last time are last."""
        return (dataset_seq, page) in self._failed, min(wait.asked or 0.0 for wait in of_page)

    async def _publish_in_turn(self, fed: Fed, sent: SentPage, of_page: list[Wait]) -> None:
        """Publish a page. One with which that fails holds up no other of its dataset, and is found again as stuck."""
        page = (fed.standing.dataset.dataset_seq, sent.page)
        self._failed.add(page)
        try:
            await self._publish_page(fed, sent, of_page)
        except (UnavailableError, TimeoutError):
            raise
        except Exception:
            log.exception("waits_failed", dataset_seq=page[0], page=sent.page, rows=len(of_page))
        else:
            self._failed.discard(page)

    async def _publish_page(self, fed: Fed, sent: SentPage, of_page: list[Wait]) -> None:
        standing = fed.standing
        if standing.stop_reason is not None:
            await self._settle(fed, sent, of_page)
        elif standing.run_state in OVER:
            await self._settle(fed, sent, of_page, not_retried(standing.dataset))
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
        """End rows that will not go on: cancelled with their run, or failed by ``problem`` (their page cannot be looked up any more, say)."""
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
