"""How runs and datasets end, inside the transaction that finds out: failing and cancelling runs, closing datasets, asking for the body once more.

Order of locks everywhere: input, then dataset, then run. Who holds a run's lock locks no dataset or input.
Each function returns the runs that owe messages after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from rowmill.runtime.db import Connection
from rowmill_admission import datasets
from rowmill_admission.datasets import Dataset
from rowmill_admission.runs import Run, advance, counts_of, told
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import inputs as input_store
from rowmill_admission.store import owed
from rowmill_admission.store import runs as run_store
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.runs import RunState


async def read_counts(connection: Connection, run: Run) -> Counts:
    """The run's counts as they are now."""
    return counts_of(run, await dataset_store.of_runs(connection, [run.run_id]))


async def end_run(connection: Connection, run: Run, state: RunState, *, error: Problem | None = None) -> list[str]:
    """End a locked run that is not over, and tell."""
    await run_store.finish(connection, run.run_id, state, error=error)
    await owed.add(connection, told(run, state, await read_counts(connection, run), error=error))
    return [run.run_id]


async def fail_run(connection: Connection, run_id: str, error: Problem) -> list[str]:
    """Fail a run for good; nothing where it is over or stopped (a stopped run ends as cancelled)."""
    run = await run_store.lock(connection, run_id)
    if run is None or run.over or run.stopped:
        return []
    return await end_run(connection, run, "failed", error=error)


async def fail_input(connection: Connection, input_id: str, error: Problem) -> list[str]:
    """Fail a locked input, and the runs that use it."""
    await input_store.end(connection, input_id, "failed", error)
    woken: list[str] = []
    for run_id in await input_store.runs_of(connection, input_id):
        woken += await fail_run(connection, run_id, error)
    return woken


async def want_advance(connection: Connection, run: Run, reason: str) -> list[str]:
    """Have the body of a locked run run once more: now, or when who holds it lets go."""
    if run.over or run.stopped:
        return []
    if run.lease_live:
        await run_store.want_advance(connection, run.run_id)
        return []
    await run_store.note_advance(connection, run.run_id)
    await owed.add(connection, advance(run.run_id, reason))
    return [run.run_id]


async def close_those_over(connection: Connection, candidates: Sequence[Dataset]) -> list[str]:
    """Close each of these locked datasets whose last row has ended; of a stopped run the last one to close ends it."""
    woken: list[str] = []
    for dataset in sorted(candidates, key=lambda each: each.run_id):
        if not dataset.is_over:
            continue
        state, error = datasets.ending(dataset)
        closed, at = await dataset_store.close(connection, dataset, state, error)
        run = await run_store.lock(connection, dataset.run_id)
        if run is None:
            continue
        await owed.add(connection, datasets.told(closed, run.play, "closed", at=at))
        woken.append(run.run_id)
        if run.stopped and not run.over:
            if not await dataset_store.any_open(connection, run.run_id):
                await end_run(connection, run, "cancelled")
        else:
            await want_advance(connection, run, f"dataset {dataset.dataset} closed")
    return woken
