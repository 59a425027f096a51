"""What the look finds, and what a retry makes of a run: each condition of these statements decides about a row of its own here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.admission.admission_tables import Tables, ago

from rowmill.runtime.db import Connection, Database
from rowmill_admission.store import datasets, feeding, inputs, owed, retries, runs
from rowmill_contracts.runs import OpenDataset

pytestmark = pytest.mark.servers

WAIT, LIMIT = 10.0, 100.0
PROBLEM = """'{"code":"c","message":"m"}'"""


@pytest.fixture
async def tables(database_url: str) -> AsyncIterator[Tables]:
    database = await Database.connect(database_url, schema="admission", wait=10)
    await database.migrate("rowmill_admission")
    yield Tables(database)
    await database.execute("TRUNCATE runs, datasets, pages, inputs, owed, retries, recorded_calls CASCADE")
    await database.close()


# ---- the look -----------------------------------------------------------------------------------------------------------------------------


async def test_runs_whose_body_should_run_and_does_not_are_asked_for_again(tables: Tables) -> None:
    await tables.run("never taken", state="'queued'")
    await tables.run("lease lapsed", lease_until=ago(1))
    await tables.run("woken", state="'waiting'", waiting_for="'timer'", advance_wanted="true")
    await tables.run("dataset closed", state="'waiting'", waiting_for="'dataset:d'")
    await tables.dataset("dataset closed", state="'closed'")
    await tables.run("asked thrice, long ago", advanced_at=ago(8 * WAIT + 1), advances="3")
    await tables.run("asked very often", advanced_at=ago(LIMIT + 1), advances="2000")

    await tables.run("held", lease_until=ago(-60))
    await tables.run("waits for a timer", state="'waiting'", waiting_for="'timer'")
    await tables.run("dataset open", state="'waiting'", waiting_for="'dataset:d'")
    await tables.dataset("dataset open")
    await tables.run("halted", halt_reason="'pause'")
    await tables.run("stopped", stop_reason="'enough'")
    await tables.run("over", state="'completed'")
    await tables.run("asked just now", advanced_at=ago(1))
    await tables.run("changed just now", changed_at=ago(1))
    await tables.run("asked thrice", advanced_at=ago(8 * WAIT - 1), advances="3")

    found = await runs.to_advance_again(tables.database, WAIT, LIMIT)
    assert sorted(found) == ["asked thrice, long ago", "asked very often", "dataset closed", "lease lapsed", "never taken", "woken"]


async def test_runs_that_go_on_though_their_wall_time_is_over_are_found(tables: Tables) -> None:
    await tables.run("late", deadline=ago(1))
    await tables.run("late and waiting", deadline=ago(1), state="'waiting'", waiting_for="'timer'")

    await tables.run("in time", deadline=ago(-60))
    await tables.run("without end")
    await tables.run("waits for a person", deadline=ago(1), state="'waiting'", halted_at=ago(5))
    await tables.run("halted", deadline=ago(1), halt_reason="'pause'")
    await tables.run("stopped", deadline=ago(1), stop_reason="'enough'")
    await tables.run("over", deadline=ago(1), state="'completed'")

    assert sorted(await runs.out_of_time(tables.database)) == ["late", "late and waiting"]


async def test_stopped_runs_of_which_nothing_is_open_are_found(tables: Tables) -> None:
    await tables.run("left behind", stop_reason="'enough'")
    await tables.dataset("left behind", state="'closed'")

    await tables.run("rows are out", stop_reason="'enough'")
    await tables.dataset("rows are out")
    await tables.run("goes on")
    await tables.run("over", stop_reason="'enough'", state="'cancelled'")

    assert await runs.stopped_with_nothing_open(tables.database) == ["left behind"]


async def test_datasets_all_of_whose_rows_have_ended_are_found(tables: Tables) -> None:
    ended = {"admitted": "5", "completed": "1", "failed": "1", "cancelled": "1", "reused": "1", "duplicates": "1"}
    for run_id, columns in {
        "over": {"admission_done": "true"},
        "admitted still": {},
        "a row is out": {"admission_done": "true", "duplicates": "0"},
        "closed": {"admission_done": "true", "state": "'closed'"},
    }.items():
        await tables.run(run_id)
        await tables.dataset(run_id, **(ended | columns))

    assert await tables.names(await datasets.over(tables.database)) == ["over"]


async def test_datasets_of_which_nothing_is_heard_or_whose_pages_are_out_for_too_long_are_asked_for(tables: Tables) -> None:
    heard, out = {"next_page": "1", "counted_at": ago(1)}, {"sent": "2", "completed": "1"}
    for run_id, columns, published, repetitions in (
        ("silent", {**heard, "counted_at": ago(WAIT + 1)}, 1, 0),
        ("page out", {**heard, **out}, WAIT + 1, 0),
        ("page out again", {**heard, **out}, 2 * WAIT + 1, 1),
        ("heard of", {**heard, **out}, 1, 0),
        ("page sent again", {**heard, **out}, 2 * WAIT - 1, 1),
        ("no row out", {**heard, "sent": "2", "completed": "1", "failed": "1"}, WAIT + 1, 0),
        ("not begun", {"next_page": "0", "counted_at": ago(WAIT + 1)}, 1, 0),
        ("closed", {**heard, "counted_at": ago(WAIT + 1), "state": "'closed'"}, 1, 0),
    ):
        await tables.run(run_id)
        await tables.page(await tables.dataset(run_id, **columns), 0, published_at=ago(published), repetitions=f"{repetitions}")

    found = await datasets.silent(tables.database, WAIT, WAIT)
    assert sorted(run_id for _, run_id, _ in found) == ["page out", "page out again", "silent"]


async def test_a_page_is_published_again_after_a_time_that_doubles(tables: Tables) -> None:
    async def again(*pages: int) -> list[int]:
        return sorted(await feeding.pages_to_send_again(tables.database, seq, list(pages), WAIT))

    async def grow_older(seconds: float) -> None:
        await tables.database.execute(f"UPDATE pages SET published_at = published_at - interval '{seconds} s'")  # noqa: S608 - our own

    await tables.run("r")
    seq = await tables.dataset("r")
    for page, published in enumerate((WAIT + 1, 1, WAIT + 1)):
        await tables.page(seq, page, published_at=ago(published))
    assert await again(0, 1) == [0], "one was published just now, and of another nothing is open"
    assert await again(0, 1) == []
    await grow_older(WAIT + 1)
    assert await again(0, 1) == [1]
    await grow_older(WAIT)
    assert await again(0) == [0]


async def test_what_closed_datasets_leave_behind_is_forgotten_later_where_a_retry_may_need_it(tables: Tables) -> None:
    for run_id, columns in {
        "well": {"closed_at": ago(WAIT + 1)},
        "failed, long ago": {"closed_at": ago(LIMIT + 1), "failed": "1"},
        "well, just now": {"closed_at": ago(1)},
        "rows failed": {"closed_at": ago(WAIT + 1), "failed": "1"},
        "rows cancelled": {"closed_at": ago(WAIT + 1), "cancelled": "1"},
        "failed as a whole": {"closed_at": ago(WAIT + 1), "state": "'failed'", "error": PROBLEM},
        "open again": {"closed_at": ago(LIMIT + 1), "state": "'open'"},
    }.items():
        await tables.run(run_id)
        await tables.page(await tables.dataset(run_id, **({"state": "'closed'"} | columns)), 0)

    await feeding.forget_closed(tables.database, WAIT, LIMIT)
    kept = await tables.names([row["dataset_seq"] for row in await tables.database.fetch("SELECT dataset_seq FROM pages")])
    assert kept == ["failed as a whole", "open again", "rows cancelled", "rows failed", "well, just now"]


async def test_inputs_that_nobody_goes_on_with_are_found_unless_a_run_has_begun_to_wait_for_them(tables: Tables) -> None:
    for input_id, state, changed in (("left", "open", WAIT + 1), ("awaited", "open", WAIT + 1), ("fresh", "open", 1), ("sealed", "sealed", WAIT + 1)):
        await tables.database.execute(f"INSERT INTO inputs (input_id, state, changed_at) VALUES ($1, $2, {ago(changed)})", input_id, state)  # noqa: S608

    async def start(connection: Connection) -> None:
        await inputs.touch(connection, ["awaited"])

    await tables.database.transact(start)
    assert await inputs.unsealed_for(tables.database, WAIT) == ["left"]


async def test_runs_that_owe_a_message_for_a_while_are_found_the_oldest_first(tables: Tables) -> None:
    for run_id, age in (("second", WAIT + 1), ("fresh", 1), ("third", WAIT + 5), ("second", WAIT + 1)):
        await tables.database.execute(
            f"INSERT INTO owed (run_id, lane, exchange, key, message_type, body, asked, owed_at) VALUES ($1, '', '', '', '', '', false, {ago(age)})",  # noqa: S608
            run_id,
        )
    assert await owed.runs_owing(tables.database, WAIT) == ["second", "third"]
    assert await owed.runs_owing(tables.database, 0.0) == ["second", "fresh", "third"]


# ---- a retry ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("halted", "since"), [("NULL", 100), (ago(300), 300)])
async def test_a_run_that_is_retried_is_the_newest_and_the_time_since_it_ended_is_none_of_its_working_time(
    tables: Tables, halted: str, since: int
) -> None:
    await tables.run("r", state="'failed'", finished_at=ago(100), halted_at=halted, halted_seconds="7", attempt="2", halt_reason="'pause'")
    await tables.run("later")

    async def begin(connection: Connection) -> None:
        await retries.begin(connection, "r", [])

    await tables.database.transact(begin)
    run = await tables.one("SELECT *, number > (SELECT number FROM runs WHERE run_id = 'later') AS newest FROM runs WHERE run_id = 'r'")
    assert (run["state"], run["retrying"], run["attempt"], run["newest"]) == ("failed", True, 3, True)
    assert (run["halted_at"], run["halt_reason"]) == (None, None), "who halts it from now on means the retry"
    assert 7 + since <= run["halted_seconds"] < 7 + since + 60


@pytest.mark.parametrize(
    ("meanwhile", "waiting_for"), [({}, None), ({"halt_reason": "'pause'"}, "pause"), ({"halt_reason": "'pause'", "stop_reason": "'enough'"}, None)]
)
async def test_a_run_that_goes_on_for_a_retry_stands_as_one_that_had_not_ended(
    tables: Tables, meanwhile: dict[str, str], waiting_for: str | None
) -> None:
    """``meanwhile``: what was decided while the retry was prepared."""
    leases = {"lease_until": ago(-60), "advance_wanted": "true", "advances": "5", "advanced_at": ago(500)}
    ended = {"state": "'failed'", "output": "'[1]'", "error": PROBLEM, "finished_at": ago(100), "code_digest": "'old'", "waiting_for": "'timer'"}
    await tables.run("r", retrying="true", **ended, **leases, **meanwhile)
    closed = {"state": "'failed'", "closed_at": ago(100), "counted_at": ago(100), "feeder_until": ago(-60), "first_error": PROBLEM}
    whole = await tables.dataset("r", "whole", admission_done="true", **closed)
    cut_short = await tables.dataset("r", "cut-short", admission_done="true", error=PROBLEM, **closed)
    for position, kind, name in ((0, "call", "a"), (1, "closed", "before"), (2, "closed", "whole"), (3, "call", "b"), (4, "closed", "cut-short")):
        await tables.database.execute("INSERT INTO recorded_calls VALUES ('r', $1, $2, $3, '', 'null')", position, kind, name)

    async def reopen(connection: Connection) -> None:
        await retries.reopen(connection, "r", await datasets.of_runs(connection, ["r"]))

    await tables.database.transact(reopen)
    run = await tables.one("SELECT *, clock_timestamp() - advanced_at < interval '60 s' AS asked_now FROM runs WHERE run_id = 'r'")
    state = "running" if waiting_for is None else "waiting"
    stands = {name: run[name] for name in ("state", "output", "advance_wanted", "advances", "retrying", "asked_now")}
    assert stands == {"state": state, "output": "null", "advance_wanted": False, "advances": 0, "retrying": False, "asked_now": True}
    assert (run["waiting_for"], run["halt_reason"], run["halted_at"] is None) == (waiting_for, waiting_for, waiting_for is None)
    gone = ("error", "finished_at", "code_digest", "lease_until")
    assert {name: run[name] for name in gone} == dict.fromkeys(gone)
    for seq, admitted in ((whole, True), (cut_short, False)):
        dataset = await tables.one("SELECT *, clock_timestamp() - counted_at < interval '60 s' AS heard FROM datasets WHERE dataset_seq = $1", seq)
        assert (dataset["state"], dataset["admission_done"], dataset["heard"]) == ("open", admitted, True)
        assert [dataset[name] for name in ("error", "first_error", "closed_at", "feeder_until")] == [None] * 4
    left = await tables.database.fetch("SELECT name FROM recorded_calls WHERE run_id = 'r' ORDER BY position")
    assert [row["name"] for row in left] == ["a", "before"]


async def test_the_body_of_a_retried_run_finds_its_dataset_with_the_code_of_now_and_as_published_now(tables: Tables) -> None:
    await tables.run("r")
    seq = await tables.dataset("r", reopened="true")
    other = await tables.dataset("r", "other")
    for each in (seq, other):
        await tables.page(each, 0, published_at=ago(500), repetitions="4")

    async def adopt(connection: Connection) -> None:
        found = await datasets.by_name(connection, "r", "d")
        assert found is not None
        await retries.adopt(connection, found, OpenDataset(run_id="r", term=2, dataset="d", input_id="i", columns=[], code_digest="new"))

    await tables.database.transact(adopt)
    dataset = await tables.one("SELECT reopened, definition ->> 'code_digest' AS code FROM datasets WHERE dataset_seq = $1", seq)
    assert (dataset["reopened"], dataset["code"]) == (False, "new")
    assert (await tables.one("SELECT code_digest FROM runs WHERE run_id = 'r'"))["code_digest"] == "new"
    pages = await tables.database.fetch(f"SELECT dataset_seq, repetitions, published_at > {ago(60)} AS fresh FROM pages")  # noqa: S608
    assert {row["dataset_seq"]: (row["repetitions"], row["fresh"]) for row in pages} == {seq: (0, True), other: (4, False)}


async def test_requests_for_retries_are_known_for_as_long_as_they_could_make_one(tables: Tables) -> None:
    for run_id, columns, closed in (
        ("over", {"state": "'completed'"}, LIMIT + 1),
        ("asked just now", {"state": "'completed'"}, LIMIT + 1),
        ("goes on", {"state": "'running'"}, LIMIT + 1),
        ("being retried", {"state": "'completed'", "retrying": "true"}, LIMIT + 1),
        ("ended just now", {"state": "'completed'"}, 1),
    ):
        await tables.run(run_id, **columns)
        await tables.dataset(run_id, state="'closed'", closed_at=ago(closed))
        asked = 1 if run_id == "asked just now" else LIMIT + 1
        await tables.database.execute(f"INSERT INTO retries VALUES ($1, 'first', {ago(asked)})", run_id)  # noqa: S608
    await tables.run("rows are out", state="'failed'")
    await tables.dataset("rows are out", state="'open'")
    await tables.database.execute(f"INSERT INTO retries VALUES ('rows are out', 'first', {ago(LIMIT + 1)})")  # noqa: S608

    await retries.forget(tables.database, LIMIT)
    left = [row["run_id"] for row in await tables.database.fetch("SELECT run_id FROM retries ORDER BY run_id")]
    assert left == ["asked just now", "being retried", "ended just now", "goes on", "rows are out"]

    async def known(connection: Connection) -> list[bool]:
        asked = [("goes on", None), ("goes on", WAIT), ("over", None)]
        return [await retries.is_known(connection, run_id, "first", within) for run_id, within in asked]

    assert await tables.database.transact(known) == [True, False, False]


async def test_a_run_whose_pages_are_forgotten_is_too_old_to_be_retried(tables: Tables) -> None:
    async def too_old(run_id: str) -> bool:
        async def ask(connection: Connection) -> bool:
            return await retries.are_too_old(connection, await datasets.of_runs(connection, [run_id]), LIMIT)

        return await tables.database.transact(ask)

    for run_id, columns, page in (
        ("young", {"next_page": "1", "closed_at": ago(1)}, True),
        ("old", {"next_page": "1", "closed_at": ago(LIMIT + 1)}, True),
        ("forgotten", {"next_page": "1", "closed_at": ago(1)}, False),
        ("never published", {"next_page": "0", "closed_at": ago(1)}, False),
    ):
        await tables.run(run_id, state="'failed'")
        seq = await tables.dataset(run_id, state="'closed'", **columns)
        if page:
            await tables.page(seq, 0)
    assert [await too_old(run_id) for run_id in ("young", "old", "forgotten", "never published")] == [False, True, True, False]
