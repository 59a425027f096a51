"""Progress events: how far a dataset is, at most so often, over all instances; the last change is always told."""

from __future__ import annotations

import asyncio

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Database
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.charges import Charges
from rowmill_admission.datasets import Dataset, told
from rowmill_admission.store import datasets as dataset_store

log = structlog.get_logger()


class ProgressTeller:
    """Tell `changed` of every change; each dataset's newest counts are told ``interval`` seconds after the first untold change at the latest."""

    def __init__(self, database: Database, bus: Bus, clock: Clock, charges: Charges, *, interval: float) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._charges = charges
        self._interval = interval
        self._waiting: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_at: dict[int, float] = {}
        self._stopped = False

    def changed(self, dataset: Dataset) -> None:
        seq = dataset.dataset_seq
        if dataset.state == "open" and not dataset.is_over and seq not in self._waiting and not self._stopped:
            self._waiting.add(seq)
            task = asyncio.create_task(self._tell(seq), name=f"progress {seq}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        self._stopped = True
        await cancel_all(self._tasks)

    async def _tell(self, dataset_seq: int) -> None:
        try:
            await self._clock.sleep(max(0.0, self._told_at.get(dataset_seq, 0.0) + self._interval - self._clock.monotonic()))
            due = await dataset_store.progress_due(self._database, dataset_seq, self._interval)
            if due is None:  # closed, or another instance told a moment ago: once more, then whoever tells next
                await self._clock.sleep(self._interval)
                due = await dataset_store.progress_due(self._database, dataset_seq, self._interval)
        except UnavailableError as error:
            log.info("progress_untold", error=str(error))
            due = None
        finally:
            self._waiting.discard(dataset_seq)  # what changes from here on is told next time
        if due is None:
            self._told_at.pop(dataset_seq, None)
            return
        self._told_at[dataset_seq] = self._clock.monotonic()
        dataset, play = due
        charges = await self._charges.at_once([dataset.run_id])
        owed = told(dataset, play, "progress", at=self._clock.now(), charges=None if charges is None else charges[dataset.run_id])
        await self._bus.publish(owed.message, owed.key, exchange=owed.exchange)
