"""Retries: the failed rows of a run that is over are worked again (SPEC 5.3).

A retry takes three steps. It is noted, and the receipt-store told that the run's failures count no more. The sheet-writer lets the rows be worked
again, at the next attempt, and each is kept as waiting. Then, in one commit, the run goes on. Until then it is over, and the message that asked for
the retry is not acknowledged: whoever gets it again goes on where the last one was. Rows come back once the run's body has come to their dataset
again, so that they are worked by the code that there is now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Connection, Database
from rowmill.runtime.deliveries import Delivery
from rowmill_admission import runs
from rowmill_admission.datasets import Dataset
from rowmill_admission.decisions import decision_on
from rowmill_admission.halting import tell_halt
from rowmill_admission.owed import Postman
from rowmill_admission.running import Runs
from rowmill_admission.runs import Run
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import owed, retries
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_contracts.retries import ReopenRows, RowsReopened, RunRetry
from rowmill_contracts.run_questions import GetRun, RunShown
from rowmill_contracts.runs import ParkedRow, RowsCommitted
from rowmill_contracts.topology import SHEETS_ASKS

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Begun:
    """A run whose retry is under way: what it was when it was over, and the attempt that its rows get now."""

    run: Run
    attempt: int
    datasets: Sequence[Dataset]


class Retrying:
    """``on_change``: called with a run that goes on again, after the commit."""

    def __init__(
        self, database: Database, bus: Bus, postman: Postman, runs_: Runs, settings: AdmissionSettings, on_change: Callable[[str], None]
    ) -> None:
        self._database = database
        self._bus = bus
        self._postman = postman
        self._runs = runs_
        self._settings = settings
        self._on_change = on_change

    async def retry(self, request: RunRetry, delivery: Delivery) -> RunShown:
        """Have the failed rows of a run worked again, once for each request.

        Raises:
            UnavailableError: the receipt-store or the sheet-writer does not answer; the retry goes on when the request comes again.

        """
        identity, from_body = _identity_of(request, delivery)

        begun = await self._database.transact(lambda connection: self._begin(connection, request.run_id, identity, from_body=from_body))
        if isinstance(begun, str):
            log.warning("retry_refused", run_id=request.run_id, reason=begun)
            shown = await self._runs.shown(GetRun(run_id=request.run_id))
            return RunShown(run=shown.run, refused=begun)
        if begun is not None:
            await self._told(request.run_id)
            counts = [await self._reopen(begun, dataset) for dataset in begun.datasets]
            await self._database.transact(lambda connection: self._go_on(connection, begun, counts))
            self._postman.wake([request.run_id])
            self._on_change(request.run_id)
        return await self._runs.shown(GetRun(run_id=request.run_id))

    async def _begin(self, connection: Connection, run_id: str, identity: str, *, from_body: bool) -> Begun | str | None:
        """Note the retry and what is to be reopened, or find it noted; a string says why there is none, None that there is nothing to do."""
        seqs = [each.dataset_seq for each in await dataset_store.of_runs(connection, [run_id])]
        stored = await dataset_store.lock(connection, seqs)
        run = await run_store.lock(connection, run_id)
        if run is None:
            return None
        known = await retries.is_known(connection, run_id, identity, self._settings.same_body_window if from_body else None)
        if run.retrying:
            await retries.note(connection, run_id, identity)
            return Begun(run, run.attempt, [each for each in stored if each.reopened])
        if known:
            return None
        if not run.over:  # what failed of it meanwhile is for another retry
            await retries.note(connection, run_id, identity)
            return None
        again = [each for each in stored if runs.needs_retry(run, each)]
        refused = await _why_not(connection, run, stored, again, self._settings.retry_retention)
        if refused is not None:
            return refused
        await retries.note(connection, run_id, identity)
        await retries.begin(connection, run_id, again)
        await owed.add(connection, await decision_on(connection, run, "resume", "retried", retry=True))
        return Begun(run, run.attempt + 1, again)

    async def _told(self, run_id: str) -> None:
        await self._postman.sent(
            run_id, within=self._settings.halt_timeout, otherwise=f"the receipt-store does not answer, so run {run_id} is not retried for now"
        )

    async def _reopen(self, begun: Begun, dataset: Dataset) -> RowsCommitted:
        """Let a dataset's rows be worked again, and keep each as waiting; answers its counts as they are then."""
        run_id, name, page = dataset.run_id, dataset.dataset, 0
        while True:
            request = ReopenRows(
                run_id=run_id,
                number=begun.run.number,
                dataset=name,
                attempt=begun.attempt,
                page=page,
                cancelled=begun.run.state == "failed",
            )
            answer = await self._bus.ask(request, SHEETS_ASKS, RowsReopened)
            await self._keep(dataset, answer.rows)
            if answer.next_page is None:
                return RowsCommitted(run_id=run_id, dataset=name, counts=answer.counts, version=answer.version)
            page = answer.next_page

    async def _keep(self, dataset: Dataset, rows: Sequence[ParkedRow]) -> None:
        async def work(connection: Connection) -> None:
            run = await run_store.lock(connection, dataset.run_id)
            if run is not None and run.retrying:  # else another has finished this retry
                await wait_store.add(connection, dataset.dataset_seq, rows, retries.REASON)

        if rows:
            await self._database.transact(work)

    async def _go_on(self, connection: Connection, begun: Begun, counts: Sequence[RowsCommitted]) -> None:
        """The run is not over any more; its body runs anew from where the first of these datasets had been closed: at once, or when somebody resumes
        the run, where it was paused meanwhile.

        Of a run that was stopped meanwhile the rows are out, and end as cancelled like those of any other; it ends with them.
        """
        if counts:
            await dataset_store.store_counts(connection, counts)
        await dataset_store.lock(connection, [each.dataset_seq for each in begun.datasets])
        run = await run_store.lock(connection, begun.run.run_id)
        if run is None or not run.retrying:
            return
        await retries.reopen(connection, run.run_id, begun.datasets)
        if run.stopped:
            return
        if run.halt_reason is not None:
            await tell_halt(connection, run, run.halt_reason)
            return
        stored = await dataset_store.of_runs(connection, [run.run_id])
        await owed.add(connection, runs.told(run, "running", runs.counts_of(run, stored)), runs.advance(run.run_id, "failed rows are retried"))


async def _why_not(connection: Connection, run: Run, stored: Sequence[Dataset], again: Sequence[Dataset], retention: float) -> str | None:
    """Why a run that is over cannot be retried; None: it can. ``again``: of its datasets those with something to be worked again. ``retention``:
    seconds after they ended.
    """
    if run.stopped or await run_store.is_stopped(connection, run.run_id):
        return f"run {run.run_id} was stopped, and a stopped run stays stopped; start a new one: what is paid for stays paid"
    if any(each.state == "open" for each in stored):
        return f"rows of run {run.run_id} are still under way although it has ended; ask again in a moment"
    if not again:
        why = "" if run.error is None else f"; the run itself failed: {run.error.message}"
        return f"no row of run {run.run_id} failed{why}; start it anew: what is paid for stays paid"
    if await retries.are_too_old(connection, again, retention):
        return f"run {run.run_id} ended too long ago: what it needs may be forgotten; start a new run with --force failed"
    return None


def _identity_of(request: RunRetry, delivery: Delivery) -> tuple[str, bool]:
    """What makes two requests one, and whether that is the body alone."""
    if request.retry_id is not None:
        return request.retry_id, False
    if 0 < len(delivery.message_id) <= runs.MAX_IDENTITY:
        return delivery.message_id, False
    return f"body:{hashlib.sha256(delivery.body).hexdigest()}", True
