"""Runs: started, stopped, taken, released, shown. Each method is one transaction and the messages that it owes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_admission import inputs, runs
from rowmill_admission.charges import Charges, charged
from rowmill_admission.datasets import Dataset, summary
from rowmill_admission.decisions import checked, decision_on
from rowmill_admission.endings import end_run, want_advance
from rowmill_admission.owed import Owed, Postman
from rowmill_admission.runs import Run
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.staging import store_whole
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import inputs as input_store
from rowmill_admission.store import owed
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_contracts.budgets import MOST_COUNTED
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.digests import plain_digest
from rowmill_contracts.envelope import NULL
from rowmill_contracts.events import Control
from rowmill_contracts.run_questions import GetRun, GivenInput, ListRuns, OldestRun, RunGiven, RunShown, RunsListed, RunSummary
from rowmill_contracts.runs import (
    EventArrived,
    RecordCalls,
    ReleaseRun,
    RenewRun,
    RunRecord,
    RunStart,
    RunStop,
    RunTaken,
    StagedInput,
    TakeRun,
    TermAnswer,
)
from rowmill_contracts.topology import CONTROL


class Runs:
    """``on_stopped``: called with a run that was stopped, after the commit."""

    def __init__(
        self, database: Database, postman: Postman, charges: Charges, settings: AdmissionSettings, on_stopped: Callable[[str], None]
    ) -> None:
        self._database = database
        self._charges = charges
        self._postman = postman
        self._settings = settings
        self._on_stopped = on_stopped

    # ---- public messages --------------------------------------------------------------------------------------------------------------

    async def start(self, start: RunStart, delivery: Delivery) -> None:
        """Store a run once, whatever is repeated.

        Raises:
            Rejected: rows that are not objects, both ``rows`` and ``input_ref``, or a budget or limit that cannot be kept.

        """
        identity = runs.identity_of(start, delivery.message_id, delivery.body)
        checked(start.options.budget)
        if start.options.limit is not None and start.options.limit >= MOST_COUNTED:
            raise Rejected("a limit of rows must be below 10^15")
        if start.rows is not None and start.input_ref is not None:
            raise Rejected("a RunStart carries rows or an input_ref, not both")
        pages = [
            inputs.page_of(f"run:{identity.text}", number, page)
            for number, page in enumerate(inputs.cut(start.rows or [], self._settings.page_rows, self._settings.page_bytes))
        ]

        async def work(connection: Connection) -> list[str]:
            await run_store.serialise(connection, identity.text)
            age, earlier, stop_reason = await run_store.known_of_identity(connection, identity.text)
            run_id = runs.run_id_for(identity, age, earlier, self._settings.same_body_window)
            if run_id is None:
                return [identity.text]
            staged = _staged_inputs(start, run_id)
            org = start.org or self._settings.default_org
            run = await run_store.insert(connection, run_id, identity.text, start, org, staged, stop_reason)
            if run is not None:
                if start.rows is not None:
                    await store_whole(connection, staged[0].input_id, [replace(page, input_id=staged[0].input_id) for page in pages])
                await self._begin(connection, run, [] if start.rows is not None else [each.input_id for each in staged])
            return [run_id]

        self._postman.wake(await self._database.transact(work))

    async def _begin(self, connection: Connection, run: Run, staged: Sequence[str]) -> None:
        """What a run that was just stored owes: its first event, its budget at the receipt-store, then its body. ``staged``: by clients."""
        if run.over:
            stop = await decision_on(connection, run, "stop", run.stop_reason or "")
            await owed.add(connection, runs.told(run, "cancelled", Counts()), stop)
            return
        known = await input_store.lock(connection, staged) if staged else {}
        failed = next((each.error for each in known.values() if each.state == "failed"), None)
        queued = runs.told(run, "queued", Counts())
        if failed is not None:
            await owed.add(connection, queued)
            await end_run(connection, run, "failed", error=failed)
            return
        if staged:
            await input_store.touch(connection, list(known))
        budget = [] if run.options.budget is None else [await decision_on(connection, run, "resume", "budget")]
        await owed.add(connection, queued, *budget, runs.advance(run.run_id, "started"))

    async def stop(self, request: RunStop) -> None:
        """Store a stop for good, for a run known or not; tell the receipt-store. A run whose retry is being prepared ends when it would go on."""

        async def work(connection: Connection) -> list[str]:
            await run_store.serialise(connection, request.run_id)
            await run_store.insert_stop(connection, request.run_id, request.reason)
            run = await run_store.lock(connection, request.run_id)
            if run is None or run.stopped or (run.over and not run.retrying):
                return [request.run_id]
            await run_store.stop(connection, run.run_id, request.reason)
            await owed.add(
                connection,
                await decision_on(connection, run, "stop", request.reason),
                Owed(run.run_id, Control(run_id=run.run_id, action="stop"), "", CONTROL),
            )
            if not run.retrying and not await dataset_store.any_open(connection, run.run_id):
                await end_run(connection, run, "cancelled")
            return [run.run_id]

        self._postman.wake(await self._database.transact(work))
        self._on_stopped(request.run_id)

    async def event(self, event: EventArrived, delivery: Delivery) -> None:
        """Keep an event, and have the bodies run that wait for it."""
        event_id = event.event_id or delivery.message_id or hashlib.sha256(delivery.body).hexdigest()

        async def work(connection: Connection) -> list[str]:
            await run_store.insert_event(connection, event_id, event.name, event.key, event.payload)
            woken: list[str] = []
            for run_id in await run_store.waiting_for(connection, f"event:{event.name}:{event.key}"):
                run = await run_store.lock(connection, run_id)
                if run is not None:
                    woken += await want_advance(connection, run, f"event {event.name}")
            return woken

        self._postman.wake(await self._database.transact(work))

    # ---- the body's lease -------------------------------------------------------------------------------------------------------------

    async def take(self, request: TakeRun) -> RunTaken:
        if request.read_only:
            return await self._database.transact(lambda connection: self._shown_to_capture(connection, request.run_id))

        async def work(connection: Connection) -> tuple[RunTaken, list[str]]:
            run = await run_store.lock(connection, request.run_id)
            if run is None:
                return RunTaken(outcome="unknown"), []
            verdict = runs.take(run, request.lease_id)
            if verdict in {"busy", "over"}:
                return RunTaken(outcome="busy" if verdict == "busy" else "over"), []
            term = run.term
            if verdict == "taken":
                term = await run_store.take(connection, run.run_id, request.lease_id, self._settings.run_lease)
            stored = await dataset_store.of_runs(connection, [run.run_id])
            if verdict == "taken" and run.state != "running":
                await owed.add(connection, runs.told(run, "running", runs.counts_of(run, stored)))
            record = await _record(connection, run, stored)
            return RunTaken(outcome="taken", term=term, lease_seconds=self._settings.run_lease, run=record), [run.run_id]

        answer, woken = await self._database.transact(work)
        self._postman.wake(woken)
        return answer

    async def _shown_to_capture(self, connection: Connection, run_id: str) -> RunTaken:
        """The record for capture; ``over`` (with the record) for a stopped run, whose rows are to be settled as cancelled."""
        run = await run_store.read(connection, run_id)
        if run is None:
            return RunTaken(outcome="unknown")
        stored = await dataset_store.of_runs(connection, [run_id])
        return RunTaken(outcome="over" if run.stopped else "taken", run=await _record(connection, run, stored))

    async def renew(self, request: RenewRun) -> TermAnswer:
        async def work(connection: Connection) -> TermAnswer:
            run = await run_store.lock(connection, request.run_id)
            held = run is not None and run.holds(request.term) and run.lease_id == request.lease_id
            if held:
                await run_store.renew(connection, request.run_id, self._settings.run_lease)
            return TermAnswer(held=held, stopped=run is not None and run.stopped)

        return await self._database.transact(work)

    async def record(self, request: RecordCalls) -> TermAnswer:
        async def work(connection: Connection) -> TermAnswer:
            run = await run_store.lock(connection, request.run_id)
            held = run is not None and run.holds(request.term)
            if held:
                await run_store.insert_calls(connection, request.run_id, request.calls)
            return TermAnswer(held=held, stopped=run is not None and run.stopped)

        return await self._database.transact(work)

    async def release(self, request: ReleaseRun) -> TermAnswer:
        """The body ended or was dropped. What changed while it ran makes it run once more."""

        async def work(connection: Connection) -> tuple[TermAnswer, list[str]]:
            run = await run_store.lock(connection, request.run_id)
            verdict = "stale" if run is None else runs.release(run, request)
            if run is None or verdict != "now":
                return TermAnswer(held=verdict == "before", stopped=run is not None and run.stopped), [request.run_id]
            await run_store.release(connection, run.run_id)
            if not run.stopped:
                await self._released(connection, run, request)
            return TermAnswer(held=True, stopped=run.stopped), [run.run_id]

        answer, woken = await self._database.transact(work)
        self._postman.wake(woken)
        return answer

    async def _released(self, connection: Connection, run: Run, request: ReleaseRun) -> None:
        stored = await dataset_store.of_runs(connection, [run.run_id])
        counts = runs.counts_of(run, stored)
        if request.outcome == "waiting":
            waiting_for = run.halt_reason or request.waiting_for
            await run_store.set_waiting(connection, run.run_id, waiting_for)
            await owed.add(connection, runs.told(run, "waiting", counts, waiting_for=waiting_for))
            if run.advance_wanted:
                await run_store.note_advance(connection, run.run_id)
                await owed.add(connection, runs.advance(run.run_id, "changed while the body ran"))
            return
        error = request.error or (_accounts(stored) if request.outcome == "completed" else Problem(code="failed", message="no error was given"))
        if error is None:
            await run_store.finish(connection, run.run_id, "completed", output=request.output)
            await owed.add(connection, runs.told(run, "completed", counts, output=request.output))
        else:
            await end_run(connection, run, "failed", error=error)

    # ---- questions of clients ---------------------------------------------------------------------------------------------------------

    async def listed(self, request: ListRuns) -> RunsListed:
        found = await run_store.listed(self._database, request)
        by_run: dict[str, list[Dataset]] = {}
        stored = await self._database.transact(lambda connection: dataset_store.of_runs(connection, [run.run_id for run in found]))
        for dataset in stored:
            by_run.setdefault(dataset.run_id, []).append(dataset)
        told = await self._charges.at_once([run.run_id for run in found])
        return RunsListed(runs=[_summary(run, by_run.get(run.run_id, []), told) for run in found])

    async def oldest(self) -> OldestRun:
        """The oldest run that could need receipts of its time: it is not over, or can be retried.

        Those that can be retried are looked for when no run is held up any more: who was retried meanwhile is found as one that is not over.
        """
        unfinished = await self._database.transact(run_store.oldest)
        retriable = await self._database.transact(lambda connection: run_store.oldest_to_retry(connection, self._settings.retry_retention))
        return OldestRun(started_at=min((each for each in (unfinished, retriable) if each is not None), default=None))

    async def shown(self, request: GetRun) -> RunShown:
        async def work(connection: Connection) -> tuple[Run, list[Dataset], dict[str, int], RunGiven] | None:
            run = await run_store.read(connection, request.run_id)
            if run is None:
                return None
            stored = await dataset_store.of_runs(connection, [run.run_id])
            given = await _given(connection, run)
            return run, stored, {} if run.over else await wait_store.for_providers(connection, run.run_id), given

        found = await self._database.transact(work)
        if found is None:
            return RunShown()
        run, stored, waiting, given = found
        summary = _summary(run, stored, await self._charges.at_once([request.run_id]))  # asked after: of a run that is over it is all
        return RunShown(run=msgspec.structs.replace(summary, rows_waiting=waiting, given=given))


def _staged_inputs(start: RunStart, run_id: str) -> list[StagedInput]:
    """The inputs of a run: the rows in its message under an id made from the run's, or those that the client staged."""
    if start.rows is not None:
        return [StagedInput(input_id=f"run:{run_id}")]
    if isinstance(start.input_ref, str):
        return [StagedInput(input_id=start.input_ref)]
    return [StagedInput(input_id=input_id, field=field) for field, input_id in (start.input_ref or {}).items()]


