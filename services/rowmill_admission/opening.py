"""Opening datasets: the first request stored for (run, dataset) decides, and is answered the same whoever asks again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rowmill.runtime.db import Connection, Database
from rowmill_admission import datasets
from rowmill_admission.owed import Postman
from rowmill_admission.runs import Run
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import inputs as input_store
from rowmill_admission.store import owed, retries
from rowmill_admission.store import runs as run_store
from rowmill_contracts.counts import Counts
from rowmill_contracts.runs import DatasetOpened, OpenDataset


class Opening:
    """``on_opened``: called with the run of a dataset that is new, or open again, after the commit."""

    def __init__(self, database: Database, postman: Postman, settings: AdmissionSettings, on_opened: Callable[[str], Awaitable[None]]) -> None:
        self._database = database
        self._postman = postman
        self._settings = settings
        self._on_opened = on_opened

    async def open(self, request: OpenDataset) -> DatasetOpened:
        await input_store.ensure(self._database, request.input_id)

        async def work(connection: Connection) -> tuple[DatasetOpened, bool]:
            known = await dataset_store.by_name(connection, request.run_id, request.dataset)
            again = await dataset_store.lock(connection, [known.dataset_seq]) if known is not None and known.reopened else []
            run = await run_store.lock(connection, request.run_id)
            if run is None or not run.holds(request.term):
                return DatasetOpened(outcome="stale"), False
            reopened = next((each for each in again if each.reopened and each.state == "open"), None)
            if reopened is not None:
                await retries.adopt(connection, reopened, request)
            new = reopened is not None or await self._store(connection, run, request)
            stored = await dataset_store.by_name(connection, request.run_id, request.dataset)
            return DatasetOpened(outcome="stale") if stored is None else datasets.opened(stored), new

        answer, new = await self._database.transact(work)
        if new:
            self._postman.wake([request.run_id])
            await self._on_opened(request.run_id)
        return answer

    async def _store(self, connection: Connection, run: Run, request: OpenDataset) -> bool:
        window = min(self._settings.run_room, request.concurrency or run.options.concurrency or self._settings.run_room)
        at = await dataset_store.insert(
            connection,
            request,
            page_rows=min(self._settings.page_rows, window),
            row_limit=run.options.limit,
            run_window=window,
        )
        if at is None:
            return False
        event = datasets.Dataset(
            dataset_seq=0,
            run_id=run.run_id,
            dataset=request.dataset,
            input_id=request.input_id,
            definition=request,
            counts=Counts(),
            row_limit=run.options.limit,
            input_rows=await input_store.sealed_rows(connection, request.input_id),
        )
        await owed.add(connection, datasets.told(event, run.play, "opened", at=at))
        return True
