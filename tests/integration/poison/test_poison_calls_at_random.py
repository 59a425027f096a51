"""Tool functions that end their gateway while gateways are killed at random: those fail, and nobody who was merely there."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.integration.poison.conftest import SCALE, Ward
from tests.integration.poison.test_poison_calls import LEASE, check
from tests.integration.poison.test_poison_tools import asked

from rowmill.client import Client


@pytest.fixture(scope="module")
def ward_settings() -> dict[str, str]:
    return {
        "ROWMILL_SHARD_LEASE": str(LEASE / SCALE),
        "ROWMILL_SHARD_RENEWAL": str(LEASE / SCALE / 3),
        "ROWMILL_STORE_TIMEOUT": "60",
        "ROWMILL_PAGE_ROWS": "40",
        "ROWMILL_ROW_TIMEOUT": "2400",
    }


@pytest.mark.long
async def test_while_gateways_are_killed_at_random_only_those_that_end_them_fail(ward: Ward, client: Client) -> None:
    killers = {11: "exit among others", 12: "exit", 150: "exit"}
    given = asked(200, killers)
    killing = asyncio.create_task(ward.kill_gateways(times=8, after=LEASE, random=Random(7)))
    try:
        _, rows = await ward.ended(client, await client.start(ward.play("asking_together"), items=given))
    finally:
        killing.cancel()
        ended = await asyncio.gather(killing, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError | None), ended
    assert ward.killed > 0, "the run was over before a gateway was killed"
    check(rows, given, set(killers))
