"""What always fails starves nothing that comes after it."""

from __future__ import annotations

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows, settled
from tests.integration.admission.test_admission_waiting import parking_first

from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, page_rows=2, repair_interval=4.0, silent_after=4.0)


async def test_a_dataset_that_cannot_be_asked_for_keeps_no_other_from_being_asked_for(neighbours: Neighbours) -> None:
    bad, good = new_run_id(), new_run_id()
    neighbours.silent_writer = True
    neighbours.nonsense_counts_for.add(bad)
    for run_id in (bad, good):
        await neighbours.start(run_id, rows=rows(2))
        await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2)  # noqa: B023 - over before the next turn
    await neighbours.until(lambda: neighbours.ended(good))
    assert not neighbours.ended(bad)
    neighbours.nonsense_counts_for.clear()
    await neighbours.until(lambda: neighbours.ended(bad))


async def test_a_page_that_cannot_be_published_again_keeps_no_other_from_it(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, 500)
    await neighbours.start(run_id, rows=rows(8))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 8)
    neighbours.nonsense_pages.add((run_id, 0))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 14)
    assert {row.page for row in neighbours.sent(run_id)[8:]} == {1, 2, 3}
    neighbours.nonsense_pages.clear()
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_what_could_not_be_published_is_forgotten_with_its_dataset(neighbours: Neighbours, admission: App) -> None:
    """The page's rows ended otherwise: by an older copy of their message."""
    assert admission._parts is not None
    failed = admission._parts.releasing._failed
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, 500)
    await neighbours.start(run_id, rows=rows(2))
    await neighbours.until(lambda: len(neighbours.sent(run_id)) == 2)
    neighbours.nonsense_pages.add((run_id, 0))
    await neighbours.until(lambda: failed)
    [tasks] = [tasks for tasks in neighbours.tasks if tasks.run_id == run_id]
    await admission._parts.repair.look()
    assert len(failed) == 1
    await neighbours.settle(tasks, [settled(row, "completed") for row in tasks.rows])
    await neighbours.until(lambda: neighbours.ended(run_id))
    await neighbours.until(lambda: not failed)
