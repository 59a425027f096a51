"""Runs that are over and whose failed rows are worked again."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Literal

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows, settled
from tests.integration.admission.played_retries import FAILED, ended, failing, prepared_in_vain, retry, sent

from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.counts import Counts
from rowmill_contracts.events import DatasetEvent
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.run_questions import AskOldestRun, OldestRun, RunShown
from rowmill_contracts.runs import ColumnInfo, DatasetOpened, OpenDataset, ReleaseRun, RunStop, RunTaken, TermAnswer
from rowmill_contracts.topology import ADMISSION_ASKS, RUNS_RETRY, RUNS_STOP

pytestmark = pytest.mark.servers


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, page_rows=200)


@pytest.mark.usefixtures("admission")
async def test_failed_rows_alone_come_back_at_their_next_attempt_once_the_body_has_come_to_their_dataset(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED, {7})
    await neighbours.start(run_id, rows=rows(500))
    summary = await ended(neighbours, run_id)
    assert (summary.state, summary.counts.completed, summary.counts.failed) == ("completed", 497, 3)
    before = len(neighbours.tasks)
    neighbours.dataset = {"code_digest": "mended"}
    shown = await retry(neighbours.bus, run_id)
    assert shown.run is not None
    assert (shown.refused, shown.run.error, shown.run.finished_at) == ("", None, None)
    assert (neighbours.halts[-1].action, neighbours.halts[-1].retry) == ("resume", True)
    summary = await ended(neighbours, run_id, times=2)
    assert (summary.state, summary.counts.completed, summary.counts.failed, summary.counts.terminal) == ("completed", 499, 1, 500)
    assert sent(neighbours, run_id) == dict.fromkeys([(index, 2) for index in FAILED], 1)
    assert {tasks.code_digest for tasks in neighbours.tasks[before:]} == {"mended"}
    assert {taken.run.code_digest for taken in neighbours.taken[-2:] if taken.run is not None} <= {None, "mended"}
    await retry(neighbours.bus, run_id, "second")
    summary = await ended(neighbours, run_id, times=3)
    assert (summary.counts.completed, summary.counts.failed) == (500, 0)
    assert sent(neighbours, run_id) == dict.fromkeys([*((index, 2) for index in FAILED), (7, 3)], 1)


@pytest.mark.usefixtures("admission")
async def test_one_request_is_one_retry_however_often_it_comes(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED, FAILED)
    await neighbours.start(run_id, rows=rows(500))
    await ended(neighbours, run_id)
    for _ in range(2):
        await neighbours.bus.publish(RunRetry(run_id=run_id), RUNS_RETRY, message_id="by-its-message")
    await ended(neighbours, run_id, times=2)
    heard = await retry(neighbours.bus, run_id, "by-its-message")
    assert (heard.run is not None and heard.run.state, heard.refused) == ("completed", ""), "it comes when the run is over again"
    assert (await retry(neighbours.bus, run_id, "another")).refused == ""
    summary = await ended(neighbours, run_id, times=3)
    assert (summary.state, summary.counts.failed) == ("completed", 0)
    assert sent(neighbours, run_id) == dict.fromkeys([(index, attempt) for index in FAILED for attempt in (2, 3)], 1)


@pytest.mark.usefixtures("admission")
async def test_what_cannot_be_retried_says_why(neighbours: Neighbours) -> None:
    assert (await retry(neighbours.bus, "nobody")) == RunShown()
    well, stopped = new_run_id(), new_run_id()
    await neighbours.start(well, rows=rows(5))
    await ended(neighbours, well)
    shown = await retry(neighbours.bus, well)
    assert (shown.run is not None, "no row of run" in shown.refused) == (True, True)
    neighbours.work = lambda _: []
    await neighbours.start(stopped, rows=rows(5))
    await neighbours.until(lambda: neighbours.sent(stopped))
    assert (await retry(neighbours.bus, stopped)).refused == "", "of a run that goes on nothing changes"
    await neighbours.bus.publish(RunStop(run_id=stopped), RUNS_STOP)
    [tasks] = [tasks for tasks in neighbours.tasks if tasks.run_id == stopped]
    await neighbours.settle(tasks, [settled(row, "cancelled") for row in tasks.rows])
    assert (await ended(neighbours, stopped)).state == "cancelled"
    assert "stays stopped" in (await retry(neighbours.bus, stopped, "again")).refused


@pytest.mark.usefixtures("admission")
async def test_a_run_that_failed_is_admitted_to_its_end(neighbours: Neighbours) -> None:
    """With ``on_error="fail"`` the first failed row ends admission: a retry works it again, and goes on from there."""
    run_id = new_run_id()
    neighbours.dataset = {"on_error": "fail", "concurrency": 200}
    neighbours.work = failing({3})
    await neighbours.start(run_id, rows=rows(900))
    summary = await ended(neighbours, run_id)
    assert (summary.state, summary.counts.failed) == ("failed", 1)
    assert summary.counts.admitted < 900
    await retry(neighbours.bus, run_id)
    summary = await ended(neighbours, run_id, times=2)
    assert (summary.state, summary.counts.completed, summary.counts.admitted, summary.error) == ("completed", 900, 900, None)
    assert sent(neighbours, run_id) == {(3, 2): 1}


@pytest.mark.parametrize(("retention", "refused"), [(3600.0, False), (0.0, True)])
async def test_a_run_can_be_retried_for_as_long_as_it_is_known_where_its_failed_rows_lie(
    neighbours: Neighbours, settings: AdmissionSettings, retention: float, *, refused: bool
) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED)
    app = App(settings.model_copy(update={"silent_after": 0.0, "retry_retention": retention}))
    await app.start()
    try:
        await neighbours.start(run_id, rows=rows(500))
        await ended(neighbours, run_id)
        assert app._parts is not None
        await app._parts.repair.look()
        shown = await retry(neighbours.bus, run_id)
        assert ("ended too long ago" in shown.refused) is refused
        summary = await ended(neighbours, run_id, times=1 if refused else 2)
        assert (summary.state, summary.counts.failed) == ("completed", len(FAILED) if refused else 0)
    finally:
        await app.stop()


async def test_a_retry_whose_admission_dies_goes_on_with_the_next_one(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED)
    first = App(settings.model_copy(update={"halt_timeout": 0.5, "drain_timeout": 0.0}))
    await first.start()
    await neighbours.start(run_id, rows=rows(500))
    await ended(neighbours, run_id)
    neighbours.receipts_away = True
    await neighbours.bus.publish(RunRetry(run_id=run_id), RUNS_RETRY)
    await neighbours.until(lambda: any(halt.retry for halt in neighbours.halts))
    summary = await neighbours.get(run_id)
    assert (summary is not None and summary.state, sent(neighbours, run_id)) == ("completed", Counter()), "over, until it is prepared"
    await first.stop()
    neighbours.receipts_away = False
    second = App(settings)
    await second.start()
    try:
        summary = await ended(neighbours, run_id, times=2)
        assert (summary.state, summary.counts.completed) == ("completed", 500)
        assert sent(neighbours, run_id) == dict.fromkeys([(index, 2) for index in FAILED], 1)
    finally:
        await second.stop()


async def stop_is_stored(app: App, run_id: str) -> None:
    assert app._parts is not None
    async with asyncio.timeout(20):
        while not await app._parts.database.fetch("SELECT FROM stops WHERE run_id = $1", run_id):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("on_error", ["isolate", "fail"])
async def test_a_run_that_is_stopped_while_its_retry_is_prepared_stays_stopped(
    neighbours: Neighbours, settings: AdmissionSettings, on_error: str
) -> None:
    """Also one with rows that were never admitted: nothing waits for its body, which will not run any more."""
    run_id = new_run_id()
    neighbours.dataset = {"on_error": on_error, "concurrency": 200}
    neighbours.work = failing({3, 7})
    app = App(settings.model_copy(update={"ask_again": 0.5}))
    await app.start()
    try:
        await neighbours.start(run_id, rows=rows(500))
        before = (await ended(neighbours, run_id)).counts
        bodies, pages = len(neighbours.advanced), len(neighbours.tasks)
        await prepared_in_vain(neighbours, run_id)
        await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
        await stop_is_stored(app, run_id)
        neighbours.receipts_away = False
        summary = await ended(neighbours, run_id, times=2)
        assert (summary.state, summary.counts.failed, summary.counts.cancelled) == ("cancelled", 0, 2)
        assert (summary.counts.completed, summary.counts.terminal) == (before.completed, before.terminal)
        assert (len(neighbours.advanced), len(neighbours.tasks)) == (bodies, pages), "nothing of it is worked again"
        assert "stays stopped" in (await retry(neighbours.bus, run_id, "again")).refused
    finally:
        neighbours.receipts_away = False
        await app.stop()


async def test_a_stop_that_comes_when_the_run_is_over_holds_for_its_retries(neighbours: Neighbours, admission: App) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED)
    await neighbours.start(run_id, rows=rows(500))
    await ended(neighbours, run_id)
    await neighbours.bus.publish(RunStop(run_id=run_id), RUNS_STOP)
    await stop_is_stored(admission, run_id)
    assert "stays stopped" in (await retry(neighbours.bus, run_id)).refused
    summary = await neighbours.get(run_id)
    assert (summary is not None and summary.state, sent(neighbours, run_id)) == ("completed", Counter())


async def test_a_run_that_can_be_retried_keeps_its_receipts(neighbours: Neighbours, admission: App) -> None:
    """Pruning asks for the oldest run that could need them."""
    assert admission._parts is not None
    database = admission._parts.database

    async def is_oldest(year: int) -> bool:
        told = await neighbours.bus.ask(AskOldestRun(), ADMISSION_ASKS, OldestRun)
        return told.started_at == datetime(year, 1, 1, tzinfo=UTC).timestamp()

    well, run_id = new_run_id(), new_run_id()
    await neighbours.start(well, rows=rows(5))
    await ended(neighbours, well)
    neighbours.work = failing(FAILED)
    await neighbours.start(run_id, rows=rows(500))
    await ended(neighbours, run_id)
    await database.execute("UPDATE runs SET created_at = '2001-01-01 00:00Z' WHERE run_id = $1", well)
    await database.execute("UPDATE runs SET created_at = '2002-01-01 00:00Z' WHERE run_id = $1", run_id)
    assert await is_oldest(2002), "a run without a failed row needs nothing"
    await database.execute("UPDATE datasets SET closed_at = now() - interval '1 year' WHERE run_id = $1", run_id)
    assert not await is_oldest(2002)
    assert "ended too long ago" in (await retry(neighbours.bus, run_id)).refused
    await database.execute("UPDATE runs SET retrying = true WHERE run_id = $1", run_id)
    assert await is_oldest(2002)
    await database.execute("UPDATE runs SET created_at = now(), retrying = false WHERE run_id = ANY($1)", [well, run_id])


async def test_requests_for_retries_are_kept_for_as_long_as_their_runs_can_be_retried(neighbours: Neighbours, admission: App) -> None:
    assert admission._parts is not None
    repair, database = admission._parts.repair, admission._parts.database

    async def kept(run_id: str) -> int:
        await repair.look()
        return len(await database.fetch("SELECT FROM retries WHERE run_id = $1", run_id))

    run_id = new_run_id()
    neighbours.work = failing(FAILED, FAILED)
    await neighbours.start(run_id, rows=rows(500))
    await ended(neighbours, run_id)
    await retry(neighbours.bus, run_id)
    await ended(neighbours, run_id, times=2)
    await database.execute("UPDATE retries SET asked_at = now() - interval '1 year' WHERE run_id = $1", run_id)
    assert await kept(run_id) == 1, "its failed rows can be retried"
    await retry(neighbours.bus, run_id)
    assert sent(neighbours, run_id) == dict.fromkeys([(index, 2) for index in FAILED], 1), "a late copy makes no other retry"
    await database.execute("UPDATE runs SET state = 'waiting' WHERE run_id = $1", run_id)
    await database.execute("UPDATE datasets SET closed_at = now() - interval '1 year' WHERE run_id = $1", run_id)
    assert await kept(run_id) == 1, "it goes on"
    await database.execute("UPDATE runs SET state = 'completed' WHERE run_id = $1", run_id)
    assert await kept(run_id) == 0


def closed(neighbours: Neighbours, run_id: str, dataset: str) -> int:
    """How often it was."""
    told = [event for event in neighbours.events if isinstance(event, DatasetEvent) and event.run_id == run_id]
    return sum((event.dataset, event.state) == (dataset, "closed") for event in told)


def bodies(neighbours: Neighbours, *names: str) -> None:
    """From now on the run's body opens these datasets over its rows, one after the other."""

    async def body(taken: RunTaken, lease: str) -> None:
        assert taken.run is not None
        run_id = taken.run.run_id
        staged = taken.run.inputs[0].input_id
        ending: Literal["completed", "waiting"] = "completed"
        columns = [ColumnInfo(name="x", version="1")]
        for name in names:
            request = OpenDataset(
                run_id=run_id, term=taken.term, dataset=name, input_id=staged, columns=columns, code_digest="c", **neighbours.dataset
            )
            if (await neighbours.bus.ask(request, ADMISSION_ASKS, DatasetOpened)).outcome == "open":
                ending = "waiting"
                break
        release = ReleaseRun(run_id=run_id, term=taken.term, lease_id=lease, outcome=ending, waiting_for=f"dataset:{name}")
        await neighbours.bus.ask(release, ADMISSION_ASKS, TermAnswer)

    neighbours.body = body  # type: ignore[method-assign]


