"""Progress events: how far datasets are, at most so often, over all instances; the last change is always told."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Database
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.charges import MOST_RUNS, Charges
from rowmill_admission.datasets import Dataset, told
from rowmill_admission.store import datasets as dataset_store
from rowmill_contracts.charges import RunCharges

log = structlog.get_logger()


class ProgressTeller:
    """Tell `changed` of every change. What has changed is told together, at once or ``interval`` seconds after others were told: one statement for
    all datasets, and one question for what their runs were charged, however many there are.
    """

    def __init__(self, database: Database, bus: Bus, clock: Clock, charges: Charges, *, interval: float) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._charges = charges
        self._interval = interval
        self._changed: set[int] = set()
        self._again: set[int] = set()
        """Told by another instance a moment ago: tried once more, then whoever tells next says what changed."""
        self._telling: asyncio.Task[None] | None = None
        self._told_at = float("-inf")
        self._stopped = False

    def changed(self, dataset: Dataset) -> None:
        if dataset.state == "open" and not dataset.is_over and not self._stopped:
            self._changed.add(dataset.dataset_seq)
            if self._telling is None or self._telling.done():
                self._telling = asyncio.create_task(self._tell_all(), name="progress")

    async def stop(self) -> None:
        self._stopped = True
        if self._telling is not None:
            await cancel_all([self._telling])

    async def _tell_all(self) -> None:
        while self._changed or self._again:
            await self._clock.sleep(max(0.0, self._told_at + self._interval - self._clock.monotonic()))
            changed, again = self._changed, self._again
            self._changed, self._again = set(), set()  # what changes from here on is told next time
            told_now: set[int] = set()
            try:
                told_now = await self._tell(changed | again)
            except UnavailableError as error:
                log.info("progress_untold", error=str(error))
            except Exception:  # others are to be told of all the same
                log.exception("progress_untold")
            self._again = changed - told_now

    async def _tell(self, seqs: Collection[int]) -> set[int]:
        """Tell of those of these datasets that are open, and of which nobody told a moment ago; answers which these are."""
        try:
            due = await dataset_store.progress_due(self._database, seqs, self._interval)
        finally:
            self._told_at = self._clock.monotonic()
        charges = await self._charged(sorted({dataset.run_id for dataset, _ in due}))
        for dataset, play in due:
            owed = told(dataset, play, "progress", at=self._clock.now(), charges=charges.get(dataset.run_id))
            await self._bus.publish(owed.message, owed.key, exchange=owed.exchange)
        return {dataset.dataset_seq for dataset, _ in due}

    async def _charged(self, run_ids: Sequence[str]) -> dict[str, RunCharges]:
        found: dict[str, RunCharges] = {}
        for first in range(0, len(run_ids), MOST_RUNS):
            found.update(await self._charges.at_once(run_ids[first : first + MOST_RUNS]) or {})
        return found
