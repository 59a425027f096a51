"""One dataset's feeder: from where it is to the input's end, page by page, within the room, as long as its lease holds.

Keys and duplicates are decided in page order; looking up and publishing go side by side, a few pages at once; what is done is stored in page
order, several pages in one commit where they are ready together. A crash at any line repeats pages that were looked up, which are answered as
before, and publishes rows again that executors may have, which changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Connection, Database
from rowmill_admission.datasets import Dataset, not_retried, stops_admission
from rowmill_admission.endings import close_those_over
from rowmill_admission.owed import Postman
from rowmill_admission.page_cutting import CutPage, Cutting, pages_from
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.row_keys import SeenKeys, duplicates_among
from rowmill_admission.runs import OVER
from rowmill_admission.sending import KeyedPage, LookedPage, PageFailed, PageSender
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import feeding
from rowmill_admission.store.feeding import Fed, Lease, LeaseLost, Place, Progress, SentPage, Standing
from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import ReadCounts
from rowmill_contracts.runs import RowsCommitted
from rowmill_contracts.topology import SHEETS_ASKS

log = structlog.get_logger()

LOST_POLL: Final = 1.0
"""Seconds after which a feeder that waits for an answer sees that its lease is lost."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    page: CutPage
    task: asyncio.Task[LookedPage | PageFailed]


@dataclass(frozen=True, slots=True)
class FeederTools:
    """What every feeder of a process works with."""

    database: Database
    bus: Bus
    sender: PageSender
    desk: RoomDesk
    postman: Postman
    settings: AdmissionSettings


