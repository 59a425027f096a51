"""What runs are shown to have been charged: what the receipt-store says at that time, and what was last heard where it says nothing."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows, settled

from rowmill_contracts.charges import RunCharges
from rowmill_contracts.counts import Problem
from rowmill_contracts.events import DatasetEvent, RunEvent
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.run_questions import ListRuns, PauseRun, RunShown, RunsListed, RunSummary
from rowmill_contracts.topology import ADMISSION_ASKS

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


def charge(neighbours: Neighbours, run_id: str, calls: int) -> None:
    """From now on the run has been charged a cent for each of so many calls."""
    version = neighbours.charges[run_id].version if run_id in neighbours.charges else 0
    neighbours.charges[run_id] = RunCharges(run_id=run_id, version=version + 1, cost=Decimal(calls) / 100, calls=calls)


def told(neighbours: Neighbours, run_id: str, state: str) -> RunEvent:
    return [event for event in neighbours.events if isinstance(event, RunEvent) and (event.run_id, event.state) == (run_id, state)][-1]


async def shown(neighbours: Neighbours, run_id: str) -> RunSummary:
    found = await neighbours.get(run_id)
    assert found is not None
    return found


async def test_a_run_is_shown_to_cost_what_it_was_charged_whatever_its_rows_say(neighbours: Neighbours) -> None:
    run_id = new_run_id()

    def fails_dearly(tasks: RowTasks) -> list[SettledRow]:
        charge(neighbours, run_id, 7)
        return [settled(row, "failed" if row.index else "completed", Problem(code="refused", message="no")) for row in tasks.rows]

    neighbours.work = fails_dearly
    await neighbours.start(run_id, rows=rows(5))
    await neighbours.until(lambda: neighbours.ended(run_id))

    ended = told(neighbours, run_id, "completed")
    assert (ended.counts.failed, ended.counts.calls, ended.counts.cost, ended.cost) == (4, 7, Decimal("0.07"), Decimal("0.07"))
    summary = await shown(neighbours, run_id)
    assert (summary.counts.calls, summary.counts.cost, summary.charges_known) == (7, Decimal("0.07"), True)
    assert [each.counts.calls for each in summary.datasets] == [0], "what its rows have now cost nothing"

    charge(neighbours, run_id, 9)  # a call that was under way when the run ended
    assert (await shown(neighbours, run_id)).counts.calls == 9
    listed = await neighbours.bus.ask(ListRuns(limit=10), ADMISSION_ASKS, RunsListed)
    assert [run.counts.cost for run in listed.runs if run.run_id == run_id] == [Decimal("0.09")]


async def test_the_end_of_a_run_is_told_late_rather_than_with_less(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.charges_away = True
    charge(neighbours, run_id, 3)
    await neighbours.start(run_id, rows=rows(3))
    await neighbours.until(lambda: neighbours.states(run_id).count("running") == 2)
    async with asyncio.timeout(20):
        while (found := await shown(neighbours, run_id)).state != "completed":
            await asyncio.sleep(0.05)
    assert (found.counts.completed, found.counts.calls, found.charges_known) == (3, 0, False)
    assert not neighbours.ended(run_id)

    neighbours.charges_away = False
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert told(neighbours, run_id, "completed").cost == Decimal("0.03")


async def test_what_was_last_heard_is_shown_where_the_receipt_store_does_not_answer(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    charge(neighbours, run_id, 2)
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(run_id))
    neighbours.charges_away = True
    charge(neighbours, run_id, 4)
    ask: Any = partial(neighbours.bus.ask, timeout=20)

    shown = (await ask(ListRuns(limit=1), ADMISSION_ASKS, RunsListed)).runs[0]

    assert (shown.run_id, shown.counts.calls, shown.counts.cost, shown.charges_known) == (run_id, 2, Decimal("0.02"), False)


async def test_an_older_word_does_not_undo_a_newer_one(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    charge(neighbours, run_id, 1)
    older = neighbours.charges[run_id]
    charge(neighbours, run_id, 0)  # refunded
    await neighbours.start(run_id, rows=rows(1))
    await neighbours.until(lambda: neighbours.ended(run_id))
    neighbours.charges[run_id] = older

    assert (await shown(neighbours, run_id)).counts.calls == 0


async def test_a_run_that_waits_for_a_person_says_what_it_was_charged_by_then(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id, rows=rows(3))
    await neighbours.until(lambda: neighbours.sent(run_id))
    charge(neighbours, run_id, 2)

    paused = await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)

    assert paused.run is not None
    assert paused.run.counts.cost == Decimal("0.02")
    await neighbours.until(lambda: told(neighbours, run_id, "waiting").waiting_for == "pause")
    assert told(neighbours, run_id, "waiting").cost == Decimal("0.02")


async def test_progress_says_what_the_whole_run_was_charged(neighbours: Neighbours) -> None:
    run_id = new_run_id()

    def half(tasks: RowTasks) -> list[SettledRow]:
        charge(neighbours, run_id, 1)
        return [settled(row, "completed") for row in tasks.rows[:-1]]

    neighbours.work = half
    await neighbours.start(run_id, rows=rows(4))
    progress = partial(_progress, neighbours, run_id)
    await neighbours.until(lambda: any(event.counts.completed == 3 for event in progress()))
    assert {(event.run_calls, event.run_cost) for event in progress() if event.counts.completed == 3} == {(1, Decimal("0.01"))}


def _progress(neighbours: Neighbours, run_id: str) -> list[DatasetEvent]:
    return [event for event in neighbours.events if isinstance(event, DatasetEvent) and (event.run_id, event.state) == (run_id, "progress")]
