"""Progress of many datasets: told together, with one question for what their runs were charged, and at most so often over all instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import cast

import pytest
from tests.integration.admission.admission_tables import Tables, ago

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Connection, Database
from rowmill_admission import progress
from rowmill_admission.charges import Charges
from rowmill_admission.datasets import Dataset
from rowmill_admission.progress import ProgressTeller
from rowmill_admission.store import datasets as dataset_store
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.envelope import Message
from rowmill_contracts.events import DatasetEvent

pytestmark = pytest.mark.servers

INTERVAL = 0.1


class Gated(SystemClock):
    """Nobody sleeps to an end before the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep(self, seconds: float) -> None:
        await self.gate.wait()
        await super().sleep(seconds)


class Books:
    """Charges, and each question for them."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def at_once(self, run_ids: Sequence[str]) -> Mapping[str, RunCharges] | None:
        self.asked.append(list(run_ids))
        return {run_id: RunCharges(run_id=run_id, version=1, calls=len(run_id)) for run_id in run_ids}


class Heard:
    """What was told. ``away``: so many messages cannot be."""

    def __init__(self) -> None:
        self.events: list[DatasetEvent] = []
        self.away = 0

    async def publish(self, message: Message, _key: str, *, exchange: str) -> None:
        assert exchange == "rowmill.events"
        if self.away:
            self.away -= 1
            raise UnavailableError("the broker is away")
        assert isinstance(message, DatasetEvent)
        self.events.append(message)

    def told(self) -> list[tuple[str, str, int, int | None]]:
        """Run, dataset, rows that have completed, calls of the run: of each event since this was last asked."""
        found = sorted((event.run_id, event.dataset, event.counts.completed, event.run_calls) for event in self.events)
        self.events.clear()
        return found


class Stage:
    """A teller, and datasets ``a`` and ``b`` of some runs."""

    def __init__(self, database: Database) -> None:
        self.tables = Tables(database)
        self.clock, self.books, self.heard = Gated(), Books(), Heard()
        bus, charges = cast("Bus", self.heard), cast("Charges", self.books)
        self.teller = ProgressTeller(database, bus, self.clock, charges, interval=INTERVAL)

    async def counted(self, run_id: str, dataset: str, completed: int) -> None:
        """So many of its rows have completed, which the teller is told."""
        await self.tables.database.execute("UPDATE datasets SET completed = $3 WHERE run_id = $1 AND dataset = $2", run_id, dataset, completed)

        async def read(connection: Connection) -> Dataset | None:
            return await dataset_store.by_name(connection, run_id, dataset)

        found = await self.tables.database.transact(read)
        assert found is not None
        self.teller.changed(found)

    async def all_told(self) -> None:
        """Let the teller tell of all that it knows."""
        self.clock.gate.set()
        await until(lambda: self.teller._telling is None or self.teller._telling.done())

    async def told_elsewhere(self) -> None:
        await self.tables.database.execute("UPDATE datasets SET progress_at = clock_timestamp()")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    database = await Database.connect(database_url, schema="admission", wait=10)
    await database.migrate("rowmill_admission")
    made = Stage(database)
    for run_id in ("one", "three", "quiet"):
        await made.tables.run(run_id)
        for name in ("a", "b"):
            await made.tables.dataset(run_id, name, admitted="9")
    yield made
    await made.teller.stop()
    await database.execute("TRUNCATE runs, datasets CASCADE")
    await database.close()


async def test_what_changed_by_then_is_told_together_with_one_question_for_its_runs_alone(stage: Stage) -> None:
    stage.clock.gate.clear()
    for completed in (1, 2, 3):
        await stage.counted("one", "a", completed)
        await stage.counted("one", "b", completed)
        await stage.counted("three", "a", completed)
    await stage.all_told()
    assert stage.heard.told() == [("one", "a", 3, 3), ("one", "b", 3, 3), ("three", "a", 3, 5)], "each once, with its newest counts"
    assert stage.books.asked == [["one", "three"]]

    await stage.counted("three", "a", 4)
    await stage.all_told()
    assert (stage.heard.told(), stage.books.asked[1:]) == ([("three", "a", 4, 5)], [["three"]])


async def test_of_very_many_runs_so_many_are_asked_for_at_once_as_a_question_may_name(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MOST_RUNS", 2)
    stage.clock.gate.clear()
    for run_id in ("one", "three", "quiet"):
        await stage.counted(run_id, "a", 1)
    await stage.all_told()
    assert [calls for *_, calls in stage.heard.told()] == [3, 5, 5]
    assert stage.books.asked == [["one", "quiet"], ["three"]]


async def test_what_another_instance_told_a_moment_ago_is_told_after_a_while(stage: Stage) -> None:
    await stage.told_elsewhere()
    await stage.counted("one", "a", 1)
    await stage.all_told()
    assert stage.heard.told() == [("one", "a", 1, 3)]


async def test_what_others_go_on_telling_is_left_to_them(stage: Stage) -> None:
    await stage.tables.database.execute("UPDATE datasets SET progress_at = clock_timestamp() + interval '1 hour'")
    await stage.counted("one", "a", 1)
    await stage.all_told()
    assert (stage.heard.told(), stage.books.asked) == ([], [])


async def test_what_could_not_be_told_is_tried_once_more_with_what_has_changed_since(stage: Stage) -> None:
    stage.heard.away = 1
    stage.clock.gate.clear()
    await stage.counted("one", "a", 1)
    stage.clock.gate.set()
    await until(lambda: stage.heard.away == 0)
    await stage.counted("three", "b", 2)
    await stage.all_told()
    assert stage.heard.told() == [("one", "a", 1, 3), ("three", "b", 2, 5)]


async def test_a_dataset_that_was_closed_since_is_told_of_no_more(stage: Stage) -> None:
    stage.clock.gate.clear()
    await stage.counted("one", "a", 1)
    await stage.counted("one", "b", 1)
    await stage.tables.database.execute(f"UPDATE datasets SET state = 'closed', closed_at = {ago(0)} WHERE run_id = 'one' AND dataset = 'a'")  # noqa: S608
    await stage.all_told()
    assert stage.heard.told() == [("one", "b", 1, 3)]
