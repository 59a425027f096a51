"""Admission killed in the middle, started anew, or running twice: every row is worked, and no run stays behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, completes, new_run_id, rows, settled

from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import RUNS_STOP

pytestmark = pytest.mark.servers

Start = Callable[[], Awaitable[asyncio.subprocess.Process]]

HOST = "import asyncio; from rowmill.runtime.hosting import host; from rowmill_admission.app import App; asyncio.run(host([App()]))"


@pytest.fixture
async def start_process(settings: AdmissionSettings) -> AsyncIterator[Start]:
    """Start admission in a process of its own, which can be killed."""
    environment = os.environ | {
        "ROWMILL_BROKER_URL": settings.broker_url,
        "ROWMILL_DATABASE_URL": settings.database_url,
        "ROWMILL_TIME_SCALE": str(settings.time_scale),
        "ROWMILL_LOG_LEVEL": "WARNING",
    }
    async with AsyncExitStack() as stack:

        async def start() -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, env=environment)
            stack.push_async_callback(_end, process)
            return process

        yield start


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def every_row_once(neighbours: Neighbours, run_id: str, count: int) -> bool:
    marks = neighbours.books.marks(run_id)
    return sorted(marks) == list(range(count)) and set(marks.values()) == {"completed"}


@pytest.mark.parametrize("kill_after", [1, 7, 20])
async def test_nothing_is_lost_when_admission_is_killed_while_it_feeds(neighbours: Neighbours, start_process: Start, kill_after: int) -> None:
    run_id = new_run_id()
    pages = [rows(100, first) for first in range(0, 4_000, 100)]
    process = await start_process()
    await neighbours.stage(run_id, pages)
    await neighbours.start(run_id, input_ref=run_id)
    await neighbours.until(lambda: len(neighbours.tasks) >= kill_after)
    process.kill()
    await process.wait()
    await start_process()
    await neighbours.until(lambda: neighbours.ended(run_id), 60)
    assert neighbours.states(run_id)[-1] == "completed"
    assert every_row_once(neighbours, run_id, 4_000)
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.counts.admitted, run.counts.completed) == (4_000, 4_000)


async def test_nothing_is_lost_when_admission_is_killed_while_an_input_arrives(neighbours: Neighbours, start_process: Start) -> None:
    run_id = new_run_id()
    pages = [rows(50, first) for first in range(0, 2_000, 50)]
    process = await start_process()
    await neighbours.start(run_id, input_ref=run_id)
    staging = asyncio.create_task(neighbours.stage(run_id, pages))
    await neighbours.until(lambda: "waiting" in neighbours.states(run_id))
    process.kill()
    await process.wait()
    await start_process()
    await staging
    await neighbours.until(lambda: neighbours.ended(run_id), 60)
    assert every_row_once(neighbours, run_id, 2_000)


async def test_a_run_stopped_while_admission_is_away_ends_with_every_recorded_row_settled(neighbours: Neighbours, start_process: Start) -> None:
    run_id = new_run_id()
    stopped = False

    def cancels(tasks: RowTasks) -> list[SettledRow]:
        return [settled(row, "cancelled" if stopped else "completed") for row in tasks.rows]

    neighbours.work = cancels
    process = await start_process()
    await neighbours.stage(run_id, [rows(100, first) for first in range(0, 20_000, 100)])
    await neighbours.start(run_id, input_ref=run_id)
    await neighbours.until(lambda: len(neighbours.tasks) >= 9)
    process.kill()
    await process.wait()
    stopped = True
    await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
    await start_process()
    await neighbours.until(lambda: neighbours.ended(run_id), 60)
    run = await neighbours.get(run_id)
    assert run is not None
    marks = neighbours.books.marks(run_id)
    assert run.state == "cancelled"
    assert set(marks.values()) <= {"completed", "cancelled"}
    assert run.counts.admitted == len(marks) < 20_000


async def test_two_instances_share_the_work(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    apps = [App(settings), App(settings)]
    await asyncio.gather(*(app.start() for app in apps))
    try:
        names = [new_run_id() for _ in range(6)]
        await asyncio.gather(*(neighbours.stage(name, [rows(200, first) for first in range(0, 3_000, 200)]) for name in names))
        await asyncio.gather(*(neighbours.start(name, input_ref=name, org=f"org-{place % 2}") for place, name in enumerate(names)))
        await neighbours.until(lambda: all(neighbours.ended(name) for name in names), 60)
        assert all(every_row_once(neighbours, name, 3_000) for name in names)
        assert {neighbours.states(name)[-1] for name in names} == {"completed"}
    finally:
        await asyncio.gather(*(app.stop() for app in apps))


async def test_a_stopped_instance_hands_its_feeders_over(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    run_id = new_run_id()
    held: list[RowTasks] = []
    neighbours.work = lambda tasks: held.append(tasks) or []  # type: ignore[func-returns-value]
    first, second = App(settings), App(settings)
    await first.start()
    await neighbours.start(run_id, rows=rows(4_000))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) >= 2_000)
    await first.stop()
    await second.start()
    try:
        neighbours.work = completes
        for tasks in held:
            await neighbours.settle(tasks, [settled(row, "completed") for row in tasks.rows])
        await neighbours.until(lambda: neighbours.ended(run_id), 60)
        assert every_row_once(neighbours, run_id, 4_000)
    finally:
        await second.stop()
