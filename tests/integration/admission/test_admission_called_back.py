"""Rows that are called back go before rows that were not admitted yet: before all of their own run, and before any where there is no room."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows, settled
from tests.integration.admission.test_admission_waiting import parked

from rowmill.runtime.db import Database
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.rows import RowTasks
from rowmill_contracts.runs import ProviderServes
from rowmill_contracts.topology import ADMISSION_PARKED

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]

HOUR_MS = 3_600_000


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    """Pages of 2 rows; 6 rows of a run in flight, 8 of all. A row that was called back may be sent back once more however late it is."""
    return AdmissionSettings(
        broker_url=broker_url, database_url=database_url, time_scale=0.05, page_rows=2, run_room=6, room_rows=8, back_for=100_000.0
    )


def of(neighbours: Neighbours, run_id: str) -> list[RowTasks]:
    return [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]


async def park(neighbours: Neighbours, *pages: RowTasks) -> None:
    """Return when it is stored."""
    for tasks in pages:
        await neighbours.bus.publish(parked(tasks, HOUR_MS, provider="away"), ADMISSION_PARKED)
    await marked(neighbours)


async def complete(neighbours: Neighbours, tasks: RowTasks) -> None:
    await neighbours.settle(tasks, [settled(row, "completed") for row in tasks.rows])


async def serves(neighbours: Neighbours, org: str, *, at_once: int) -> None:
    """The provider serves, so slowly that beyond ``at_once`` nothing comes back."""
    await neighbours.bus.publish(ProviderServes(org=org, provider="away", per_second=0.001, at_once=at_once), ADMISSION_PARKED)


async def marked(neighbours: Neighbours) -> None:
    """Return when a run that was started now is over: whatever was to be done at once has been."""
    await neighbours.start(marker := new_run_id(), rows=rows(1))
    await neighbours.until(lambda: any(tasks.run_id == marker for tasks in neighbours.tasks))
    [tasks] = of(neighbours, marker)
    await complete(neighbours, tasks)
    await neighbours.until(lambda: neighbours.ended(marker))


async def called_back(database_url: str, count: int) -> None:
    """Return when so many rows are to come back as soon as there is room."""
    database = await Database.connect(database_url, schema="admission", size=1)
    async with asyncio.timeout(60):
        while len(await database.fetch("SELECT FROM waits WHERE called_back AND state = 'waiting' AND due_at <= clock_timestamp()")) < count:
            await asyncio.sleep(0.05)
    await database.close()


async def test_no_new_row_of_a_run_is_sent_before_those_that_are_called_back(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(10))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 6)
    first, second, third = sorted(of(neighbours, run_id), key=lambda tasks: tasks.rows[0].index)
    await park(neighbours, second, third)
    await serves(neighbours, first.org, at_once=0)
    await marked(neighbours)
    await complete(neighbours, first)
    await marked(neighbours)
    assert len(neighbours.sent(run_id)) == 6, "there is a place in the window, and rows that have waited are to have it"

    await serves(neighbours, first.org, at_once=4)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 10)
    assert sorted(row.index for row in neighbours.sent(run_id)[6:]) == [2, 3, 4, 5]
    await marked(neighbours)
    assert len(neighbours.sent(run_id)) == 10, "each of them may be sent back once more"

    back, other = of(neighbours, run_id)[3:5]
    await park(neighbours, msgspec.structs.replace(back, rows=back.rows[:1]))  # it had no turn yet, and goes before new ones still
    await complete(neighbours, msgspec.structs.replace(back, rows=back.rows[1:]))
    await complete(neighbours, other)
    await marked(neighbours)
    assert len(neighbours.sent(run_id)) == 10

    await serves(neighbours, first.org, at_once=1)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 11)
    await marked(neighbours)
    [again] = of(neighbours, run_id)[5:]
    assert [row.index for row in again.rows] == [back.rows[0].index]
    await complete(neighbours, again)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 15)
    assert sorted(row.index for row in neighbours.sent(run_id)[11:]) == [6, 7, 8, 9], "as soon as all have ended"
    for tasks in of(neighbours, run_id):
        await complete(neighbours, tasks)
    await neighbours.until(lambda: neighbours.ended(run_id))


async def with_three_pages_out(neighbours: Neighbours) -> tuple[str, RowTasks, RowTasks]:
    """A run of eight rows of which six are out, in three pages; and the first two of these."""
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(run_id, rows=rows(8))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 6)
    first, second, _ = sorted(of(neighbours, run_id), key=lambda tasks: tasks.rows[0].index)
    return run_id, first, second


async def test_rows_whose_provider_is_away_again_hold_up_no_new_ones(neighbours: Neighbours) -> None:
    run_id, first, second = await with_three_pages_out(neighbours)
    await park(neighbours, second)
    await serves(neighbours, first.org, at_once=2)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 8)
    again = parked(of(neighbours, run_id)[-1], HOUR_MS, provider="away")
    rows_again = [msgspec.structs.replace(row, away=True) for row in again.rows]
    await neighbours.bus.publish(msgspec.structs.replace(again, rows=rows_again), ADMISSION_PARKED)
    await marked(neighbours)
    await complete(neighbours, first)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 10)
    assert [row.index for row in neighbours.sent(run_id)[8:]] == [6, 7]
    for tasks in of(neighbours, run_id):
        await complete(neighbours, tasks)
    await neighbours.until(lambda: neighbours.ended(run_id))


async def test_a_page_that_cannot_be_published_holds_up_new_rows_for_a_while_only(neighbours: Neighbours) -> None:
    run_id, first, second = await with_three_pages_out(neighbours)
    await park(neighbours, second)
    neighbours.nonsense_pages.add((run_id, second.rows[0].page))
    await serves(neighbours, first.org, at_once=2)
    await marked(neighbours)
    assert len(neighbours.sent(run_id)) == 6
    await complete(neighbours, first)
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 8)
    assert [row.index for row in neighbours.sent(run_id)[6:]] == [6, 7]
    neighbours.nonsense_pages.clear()
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 10)
    assert sorted(row.index for row in neighbours.sent(run_id)[8:]) == [2, 3]
    for tasks in of(neighbours, run_id):
        await complete(neighbours, tasks)
    await neighbours.until(lambda: neighbours.ended(run_id))


async def test_rows_that_are_due_go_before_new_ones_of_other_runs_where_there_is_no_room(neighbours: Neighbours, database_url: str) -> None:
    waits, big, bigger = new_run_id(), new_run_id(), new_run_id()
    neighbours.work = lambda _tasks: []
    await neighbours.start(waits, rows=rows(2))
    await neighbours.until(lambda: len(neighbours.sent(waits)) == 2)
    [tasks] = of(neighbours, waits)
    await park(neighbours, tasks)
    for run_id in (big, bigger):
        await neighbours.start(run_id, rows=rows(30))
    await neighbours.until(lambda: len(neighbours.sent(big)) + len(neighbours.sent(bigger)) == 8)
    await serves(neighbours, tasks.org, at_once=2)
    await called_back(database_url, 2)
    done: list[RowTasks] = []
    while len(neighbours.sent(waits)) < 4:
        told = len(neighbours.tasks)
        one = next(each for each in of(neighbours, big) + of(neighbours, bigger) if each not in done)
        done.append(one)
        await complete(neighbours, one)
        await neighbours.until(lambda: len(neighbours.tasks) > told)  # noqa: B023 - over before the next turn
    assert len(done) <= 2, "one place was given away before the rows were due"