def _accounts(stored: list[Dataset]) -> Problem | None:
    return next((found for each in stored if each.state != "open" and (found := runs.mismatch(each.dataset, each.counts))), None)


async def _record(connection: Connection, run: Run, stored: Sequence[Dataset]) -> RunRecord:
    """What an executor replays. ``code_digest``: of the code that the run's first dataset was opened with, which the rest of it needs, too; of a run
    that was retried, the code that it goes on with.
    """
    first = stored[0].definition.code_digest if stored else None
    return RunRecord(
        run_id=run.run_id,
        number=run.number,
        org=run.org,
        play=run.play,
        started_at=run.created,
        input=run.input,
        inputs=run.inputs,
        options=run.options,
        calls=await run_store.calls_of(connection, run.run_id),
        code_digest=first if run.attempt == 1 else run.code_digest,
    )


async def _given(connection: Connection, run: Run) -> RunGiven:
    """What a client that starts the run again can compare with what it has."""
    shown = []
    for staged in run.inputs:
        known = await input_store.read(connection, staged.input_id)
        if known is None or known.state != "sealed":
            shown.append(GivenInput(input_id=staged.input_id, field=staged.field))
        else:
            digest = None if known.seal_digest is None else known.seal_digest.lower()
            shown.append(GivenInput(input_id=staged.input_id, field=staged.field, pages=known.seal_pages, rows=known.seal_rows, digest=digest))
    return RunGiven(plain=plain_digest(memoryview(run.input)), inputs=shown, limit=run.options.limit, force=run.options.force)


def _summary(run: Run, stored: list[Dataset], told: Mapping[str, RunCharges] | None) -> RunSummary:
    run = charged(run, told)
    return RunSummary(
        run_id=run.run_id,
        number=run.number,
        org=run.org,
        play=run.play,
        state=run.state,
        counts=runs.counts_of(run, stored),
        charges_known=told is not None,
        retrying=run.retrying,
        budget=run.options.budget,
        waiting_for=run.halt_reason if run.retrying else run.waiting_for,
        created_at=run.created,
        started_at=None if run.state == "queued" else run.created,
        finished_at=run.finished,
        error=run.error,
        output=run.output if run.state == "completed" else NULL,
        datasets=[summary(each) for each in stored],
    )
