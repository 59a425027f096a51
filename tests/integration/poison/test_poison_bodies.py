"""Bodies that end their process, hold it, or never return: their runs fail for it, and the runs beside them complete.

A run's lease outlives a restart of its executor here, as it does at full size: what crashed its executor meets the lease of the dead one.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.poison.conftest import BOUND, SCALE, Ward

from rowmill.client import Client, Job
from rowmill_contracts.run_questions import RunSummary
from rowmill_contracts.topology import EXECUTOR_ADVANCE

LEASE = 4.0
"""Seconds; an executor is there again sooner."""


@pytest.fixture(scope="module")
def ward_settings() -> dict[str, str]:
    return {
        "ROWMILL_RUN_LEASE": str(LEASE / SCALE),
        "ROWMILL_LEASE_PATIENCE": str(1.5 * LEASE / SCALE),
        "ROWMILL_BODY_TIMEOUT": str(2.0 / SCALE),
        "ROWMILL_PRESENCE_LEASE": str(2 * LEASE / SCALE),
        "ROWMILL_STEP_PATIENCE": str(4 * LEASE / SCALE),
    }


async def over(ward: Ward, job: Job) -> RunSummary:
    try:
        async with asyncio.timeout(BOUND):
            return await job.wait()
    except TimeoutError:
        raise AssertionError(f"the run is stuck: {await job.status()}, deaths {ward.deaths}, left {await ward.left()}") from None


async def test_a_body_that_never_returns_fails_its_run(ward: Ward, client: Client) -> None:
    play = ward.play("body")
    jobs = {does: await client.start(play, does=does) for does in ("never", "never, whatever is done about it", "is well")}
    ended = {does: await over(ward, job) for does, job in jobs.items()}
    assert ended["is well"].state == "completed"
    for does in ("never", "never, whatever is done about it"):
        error = ended[does].error
        assert error is not None
        assert (ended[does].state, error.code) == ("failed", "body_timeout")
    assert not ward.deaths["row-executor"]
    assert not await ward.letters(EXECUTOR_ADVANCE)


@pytest.mark.long
@pytest.mark.parametrize(("does", "status"), [("exit", 3), ("hold", 1)])
async def test_a_body_that_takes_its_process_with_it_fails_its_run_and_no_other(ward: Ward, client: Client, does: str, status: int) -> None:
    play = ward.play("body")
    job = await client.start(play, does=does)
    others = [await client.start(play, does="is well") for _ in range(5)]
    ended = await over(ward, job)
    assert ended.error is not None
    assert (ended.state, ended.error.code) == ("failed", "dead_lettered")
    assert "poison: crashed its consumer 4 times" in ended.error.message
    assert [(await over(ward, other)).state for other in others] == ["completed"] * 5
    assert ward.deaths["row-executor"] == {status: 4}
    assert [letter.headers["x-rowmill-run-id"] for letter in await ward.letters(EXECUTOR_ADVANCE)] == [job.run_id]


@pytest.mark.long
async def test_a_row_whose_step_takes_its_process_with_it_is_dead_lettered(ward: Ward, client: Client) -> None:
    """What it left behind is held until its executor counts as dead, which is long after that one was started again."""
    rows = [{"name": f"step-{number}", "does": "exit in a step" if number == 2 else "well"} for number in range(4)]
    job = await client.start(ward.play("waiting"), items=rows)
    summary, found = await ward.ended(client, job)
    assert (summary.state, [row.mark for row in found]) == ("completed", ["completed", "completed", "failed", "completed"])
    assert found[2].error is not None
    assert found[2].error.code == "dead_lettered"
    assert ward.deaths["row-executor"][3] <= 8, "each crash was counted"
    await ward.letters()
