"""All feeders of a process: taking datasets that nobody feeds, renewing their leases in one statement, ending with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import structlog

from rowmill.errors import UnavailableError
from rowmill_admission.cancelling import cancel_all
from rowmill_admission.datasets import Dataset
from rowmill_admission.feeder import Feeder, FeederTools
from rowmill_admission.store import feeding
from rowmill_contracts.counts import Problem

log = structlog.get_logger()


class Feeders:
    """``feeder_id`` names this process in the leases."""

    def __init__(self, tools: FeederTools, feeder_id: str) -> None:
        self._tools = tools
        self._feeder_id = feeder_id
        self._feeders: dict[int, Feeder] = {}
        self._failures: dict[int, tuple[int, int]] = {}  # by dataset: the page, and how often in a row
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self) -> None:
        """Begin to look for datasets without a feeder."""
        settings = self._tools.settings
        self._spawn(self._repeat(self._renew, settings.feeder_lease / 3), "feeder leases")
        self._spawn(self._repeat(self.take, settings.feeder_look), "feeder look")

    async def stop(self) -> None:
        """End every feeder where it is, and let others take over at once."""
        self._stopping = True
        leases = [feeder.lease for feeder in self._feeders.values()]
        for feeder in self._feeders.values():
            feeder.lose()
        await cancel_all(self._tasks)
        if leases:
            with contextlib.suppress(UnavailableError):
                await feeding.release(self._tools.database, leases)

    async def take(self, *, input_ids: Iterable[str] | None = None, run_id: str | None = None) -> None:
        """Feed what needs a feeder: everywhere, over these inputs, or of this run."""
        settings = self._tools.settings
        taken = await feeding.take(
            self._tools.database,
            self._feeder_id,
            settings.feeder_lease,
            but_for=self._feeders.keys(),
            input_ids=None if input_ids is None else list(input_ids),
            run_id=run_id,
        )
        for dataset_seq in taken:
            fed = await feeding.fed(self._tools.database, dataset_seq)
            if fed is not None and dataset_seq not in self._feeders:
                self._feeders[dataset_seq] = feeder = Feeder(fed, self._tools)
                self._spawn(self._feed(feeder), f"feeder {dataset_seq}")

    def inputs_ended(self, input_ids: Iterable[str]) -> None:
        """Inputs were sealed or failed: their datasets can be fed."""
        self._spawn(self._quietly(partial(self.take, input_ids=list(input_ids))), "feeder take")

    def run_stopped(self, run_id: str) -> None:
        """Feeders of the run end; a dataset that waits for its input gets one to end it."""
        self._spawn(self._quietly(self._renew), "feeder leases")
        self._spawn(self._quietly(partial(self.take, run_id=run_id)), "feeder take")

    def run_stood(self, run_id: str) -> None:  # noqa: ARG002 - one statement tells every feeder how its run stands
        """A run was halted or goes on."""
        self._spawn(self._quietly(self._renew), "feeder leases")

    def changed(self, dataset: Dataset) -> None:
        """Newer counts of a dataset were stored."""
        feeder = self._feeders.get(dataset.dataset_seq)
        if feeder is not None:
            feeder.changed(dataset)
        self._tools.desk.changed(dataset)

    async def _feed(self, feeder: Feeder) -> None:
        dataset_seq = feeder.lease.dataset_seq
        try:
            await feeder.run()
            self._failures.pop(dataset_seq, None)
        except Exception as error:
            log.exception("feeder_failed", dataset_seq=dataset_seq, page=feeder.place.page)
            await self._quietly(partial(self._failed, feeder, error))
        finally:
            if self._feeders.get(dataset_seq) is feeder:
                del self._feeders[dataset_seq]

    async def _failed(self, feeder: Feeder, group: Exception) -> None:
        """Leave the dataset to the next feeder; fail it where they fail again and again at one page."""
        error = root_of(group)
        if isinstance(error, UnavailableError):
            return
        dataset_seq, page = feeder.lease.dataset_seq, feeder.place.page
        last_page, times = self._failures.get(dataset_seq, (page, 0))
        times = times + 1 if last_page == page else 1
        self._failures[dataset_seq] = (page, times)
        if times >= self._tools.settings.feeder_failures:
            await feeder.give_up(Problem(code="admission_failed", message=f"page {page} could not be admitted, tried {times} times: {error!r}"))
            del self._failures[dataset_seq]

    async def _renew(self) -> None:
        feeders = list(self._feeders.values())
        if not feeders:
            return
        standings = await feeding.renew(self._tools.database, [feeder.lease for feeder in feeders], self._tools.settings.feeder_lease)
        held = {(standing.dataset.dataset_seq, standing.term): standing for standing in standings}
        for feeder in feeders:
            standing = held.get((feeder.lease.dataset_seq, feeder.lease.term))
            if standing is None:
                feeder.lose()
            else:
                feeder.changed(standing.dataset, standing)

    async def _repeat(self, look: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        while True:
            await self._quietly(look)
            await asyncio.sleep(seconds)

    async def _quietly(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await look()
        except UnavailableError as error:
            log.warning("feeder_look_failed", error=str(error))
        except Exception:  # the looks go on
            log.exception("feeder_look_failed")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._stopping:
            work.close()
            return
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def root_of(error: BaseException) -> BaseException:
    """The first error of a group, which is what a task group raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