class Feeder:
    """Make one per lease, and await `run`; tell it what becomes known with `changed` and `lose`."""

    def __init__(self, fed: Fed, tools: FeederTools) -> None:
        self.lease = Lease(fed.standing.dataset.dataset_seq, fed.standing.term)
        self._fed = fed
        self._tools = tools
        self._standing = fed.standing
        self._dataset = fed.standing.dataset
        self._place = fed.place
        self._admitted, self._sent, self._sent_bytes = self._dataset.counts.admitted, self._dataset.sent, self._dataset.sent_bytes
        self._seen = SeenKeys()
        self._under_way: deque[_UnderWay] = deque()
        self._moved = asyncio.Event()  # a page was added or stored
        self._news = asyncio.Event()  # of the run: each renewal of the leases brings some
        self._exhausted = False
        self._lost = False
        self._problem: Problem | None = None

    def changed(self, dataset: Dataset, standing: Standing | None = None) -> None:
        """Newer counts, or news of the run."""
        self._dataset = dataset
        if standing is not None:
            self._standing = standing
            self._news.set()
        if self._must_end():
            self._tools.desk.stop_waiting(self.lease.dataset_seq)

    @property
    def place(self) -> Place:
        """Where the next page begins that is not on its way."""
        return self._place

    async def give_up(self, problem: Problem) -> None:
        """End admission here, after `run` has failed: the dataset fails when its rows have ended.

        Raises:
            LeaseLost: another feeder has it.

        """
        await self._finish(self._progress([], done=True, error=problem))

    def lose(self) -> None:
        """The lease is another's: stop where it is."""
        self._lost = True
        self._news.set()
        self._moved.set()
        self._tools.desk.stop_waiting(self.lease.dataset_seq)

    async def run(self) -> None:
        """Feed until admission is finished or the lease is lost."""
        self._tools.desk.enter(self._dataset, self._fed.org)
        try:
            async with asyncio.TaskGroup() as group:
                producer = group.create_task(self._to_its_end(self._produce(group)))
                group.create_task(self._to_its_end(self._store_in_order(producer)))
        except* LeaseLost:
            log.info("feeder_lease_lost", run_id=self._dataset.run_id, dataset=self._dataset.dataset, term=self.lease.term)
        finally:
            self._tools.desk.leave(self.lease.dataset_seq)

    async def _to_its_end(self, part: Coroutine[Any, Any, None]) -> None:
        """A part that fails ends the others by word as well as by cancellation, which a library may swallow (see `cancelling`)."""
        try:
            await part
        except BaseException:
            self.lose()
            raise

    # ---- producing --------------------------------------------------------------------------------------------------------------------

    async def _produce(self, group: asyncio.TaskGroup) -> None:
        if self._fed.input_state == "failed":
            self._problem = self._fed.input_error or Problem(code="input", message=f"input {self._dataset.input_id!r} failed")
        elif not self._must_end() or self.lease.term > 1:
            if self._place.page > 0:
                async for digests in feeding.digests(self._tools.database, self.lease.dataset_seq):
                    self._seen.restore(digests)
            await self._produce_pages(group)
        self._exhausted = True
        self._moved.set()

    async def _produce_pages(self, group: asyncio.TaskGroup) -> None:
        settings = self._tools.settings
        pages = pages_from(
            self._tools.database,
            self._dataset.input_id,
            self._place,
            Cutting(self._fed.page_rows, settings.page_bytes, self._dataset.row_limit),
            read_pages=settings.read_ahead_pages,
            read_bytes=settings.read_ahead_bytes,
        )
        async for page in pages:
            while self._standing.halt_reason is not None and not self._must_end():
                self._news.clear()
                await self._news.wait()
            ending = self._must_end()
            if ending and not await self._record_left_behind():
                return
            try:
                keyed = self._keyed(page, await self._tools.sender.keys(self._fed, page))
            except PageFailed as failed:
                self._problem = failed.problem
                return
            while not ending and not await self._tools.desk.wait(self.lease.dataset_seq, page.place.page, len(page.rows), page.size):
                ending = self._must_end()
                if ending and not await self._record_left_behind():
                    return
            self._under_way.append(_UnderWay(page, group.create_task(self._look_up_and_publish(keyed))))
            self._moved.set()
            while len(self._under_way) >= settings.pages_under_way and not self._lost:
                await self._move()

    async def _move(self) -> None:
        """Wait until a page was added or stored."""
        self._moved.clear()
        await self._moved.wait()

    def _keyed(self, page: CutPage, keys: list[bytes]) -> KeyedPage:
        if self._dataset.definition.source_row_identity:
            return KeyedPage(page, keys)
        duplicates, digests = duplicates_among(keys, self._seen)
        return KeyedPage(page, keys, duplicates, digests)

    async def _look_up_and_publish(self, keyed: KeyedPage) -> LookedPage | PageFailed:
        """Returns the failure of a page that cannot be looked up, since those beside it go on."""
        try:
            looked = await self._tools.sender.look_up(self._fed, keyed)
        except PageFailed as failed:
            return failed
        self._tools.desk.resize(self.lease.dataset_seq, keyed.cut.place.page, looked.sent, looked.sent_bytes)
        await self._tools.sender.publish(self._fed, looked)
        return looked

    def _must_end(self) -> bool:
        """No further page is to be looked up."""
        standing = self._standing
        return (
            self._lost
            or self._problem is not None
            or standing.stop_reason is not None
            or standing.run_state in OVER
            or stops_admission(self._dataset) is not None
        )

    async def _record_left_behind(self) -> bool:
        """Whether the sheet-writer has rows on record that an earlier feeder did not get to publish and store: they are published still."""
        if self._lost or self.lease.term <= 1:
            return False
        while self._under_way and not self._lost:
            await self._move()
        request = ReadCounts(run_id=self._dataset.run_id, dataset=self._dataset.dataset)
        recorded = await self._tools.sender.persist(lambda: self._tools.bus.ask(request, SHEETS_ASKS, RowsCommitted))
        return recorded.counts.admitted > self._admitted

    # ---- storing ----------------------------------------------------------------------------------------------------------------------

    async def _store_in_order(self, producer: asyncio.Task[None]) -> None:
        while True:
            while not self._under_way and not self._exhausted and not self._lost:
                await self._move()
            while not self._lost and self._under_way and not self._under_way[0].task.done():
                await asyncio.wait([self._under_way[0].task], timeout=LOST_POLL)
            if self._lost:
                raise LeaseLost
            ready = list(itertools.takewhile(lambda each: each.task.done(), self._under_way))
            done = self._exhausted and len(ready) == len(self._under_way)
            await self._store(ready, done=done)
            for _ in ready:
                self._under_way.popleft()
            self._moved.set()
            if done:
                await producer
                return

    async def _store(self, ready: Sequence[_UnderWay], *, done: bool) -> None:
        """Pages and place in one commit; with the last one, that admission is finished, and perhaps the dataset closed."""
        looked: list[LookedPage] = []
        for each in ready:
            result = each.task.result()
            if isinstance(result, PageFailed):  # ends admission; pages after it that were sent stay admitted
                self._problem = self._problem or result.problem
            else:
                looked.append(result)
            self._place = each.page.following
        self._admitted += sum(page.admitted for page in looked)
        self._sent += sum(page.sent for page in looked)
        self._sent_bytes += sum(page.sent_bytes for page in looked)
        if done:
            standing = await self._finish(self._progress(looked, done=True, error=self._error()))
        else:
            standing = await feeding.store_progress(self._tools.database, self.lease, self._progress(looked), self._renewed_for)
        self.changed(standing.dataset, standing)
        self._tools.desk.recorded(standing.dataset, [each.page.place.page for each in ready])

    def _progress(self, looked: Sequence[LookedPage], *, done: bool = False, error: Problem | None = None) -> Progress:
        return Progress(
            pages=[_sent_page(page) for page in looked],
            place=self._place,
            admitted=self._admitted,
            sent=self._sent,
            sent_bytes=self._sent_bytes,
            done=done,
            error=error,
        )

    async def _finish(self, progress: Progress) -> Standing:
        """Store that admission is finished, and close the dataset if its rows have ended already."""

        async def work(connection: Connection) -> tuple[Standing, list[str]]:
            standing = await feeding.store_progress(connection, self.lease, progress, self._renewed_for)
            return standing, await close_those_over(connection, [standing.dataset])

        standing, woken = await self._tools.database.transact(work)
        self._tools.postman.wake(woken)
        return standing

    @property
    def _renewed_for(self) -> float:
        return self._tools.settings.feeder_lease

    def _error(self) -> Problem | None:
        """Why admission ended early; None where it went to the end, or the run was stopped."""
        if self._problem is not None:
            return self._problem
        if self._standing.stop_reason is None and (unreached := not_retried(self._standing.dataset)) is not None:
            return unreached
        stopped = stops_admission(self._dataset)
        if stopped is not None:
            return stopped
        if self._standing.run_state == "failed":
            return Problem(code="run_failed", message="the run failed before every row was admitted")
        return None


def _sent_page(looked: LookedPage) -> SentPage:
    cut = looked.keyed.cut
    return SentPage(
        page=cut.place.page,
        first_index=cut.place.index,
        rows=len(cut.rows),
        input_page=cut.place.input_page,
        input_offset=cut.place.input_offset,
        duplicates=sorted(looked.keyed.duplicates),
        sent=looked.sent,
        size=cut.size,
        digests=looked.keyed.digests,
    )
