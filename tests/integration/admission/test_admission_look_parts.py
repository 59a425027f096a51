"""One look acts on everything that it finds, whatever was told before: each kind of thing that was left behind is here once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows
from tests.integration.admission.admission_tables import Tables, ago
from tests.integration.admission.test_admission_waiting import parked

from rowmill.runtime.db import Connection, Database
from rowmill_admission.app import App
from rowmill_admission.owed import Owed
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import owed
from rowmill_contracts.events import RunEvent
from rowmill_contracts.topology import ADMISSION_PARKED, EVENTS

pytestmark = pytest.mark.servers

AGES = 100 * 86_400.0
"""Long ago, and longer than anything is kept."""


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    """It looks when it is told to, but for its first look."""
    return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, repair_interval=AGES)


@pytest.fixture
async def tables(database_url: str, admission: App) -> AsyncIterator[Tables]:
    del admission  # it has made them
    database = await Database.connect(database_url, schema="admission", wait=10)
    yield Tables(database)
    await database.close()


async def test_one_look_acts_on_everything_that_was_left_behind(admission: App, neighbours: Neighbours, tables: Tables) -> None:
    assert admission._parts is not None
    long_ago = ago(2 * AGES)

    async def owe(connection: Connection) -> None:
        event = RunEvent(event_id="owed", run_id="owes", play="p", state="running")
        await owed.add(connection, Owed("owes", event, "run.running.p", EVENTS))

    await tables.database.transact(owe)
    await tables.database.execute(f"UPDATE owed SET owed_at = {long_ago}")  # noqa: S608 - our own
    out = {"admitted": "2", "sent": "2", "admission_done": "true", "next_page": "1"}
    for run_id in ("over", "silent"):
        await tables.run(run_id, state="'waiting'", waiting_for="'timer'")
    over = await tables.dataset("over", **out, completed="2")
    silent = await tables.dataset("silent", **out, counted_at=long_ago)
    await tables.run("stopped", stop_reason="'enough'")
    await tables.run("late", deadline=ago(1), lease_until=ago(-AGES), options="""'{"budget":{"wall_time":1}}'""")
    await tables.run("unheld", state="'queued'", advanced_at=long_ago, changed_at=long_ago)
    await tables.insert("inputs", {"input_id": "'abandoned'", "changed_at": long_ago})
    await tables.run("done", state="'completed'", finished_at=long_ago)
    await tables.page(await tables.dataset("done", state="'closed'", closed_at=long_ago), 0)
    await tables.insert("events", {"event_id": "'e'", "name": "'n'", "key": "'k'", "payload": "'{}'", "arrived_at": long_ago})
    await tables.insert("retries", {"run_id": "'done'", "identity": "'first'", "asked_at": long_ago})

    await admission._parts.repair.look()

    await neighbours.until(lambda: any(event.event_id == "owed" for event in neighbours.events))
    await neighbours.until(lambda: any(advance.run_id == "unheld" for advance in neighbours.advanced))
    states = {row["run_id"]: (row["state"], row["halt_reason"]) for row in await tables.database.fetch("SELECT run_id, state, halt_reason FROM runs")}
    assert states["stopped"] == ("cancelled", None)
    assert states["late"] == ("waiting", "budget: wall time, 1 s are over")
    datasets = {row["dataset_seq"]: row for row in await tables.database.fetch(f"SELECT *, counted_at > {ago(60)} AS heard FROM datasets")}  # noqa: S608
    assert (datasets[over]["state"], datasets[silent]["heard"]) == ("closed", True)
    assert (await tables.one("SELECT state FROM inputs WHERE input_id = 'abandoned'"))["state"] == "failed"
    for table in ("pages", "events", "retries"):
        assert (await tables.one(f"SELECT count(*) AS left FROM {table}"))["left"] == 0, table  # noqa: S608


async def test_rows_that_were_not_published_are_as_soon_as_their_dataset_is_not_busy_for_a_moment(
    admission: App, neighbours: Neighbours, tables: Tables
) -> None:
    """Whose other rows come back all the time, as after an outage, is busy whenever anybody looks now and then."""
    assert admission._parts is not None
    releasing = admission._parts.releasing
    neighbours.work = lambda tasks: []
    await neighbours.start(run_id := new_run_id(), rows=rows(2))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2)
    [tasks] = [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]
    await neighbours.bus.publish(parked(tasks, 3_600_000), ADMISSION_PARKED)
    async with asyncio.timeout(20):
        while not (found := await tables.database.fetch("SELECT dataset_seq FROM waits JOIN datasets USING (dataset_seq) WHERE run_id = $1", run_id)):
            await asyncio.sleep(0.02)
    seq = found[0]["dataset_seq"]
    busy = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
    releasing._publishing[seq] = busy
    await tables.database.execute(f"UPDATE waits SET state = 'releasing', released_at = {ago(AGES)} WHERE dataset_seq = $1", seq)  # noqa: S608 - our own

    await admission._parts.repair.look()
    assert len(neighbours.sent(run_id)) == 2
    busy.cancel()
    del releasing._publishing[seq]
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 4)
