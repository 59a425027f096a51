"""Tool functions that end their gateway for one input among many, and may be called again: few gateways die, and every other call is answered.

A shard's lease outlives a restart of its gateway here, and calls are held in hand for a moment only, so that what met the lease of the dead one comes
back in new messages, whose deliveries say nothing.
"""

from __future__ import annotations

import msgspec
import pytest
from tests.integration.poison.conftest import SCALE, Ward
from tests.integration.poison.test_poison_tools import ENDED, asked

from rowmill.client import Client
from rowmill.client.receipts import ReceiptDesk
from rowmill_contracts.rows import ReadRow

LEASE = 1.5
"""Seconds."""
DEATHS_BESIDE_OTHERS, DEATHS_ALONE = 1, 1


@pytest.fixture(scope="module")
def ward_settings() -> dict[str, str]:
    return {
        "ROWMILL_SHARD_LEASE": str(LEASE / SCALE),
        "ROWMILL_SHARD_RENEWAL": str(LEASE / SCALE / 3),
        "ROWMILL_SUSPECTED_AFTER": str(DEATHS_BESIDE_OTHERS),
        "ROWMILL_DEATHS_ALONE": str(DEATHS_ALONE),
        "ROWMILL_STORE_TIMEOUT": "60",  # what a busy machine needs, not what is waited for
        "ROWMILL_PAGE_ROWS": "40",
        "ROWMILL_ROW_TIMEOUT": "2400",
    }


def check(rows: list[ReadRow], given: list[dict[str, str]], killers: set[int]) -> None:
    """Each row once, in order; killers failed as such, all others are complete."""
    assert [row.index for row in rows] == list(range(len(given)))
    ended = {row.index: "" if row.error is None else row.error.code for row in rows if row.mark != "completed"}
    assert ended == dict.fromkeys(killers, "poison")
    for row in rows:
        name = given[row.index]["name"].upper()
        assert row.index in killers or msgspec.json.decode(row.data)["done"] == f"{name} {name}"


async def test_a_call_that_ends_its_gateways_fails_after_few_of_them_and_no_other_does(ward: Ward, client: Client) -> None:
    given = asked(200, {77: "exit among others"})
    summary, rows = await ward.ended(client, await client.start(ward.play("asking_together"), items=given))

    check(rows, given, {77})
    assert summary.counts.failed == 1
    assert ward.deaths["tool-gateway"] == {ENDED: DEATHS_BESIDE_OTHERS + DEATHS_ALONE}
    [shown] = await ReceiptDesk(client.bus).listed(state="failed", run_id=None, tool=None, limit=10)
    assert (shown.tool, shown.deaths) == ("press.ask_many", DEATHS_BESIDE_OTHERS + DEATHS_ALONE)
    error = rows[77].error
    assert error is not None
    assert shown.failure is not None
    assert shown.failure.message in error.message
