"""Feeding: every row once, in order, without duplicates, within the room, whatever is told late or twice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, raw, rows, settled

from rowmill.encoding.canonical import row_key
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.envelope import PAGE_ROWS
from rowmill_contracts.events import DatasetEvent
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.topology import ADMISSION_COUNTS

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


async def finished(neighbours: Neighbours, run_id: str) -> str:
    await neighbours.until(lambda: neighbours.ended(run_id))
    return neighbours.states(run_id)[-1]


async def test_equal_keys_are_sent_once_across_pages(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"key": ["domain"]}
    page = [raw({"id": i, "domain": f"{i % 150}.example"}) for i in range(200)]
    await neighbours.stage(run_id, [page, page, page])
    await neighbours.start(run_id, input_ref=run_id)
    assert await finished(neighbours, run_id) == "completed"
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(150))
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.counts.admitted, run.counts.completed, run.counts.duplicates) == (600, 150, 450)


async def test_rows_carry_their_key_and_data_as_staged(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    staged = msgspec.Raw(b'{"b": 1.0,  "a": "\\u00e4"}')
    await neighbours.start(run_id, rows=[staged])
    await finished(neighbours, run_id)
    [row] = neighbours.sent(run_id)
    assert row.key == row_key({"a": "\u00e4", "b": 1.0}).hex()
    assert row.data == staged
    assert (row.index, row.page, row.attempt, row.waits) == (0, 0, 1, 0)


async def test_equal_records_are_different_rows_by_their_place(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"source_row_identity": True}
    await neighbours.start(run_id, rows=[raw({"a": 1})] * 5)
    await finished(neighbours, run_id)
    assert len({row.key for row in neighbours.sent(run_id)}) == 5


async def test_an_authors_key_function_is_asked_of_executors(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"key_function": True}
    await neighbours.start(run_id, rows=rows(30))
    await finished(neighbours, run_id)
    assert [row.key for row in neighbours.sent(run_id)] == [str(i) * 64 for i in range(7)]


async def test_a_row_without_key_fails_the_dataset_before_its_page_is_sent(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.dataset = {"key": ["domain"]}
    bad = [*rows(30, 200), raw({"id": 230, "domain": None}), *rows(10, 231)]
    await neighbours.stage(run_id, [rows(200), bad])
    await neighbours.start(run_id, input_ref=run_id)
    assert await finished(neighbours, run_id) == "failed"
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.error is not None
    assert run.error.code == "key_part_missing"
    assert "row 231 of the input" in run.error.message
    assert "'domain'" in run.error.message
    assert {row.page for row in neighbours.sent(run_id)} <= {0}
    assert run.counts.completed == run.counts.admitted


async def test_reused_rows_are_not_sent(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.books.sheet = {row_key(msgspec.json.decode(row)).hex() for row in rows(300)}
    await neighbours.start(run_id, rows=rows(310))
    assert await finished(neighbours, run_id) == "completed"
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(300, 310))


async def test_a_run_never_has_more_rows_out_than_its_window(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    out = most = 0

    def count_out(tasks: RowTasks) -> Sequence[SettledRow]:
        nonlocal out, most
        out += len(tasks.rows)
        most = max(most, out)
        out -= len(tasks.rows)  # ended when this returns
        return [settled(row, "completed") for row in tasks.rows]

    neighbours.work = count_out
    neighbours.dataset = {"concurrency": 3}
    await neighbours.start(run_id, rows=rows(50))
    assert await finished(neighbours, run_id) == "completed"
    assert most <= 3
    assert len(neighbours.sent(run_id)) == 50


async def test_older_counts_change_nothing(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    held: list[RowTasks] = []
    neighbours.work = lambda tasks: held.append(tasks) or []  # type: ignore[func-returns-value]
    await neighbours.start(run_id, rows=rows(2 * PAGE_ROWS))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2 * PAGE_ROWS)
    before = neighbours.books.committed(run_id, "leads")
    await neighbours.settle(held[0], [settled(row, "completed") for row in held[0].rows])
    await neighbours.bus.publish(before, ADMISSION_COUNTS)
    await neighbours.settle(held[1], [settled(row, "completed") for row in held[1].rows])
    assert await finished(neighbours, run_id) == "completed"
    await neighbours.bus.publish(before, ADMISSION_COUNTS)
    await neighbours.start(marker := new_run_id(), rows=[])
    await finished(neighbours, marker)
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.counts.completed == 2 * PAGE_ROWS


async def test_counts_that_got_lost_are_asked_for(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.silent_writer = True
    await neighbours.start(run_id, rows=rows(100))
    assert await finished(neighbours, run_id) == "completed"


async def test_progress_is_told_while_rows_end(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    held: list[RowTasks] = []
    neighbours.work = lambda tasks: held.append(tasks) or []  # type: ignore[func-returns-value]
    await neighbours.start(run_id, rows=rows(2 * PAGE_ROWS))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2 * PAGE_ROWS)
    await neighbours.settle(held[0], [settled(row, "completed") for row in held[0].rows])

    def told() -> list[DatasetEvent]:
        return [event for event in neighbours.events if isinstance(event, DatasetEvent) and (event.run_id, event.state) == (run_id, "progress")]

    await neighbours.until(lambda: told() and told()[-1].counts.completed == PAGE_ROWS)
    assert told()[-1].total_rows == 2 * PAGE_ROWS


class TestPagesAreSentAgain:
    @pytest.fixture
    def settings(self, broker_url: str, database_url: str) -> AdmissionSettings:
        return AdmissionSettings(
            broker_url=broker_url, database_url=database_url, time_scale=0.05, page_again_after=10.0, repair_interval=4.0, silent_after=4.0
        )

    async def test_rows_that_were_lost_at_an_executor_are_sent_again_with_the_same_attempt(self, neighbours: Neighbours) -> None:
        run_id = new_run_id()
        lost: list[RowTasks] = []

        def loses_half(tasks: RowTasks) -> list[SettledRow]:
            if tasks.run_id == run_id and not lost:
                lost.append(tasks)
                return [settled(row, "completed") for row in tasks.rows[:50]]
            return [settled(row, "completed") for row in tasks.rows]

        neighbours.work = loses_half
        await neighbours.start(run_id, rows=rows(100))
        assert await finished(neighbours, run_id) == "completed"
        again = [row for tasks in neighbours.tasks if tasks.run_id == run_id and tasks is not lost[0] for row in tasks.rows]
        assert {row.index for row in again} == set(range(50, 100))
        assert {row.attempt for row in again} == {1}


class TestFeedersThatFail:
    @pytest.fixture
    def settings(self, broker_url: str, database_url: str) -> AdmissionSettings:
        return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, feeder_failures=3)

    async def test_an_error_that_nobody_foresaw_fails_the_run_after_a_few_tries(self, neighbours: Neighbours) -> None:
        run_id = new_run_id()
        neighbours.nonsense_for.add(run_id)
        await neighbours.start(run_id, rows=rows(10))
        assert await finished(neighbours, run_id) == "failed"
        run = await neighbours.get(run_id)
        assert run is not None
        assert run.error is not None
        assert run.error.code == "admission_failed"
        assert "page 0 could not be admitted, tried 3 times" in run.error.message
