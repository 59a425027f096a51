"""Rows that fill the room to its last place, and wait."""

from __future__ import annotations

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows
from tests.integration.admission.test_admission_waiting import parking_first

from rowmill_admission.settings import AdmissionSettings

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, room_rows=100)


async def test_parked_rows_come_back_though_they_were_all_that_the_room_holds(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    neighbours.work = parking_first(neighbours, 200)
    await neighbours.start(run_id, rows=rows(100))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"
    assert {(row.index, row.waits) for row in neighbours.sent(run_id)} == {(index, waits) for index in range(100) for waits in range(2)}
