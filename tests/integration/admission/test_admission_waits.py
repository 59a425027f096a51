"""The table of waits: which rows come back, when, and which messages about them come too late; each condition decides about a row of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.admission.admission_tables import Tables, ago

from rowmill.runtime.db import Connection, Database
from rowmill_admission.store import datasets, feeding, retries, waits
from rowmill_contracts.runs import ParkedRow

pytestmark = pytest.mark.servers

HOUR = 3_600_000
BACK_FOR = 15.0


class Waits(Tables):
    async def wait(self, seq: int, index: int, **columns: str) -> None:
        told = {"key": "'k'", "page": "0", "attempt": "1", "waits": "1", "due_at": ago(1), "reason": "'r'"}
        await self.insert("waits", {"dataset_seq": f"{seq}", "row_index": f"{index}", **told, **columns})

    async def of(self, run_id: str, **columns: str) -> int:
        """A dataset of a new run."""
        await self.run(run_id, **columns)
        return await self.dataset(run_id)

    async def park(self, seq: int, *rows: ParkedRow, halted: bool = False) -> None:
        async def store(connection: Connection) -> None:
            await waits.add(connection, seq, rows, "away", halted=halted)

        await self.database.transact(store)

    async def row(self, seq: int, index: int = 0) -> Any:
        sql = "SELECT *, due_at <= clock_timestamp() AS due FROM waits WHERE dataset_seq = $1 AND row_index = $2"
        return await self.one(sql, seq, index)


@pytest.fixture
async def tables(database_url: str) -> AsyncIterator[Waits]:
    database = await Database.connect(database_url, schema="admission", wait=10)
    await database.migrate("rowmill_admission")
    yield Waits(database)
    await database.execute("TRUNCATE runs, datasets, waits CASCADE")
    await database.close()


def parked(**facts: Any) -> ParkedRow:
    told: dict[str, Any] = {"key": "k", "index": 0, "page": 0, "attempt": 1, "waits": 1, "wait_ms": HOUR}
    return ParkedRow(**(told | facts))


async def test_only_rows_of_runs_that_go_on_come_back_when_they_are_due(tables: Waits) -> None:
    goes_on = await tables.of("goes on")
    for index, columns in enumerate(
        ({}, {"due_at": ago(-60)}, {"due_at": "NULL"}, {"state": "'releasing'"}, {"state": "'released'"}),
    ):
        await tables.wait(goes_on, index, **columns)
    for run_id, columns in {"halted": {"halt_reason": "'pause'"}, "stopped": {"stop_reason": "''"}, "over": {"finished_at": ago(1)}}.items():
        await tables.wait(await tables.of(run_id, **columns), 0)

    found = await waits.release_due(tables.database, 100, but_for=[])
    assert [(wait.dataset_seq, wait.row_index, wait.state) for wait in found] == [(goes_on, 0, "releasing")]
    assert await waits.release_due(tables.database, 100, but_for=[]) == [], "they are the first one's to publish"


async def test_of_a_run_those_come_back_first_whose_call_was_asked_for_first(tables: Waits) -> None:
    seq = await tables.of("r")
    for index, (due, asked) in enumerate([(9, "30"), (8, "10"), (7, "NULL"), (6, "20")]):
        await tables.wait(seq, index, due_at=ago(due), asked=asked)
    order: list[int] = []
    while found := await waits.release_due(tables.database, 1, but_for=[]):
        order.extend(wait.row_index for wait in found)
    assert order == [2, 1, 3, 0]


async def test_rows_of_runs_that_are_stopped_or_over_come_back_whenever_they_are_due(tables: Waits) -> None:
    for run_id, columns in {"stopped": {"stop_reason": "''"}, "over": {"finished_at": ago(1)}, "goes on": {}}.items():
        await tables.wait(await tables.of(run_id, **columns), 0, due_at="NULL")
    await tables.run("closed", finished_at=ago(1))
    await tables.wait(await tables.dataset("closed", state="'closed'"), 0)
    busy = await tables.of("being published", stop_reason="''")
    await tables.wait(busy, 0)

    found = await waits.release_ended(tables.database, 100, but_for=[busy])
    assert await tables.names([wait.dataset_seq for wait in found]) == ["over", "stopped"]


async def test_what_somebody_began_to_publish_and_did_not_is_tried_by_the_next_those_first_that_waited_longest(tables: Waits) -> None:
    seq = await tables.of("r")
    for index, columns in enumerate(
        (
            {"state": "'releasing'", "released_at": ago(20)},
            {"state": "'releasing'", "released_at": ago(30)},
            {"state": "'releasing'", "released_at": ago(5)},
            {"state": "'released'", "released_at": ago(30)},
            {"state": "'waiting'", "released_at": ago(30)},
        )
    ):
        await tables.wait(seq, index, called_back="true", **columns)
    order = [wait.row_index for _ in range(3) for wait in await waits.release_stuck(tables.database, 1, 10.0, but_for=[])]
    assert order == [1, 0]
    called_back = [(await tables.row(seq, index))["called_back"] for index in range(5)]
    assert called_back == [False, False, True, True, True], "new rows are not to wait for what perhaps cannot be published"


async def test_a_row_that_waits_anew_is_not_noted_as_published(tables: Waits) -> None:
    seq = await tables.of("r")
    for index, columns in enumerate(({"state": "'releasing'"}, {"state": "'waiting'", "waits": "2"}, {"state": "'releasing'", "waits": "2"}, {})):
        await tables.wait(seq, index, **columns)
    published = [
        waits.Wait(dataset_seq=seq, row_index=index, key="k", page=0, attempt=1, waits=1, state="releasing", asked=None) for index in (3, 2, 1, 0)
    ]
    await waits.released(tables.database, seq, published)
    assert [(await tables.row(seq, index))["state"] for index in range(4)] == ["released", "waiting", "releasing", "waiting"]


async def test_of_two_messages_about_a_row_that_waits_the_newer_attempt_and_then_the_later_wait_counts(tables: Waits) -> None:
    seq = await tables.of("r")
    await tables.wait(seq, 0, state="'released'", released_at=ago(5), attempt="2", waits="3")
    for late in ({"attempt": 1, "waits": 9}, {"attempt": 2, "waits": 2}, {"attempt": 2, "waits": 3}):
        await tables.park(seq, parked(**late))
        assert (await tables.row(seq))["state"] == "released"
    await tables.park(seq, parked(attempt=2, waits=4, asked=5.0, provider="hunter"))
    row = await tables.row(seq)
    assert (row["state"], row["waits"], row["asked"], row["provider"], row["released_at"], row["due"]) == ("waiting", 4, 5.0, "hunter", None, False)
    await tables.park(seq, parked(attempt=3, waits=0, wait_ms=None))
    row = await tables.row(seq)
    assert (row["attempt"], row["waits"], row["due_at"]) == (3, 0, None), "worked again, it begins anew"


@pytest.mark.parametrize(
    ("before", "facts", "halted", "after"),
    [(True, {}, False, True), (True, {"away": True}, False, False), (True, {}, True, False), (False, {}, False, False)],
    ids=["waits on", "away again", "halted", "never called"],
)
async def test_a_row_that_was_called_back_stays_so_until_its_provider_is_away_again_or_its_run_is_halted(
    tables: Waits, before: bool, facts: dict[str, Any], halted: bool, after: bool
) -> None:
    seq = await tables.of("r")
    await tables.wait(seq, 0, called_back=f"{before}")
    await tables.park(seq, parked(waits=2, **facts), halted=halted)
    row = await tables.row(seq)
    assert (row["called_back"], row["halted"]) == (after, halted)


async def test_a_run_that_is_resumed_has_the_rows_come_back_that_waited_for_that(tables: Waits) -> None:
    seq, other = await tables.of("r"), await tables.of("other")
    for dataset, index, columns in (
        (seq, 0, {"halted": "true"}),
        (seq, 1, {}),
        (seq, 2, {"halted": "true", "state": "'released'"}),
        (other, 0, {"halted": "true"}),
    ):
        await tables.wait(dataset, index, due_at="NULL", **columns)

    async def resume(connection: Connection) -> None:
        await waits.end_halts(connection, "r")

    await tables.database.transact(resume)
    rows = [await tables.row(seq, index) for index in range(3)] + [await tables.row(other)]
    assert [(row["due"], row["halted"]) for row in rows] == [(True, False), (None, False), (None, True), (None, True)]


async def test_rows_that_are_retried_come_back_once_the_body_has_come_to_them_and_no_others(tables: Waits) -> None:
    seq = await tables.of("r")
    retried = {"due_at": "NULL", "reason": f"'{retries.REASON}'"}
    for index, columns in enumerate(
        (retried, {"due_at": "NULL"}, {**retried, "due_at": ago(-60)}, {**retried, "state": "'released'"}),
    ):
        await tables.wait(seq, index, **columns)

    async def adopt(connection: Connection) -> None:
        [dataset] = await datasets.of_runs(connection, ["r"])
        await retries.adopt(connection, dataset, dataset.definition)

    await tables.database.transact(adopt)
    assert [(await tables.row(seq, index))["due"] for index in range(4)] == [True, None, False, None]


async def test_what_a_dataset_has_out_counts_its_waiting_rows_and_who_is_called_back_and_not_what_waits_for_its_body(tables: Waits) -> None:
    out = {"sent": "9", "completed": "1", "failed": "1", "cancelled": "1"}
    for run_id, columns in {"out": {}, "reopened": {"reopened": "true"}, "closed": {"state": "'closed'"}, "ended": {"sent": "3"}}.items():
        await tables.run(run_id)
        seq = await tables.dataset(run_id, **(out | columns))
        for index, state in enumerate(("waiting", "waiting", "releasing", "released")):
            await tables.wait(seq, index, state=f"'{state}'", called_back=f"{run_id == 'out' and state == 'released'}")
    [flight] = await feeding.flights(tables.database, BACK_FOR)
    assert (flight.run_id, flight.sent, flight.ended, flight.waiting, flight.called_back) == ("out", 9, 3, 2, False)
    await tables.database.execute("UPDATE waits SET called_back = true WHERE state = 'releasing'")
    [flight] = await feeding.flights(tables.database, BACK_FOR)
    assert flight.called_back


@pytest.mark.parametrize(
    ("row", "ended", "goes_first"),
    [
        ({"released_at": ago(BACK_FOR / 2)}, 1, True),
        ({"released_at": ago(2 * BACK_FOR)}, 1, False),
        ({"released_at": ago(BACK_FOR / 2)}, 2, False),
        ({"released_at": ago(BACK_FOR / 2), "called_back": "false"}, 1, False),
    ],
    ids=["may be sent back again", "is out for long", "nothing is out", "came by itself"],
)
async def test_who_was_called_back_lately_goes_before_new_rows_while_any_row_is_out(
    tables: Waits, row: dict[str, str], ended: int, goes_first: bool
) -> None:
    await tables.run("r")
    seq = await tables.dataset("r", sent="4", completed=f"{ended}")
    await tables.wait(seq, 0, **({"state": "'released'", "called_back": "true"} | row))
    for index in (1, 2):
        await tables.wait(seq, index)
    [flight] = await feeding.flights(tables.database, BACK_FOR)
    assert flight.called_back is goes_first


async def test_a_provider_that_serves_an_organisation_calls_back_the_rows_of_no_other(tables: Waits) -> None:
    ours, theirs = await tables.of("ours"), await tables.of("theirs", org="'another'")
    for seq in (ours, theirs):
        await tables.wait(seq, 0, provider="'hunter'", due_at=ago(-3600))
    await waits.provider_serves(tables.database, "o", "hunter", waits.Turns(per_second=1.0, at_once=5, together=1, of_a_run=1, rows=5))
    assert [((row := await tables.row(seq))["due"], row["called_back"]) for seq in (ours, theirs)] == [(True, True), (False, False)]


async def test_a_run_says_how_many_of_its_rows_wait_for_each_provider(tables: Waits) -> None:
    seq, other, closed = await tables.of("r"), await tables.of("other"), await tables.dataset("r", "closed", state="'closed'")
    for index, columns in enumerate(
        ({}, {}, {"provider": "'apollo'"}, {"provider": "''"}, {"state": "'released'"}, {"state": "'releasing'"}, {"halted": "true"}),
    ):
        await tables.wait(seq, index, **({"provider": "'hunter'"} | columns))
    for of in (other, closed):
        await tables.wait(of, 0, provider="'hunter'")

    assert await tables.database.transact(lambda connection: waits.for_providers(connection, "r")) == {"apollo": 1, "hunter": 2}
