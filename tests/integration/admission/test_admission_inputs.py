"""Staged inputs: pages and seals in any order, repeated, contradicting."""

from __future__ import annotations

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows

from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.envelope import PAGE_ROWS
from rowmill_contracts.runs import InputPage
from rowmill_contracts.topology import INPUTS

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("admission")]


async def error_of(neighbours: Neighbours, run_id: str) -> str:
    await neighbours.until(lambda: neighbours.ended(run_id))
    run = await neighbours.get(run_id)
    assert run is not None
    assert run.state == "failed"
    assert run.error is not None
    return run.error.message


async def test_pages_may_come_in_any_order_after_the_seal_and_twice(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    pages = [rows(200), rows(200, 200), rows(150, 400)]
    await neighbours.start(run_id, input_ref=input_id)
    await neighbours.seal(input_id, pages)
    await neighbours.stage(input_id, pages, order=[2, 0, 0, 1, 2])
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert [row.index for row in sorted(neighbours.sent(run_id), key=lambda row: row.index)] == list(range(550))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_the_run_may_start_after_its_input_is_sealed(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.stage(input_id, [rows(10)])
    await neighbours.start(run_id, input_ref={"leads": input_id})
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert neighbours.states(run_id)[-1] == "completed"


async def test_a_large_page_of_a_client_is_cut_into_pages(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.stage(input_id, [rows(1_001), [], rows(3, 1_001)])
    await neighbours.start(run_id, input_ref=input_id)
    await neighbours.until(lambda: neighbours.ended(run_id))
    assert sorted(row.index for row in neighbours.sent(run_id)) == list(range(1_004))
    assert max(len(tasks.rows) for tasks in neighbours.tasks) == PAGE_ROWS


async def test_the_same_page_with_other_rows_fails_the_input_and_its_runs(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.start(run_id, input_ref=input_id)
    for page in (rows(3), rows(4)):
        await neighbours.bus.publish(InputPage(input_id=input_id, page=0, rows=page), INPUTS)
    assert "published twice with different rows" in await error_of(neighbours, run_id)
    late = new_run_id()
    await neighbours.start(late, input_ref=input_id)
    assert "published twice with different rows" in await error_of(neighbours, late)
    assert not neighbours.sent(run_id)


async def test_a_seal_with_another_digest_fails_the_input(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.bus.publish(InputPage(input_id=input_id, page=0, rows=rows(3)), INPUTS)
    await neighbours.seal(input_id, [rows(3)], digest="0" * 64)
    await neighbours.start(run_id, input_ref=input_id)
    assert "digest" in await error_of(neighbours, run_id)


async def test_a_seal_that_counts_other_rows_fails_the_input(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.bus.publish(InputPage(input_id=input_id, page=0, rows=rows(3)), INPUTS)
    await neighbours.seal(input_id, [rows(4)])
    await neighbours.start(run_id, input_ref=input_id)
    assert "sealed with 4 rows, but its pages hold 3" in await error_of(neighbours, run_id)


async def test_rows_that_are_no_objects_are_dead_letters_and_fail_the_input(neighbours: Neighbours) -> None:
    run_id = input_id = new_run_id()
    await neighbours.start(run_id, input_ref=input_id)
    body = b'{"input_id":"%b","page":0,"rows":[{"id":1},3]}' % input_id.encode()
    await neighbours.bus.publish_body(body, "InputPage.v1", INPUTS)
    assert "every row must be a JSON object" in await error_of(neighbours, run_id)


@pytest.mark.parametrize("message_type", ["InputPage.v1", None])
async def test_a_malformed_page_fails_the_input_that_it_names(neighbours: Neighbours, message_type: str | None) -> None:
    run_id = input_id = new_run_id()
    await neighbours.start(run_id, input_ref=input_id)
    await neighbours.bus.publish_body(b'{"input_id":"%b","page":-1,"rows":[]}' % input_id.encode(), message_type, INPUTS)
    assert "was dead-lettered from admission.inputs.v1" in await error_of(neighbours, run_id)


class TestAbandoned:
    @pytest.fixture
    def settings(self, broker_url: str, database_url: str) -> AdmissionSettings:
        return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, input_unsealed_limit=10.0, repair_interval=4.0)

    async def test_an_input_that_is_never_sealed_fails_its_runs(self, neighbours: Neighbours) -> None:
        run_id = new_run_id()
        await neighbours.start(run_id, input_ref="never-" + run_id)
        assert "was not sealed" in await error_of(neighbours, run_id)
