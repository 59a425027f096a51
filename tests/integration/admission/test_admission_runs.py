"""Runs from their start to their end, on a real broker and database."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, raw, rows, settled

from rowmill_contracts.counts import Problem
from rowmill_contracts.runs import RunOptions

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


async def test_a_run_with_rows_in_its_message_is_worked_to_its_end(neighbours: Neighbours) -> None:
    run_id = new_run_id()
    await neighbours.start(run_id, rows=rows(450))
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(450))
    assert neighbours.states(run_id) == ["queued", "running", "waiting", "running", "completed"]
    run = await neighbours.get(run_id)
    assert run is not None
    assert (run.state, run.counts.admitted, run.counts.completed) == ("completed", 450, 450)
    assert run.output == raw({"rows": 450})
    assert [(each.dataset, each.state, each.total_rows) for each in run.datasets] == [("leads", "closed", 450)]
