"""The look: every so often, stored state that calls for a message nobody sent, or a condition nobody acted on, whatever was confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Connection, Database
from rowmill_admission import inputs, runs, waits
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.counting import Counting
from rowmill_admission.endings import close_those_over, end_run
from rowmill_admission.halting import halt_if_out_of_time
from rowmill_admission.owed import Postman
from rowmill_admission.releasing import Releasing
from rowmill_admission.sending import PageFailed
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.staging import Staging
from rowmill_admission.store import commands, feeding, owed, retries
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import inputs as input_store
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_contracts.rows import ReadCounts
from rowmill_contracts.runs import RowsCommitted
from rowmill_contracts.topology import SHEETS_ASKS

log = structlog.get_logger()

ItemT = TypeVar("ItemT", bound=Hashable)


class Repair:
    """One per process; several looking at once do no harm."""

    def __init__(
        self,
        database: Database,
        bus: Bus,
        postman: Postman,
        settings: AdmissionSettings,
        *,
        staging: Staging,
        counting: Counting,
        releasing: Releasing,
    ) -> None:
        self._database = database
        self._bus = bus
        self._postman = postman
        self._settings = settings
        self._staging = staging
        self._counting = counting
        self._releasing = releasing
        self._loop: asyncio.Task[None] | None = None
        self._failed: dict[str, set[Hashable]] = {}
        """By part: what failed at the last look, or used up its time."""

    def start(self) -> None:
        self._loop = asyncio.create_task(self._look_for_ever(), name="repair")

    async def stop(self) -> None:
        if self._loop is not None:
            await cancel_all([self._loop])

    async def _look_for_ever(self) -> None:
        self._postman.wake(await self._owing(0.0))  # what an instance that died left behind
        while True:
            await self.look()
            await asyncio.sleep(self._settings.repair_interval)

    async def look(self) -> None:
        """Everything once; what fails is tried again next time."""
        parts: tuple[Callable[[], Awaitable[None]], ...] = (
            self._send_owed,
            self._close,
            self._end_stopped,
            self._halt_late,
            self._advance_again,
            self._fail_abandoned_inputs,
            self._ask_for_silent,
            self._forget,
        )
        for part in parts:
            try:
                async with asyncio.timeout(self._settings.repair_limit):
                    await part()
            except (UnavailableError, TimeoutError) as error:
                log.warning("repair_postponed", part=part.__name__, error=str(error) or "it took too long")
            except Exception:
                log.exception("repair_failed", part=part.__name__)

    async def _each(self, part: str, items: Iterable[ItemT], work: Callable[[ItemT], Awaitable[None]]) -> None:
        """Do it for one after the other. One that fails, or takes all the time of the part, holds up no other for ever: it is last the next time."""
        known = self._failed.get(part, set())
        failed: set[Hashable] = set()
        self._failed[part] = failed
        for item in sorted(items, key=known.__contains__):
            failed.add(item)
            try:
                await work(item)
            except UnavailableError as error:
                log.warning("repair_postponed", part=part, item=item, error=str(error))
            except Exception:
                log.exception("repair_failed", part=part, item=item)
            else:
                failed.discard(item)

    async def _owing(self, seconds: float) -> list[str]:
        return await owed.runs_owing(self._database, seconds)

    async def _send_owed(self) -> None:
        self._postman.wake(await self._owing(self._settings.repair_interval))

    async def _close(self) -> None:
        async def close(dataset_seq: int) -> None:
            async def work(connection: Connection) -> list[str]:
                return await close_those_over(connection, await dataset_store.lock(connection, [dataset_seq]))

            self._postman.wake(await self._database.transact(work))

        await self._each("close", await dataset_store.over(self._database), close)

    async def _end_stopped(self) -> None:
        async def end(run_id: str) -> None:
            async def work(connection: Connection) -> list[str]:
                run = await run_store.lock(connection, run_id)
                if run is None or run.over or await dataset_store.any_open(connection, run_id):
                    return []
                return await end_run(connection, run, "cancelled")

            self._postman.wake(await self._database.transact(work))

        await self._each("end_stopped", await run_store.stopped_with_nothing_open(self._database), end)

    async def _halt_late(self) -> None:
        async def halt(run_id: str) -> None:
            async def work(connection: Connection) -> list[str]:
                return await halt_if_out_of_time(connection, run_id)

            self._postman.wake(await self._database.transact(work))

        await self._each("halt_late", await run_store.out_of_time(self._database), halt)

    async def _advance_again(self) -> None:
        async def advance(run_id: str) -> None:
            async def work(connection: Connection) -> list[str]:
                run = await run_store.lock(connection, run_id)
                if run is None or run.over or run.stopped or run.lease_live:
                    return []
                await run_store.note_advance_again(connection, run_id)
                await owed.add(connection, runs.advance(run_id, "nobody holds it"))
                return [run_id]

            self._postman.wake(await self._database.transact(work))

        settings = self._settings
        await self._each(
            "advance_again", await run_store.to_advance_again(self._database, settings.repair_interval, settings.advance_again_limit), advance
        )

    async def _fail_abandoned_inputs(self) -> None:
        limit = self._settings.input_unsealed_limit
        abandoned = await input_store.unsealed_for(self._database, limit)
        await self._each("fail_abandoned", abandoned, lambda input_id: self._staging.fail(input_id, inputs.abandoned(input_id, limit)))

    async def _ask_for_silent(self) -> None:
        settings = self._settings

        async def ask(silent: tuple[int, str, str]) -> None:
            seq, run_id, dataset = silent
            counts = await self._bus.ask(ReadCounts(run_id=run_id, dataset=dataset), SHEETS_ASKS, RowsCommitted)
            await self._counting.store([counts])
            await dataset_store.note_heard(self._database, run_id, dataset)
            pages = [progress.page for progress in counts.pages if progress.open > 0]
            if pages:
                await self._send_again(seq, await feeding.pages_to_send_again(self._database, seq, pages, settings.page_again_after))

        await self._each("ask_for_silent", await dataset_store.silent(self._database, settings.silent_after, settings.page_again_after), ask)

    async def _send_again(self, dataset_seq: int, pages: list[int]) -> None:
        """Publish pages again that have been out for too long, but for rows that wait."""
        fed = await feeding.fed(self._database, dataset_seq) if pages else None
        if fed is None or fed.standing.halt_reason is not None:
            return
        for sent in await feeding.sent_pages(self._database, dataset_seq, pages):
            log.warning("page_sent_again", run_id=fed.standing.dataset.run_id, dataset=fed.standing.dataset.dataset, page=sent.page)
            waiting = await wait_store.of_page(self._database, dataset_seq, sent.page)
            try:
                await self._releasing.send_again(fed, sent, waits.still_out(sent.rows, sent.first_index, waiting))
            except PageFailed as failed:
                log.warning("page_not_sent_again", run_id=fed.standing.dataset.run_id, page=sent.page, error=failed.problem.message)
            except UnavailableError:
                raise
            except Exception:  # the pages after it are not to wait for it
                log.exception("page_not_sent_again", run_id=fed.standing.dataset.run_id, page=sent.page)

    async def _forget(self) -> None:
        await run_store.forget_events(self._database, self._settings.event_retention)
        await feeding.forget_closed(self._database, self._settings.silent_after, self._settings.retry_retention)
        await retries.forget(self._database, self._settings.retry_retention)
        await commands.forget(self._database, self._settings.command_retention)