@pytest.mark.parametrize("on_error", ["isolate", "fail"])
@pytest.mark.usefixtures("admission")
async def test_failed_rows_of_a_dataset_that_the_body_does_not_come_to_again_stay_failed_and_can_be_retried(
    neighbours: Neighbours, on_error: str
) -> None:
    """Also rows that were not admitted since the dataset had failed."""
    run_id = new_run_id()
    neighbours.dataset = {"on_error": on_error, "concurrency": 200}
    fails = {"first": {3}, "second": {7}}
    neighbours.work = lambda tasks: failing(fails[tasks.dataset])(tasks)
    bodies(neighbours, "first", "second")

    async def second(times: int) -> Counts:
        """The second dataset's counts once it is closed and the run has ended so many times."""
        await ended(neighbours, run_id, times)
        await neighbours.until(lambda: closed(neighbours, run_id, "second") >= times)
        summary = await neighbours.get(run_id)
        assert summary is not None
        return summary.datasets[1].counts

    await neighbours.start(run_id, rows=rows(900))
    before = await second(1)
    bodies(neighbours, "first")
    await retry(neighbours.bus, run_id)
    assert await second(2) == before
    assert neighbours.states(run_id)[-1] == "completed"
    bodies(neighbours, "first", "second")
    assert (await retry(neighbours.bus, run_id, "again")).refused == ""
    counts = await second(3)
    assert (counts.admitted, counts.completed) == (900, 900)
    assert [row.attempt for tasks in neighbours.tasks for row in tasks.rows if (tasks.dataset, row.index) == ("second", 7)] == [1, 3]
