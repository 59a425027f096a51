"""Tool functions that end their gateway, hold it, or never return: their calls fail, and all others are answered.

A shard's lease outlives a restart of its gateway here, and the time that a call is held in hand, as both do at full size: what crashed its gateway
meets the lease of the dead one.
"""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import suppress
from random import Random

import msgspec
import pytest
from aiormq.exceptions import ChannelNotFoundEntity
from tests.integration.poison.conftest import BOUND, SCALE, Ward

from rowmill.client import Client
from rowmill.runtime.suspicion import POISON_AFTER, SUSPECTED_AFTER
from rowmill.runtime.work_record import record_name
from rowmill_contracts.rows import ReadRow
from rowmill_contracts.topology import EXECUTOR_ROWS

ENDED = 4
HAND, LEASE = 2.0, 4.5
"""Seconds."""

KILLS = 16
"""Fewer than condemn what is at rest each time, should one row meet them all."""


@pytest.fixture(scope="module")
def ward_settings() -> dict[str, str]:
    return {
        "ROWMILL_HAND": str(HAND / SCALE),
        "ROWMILL_SHARD_LEASE": str(LEASE / SCALE),
        "ROWMILL_SHARD_RENEWAL": str(LEASE / SCALE / 3),
        "ROWMILL_ASK_AGAIN": "200",
        "ROWMILL_BLOCKING_THREADS": "2",
        "ROWMILL_ROW_TIMEOUT": "2400",
    }


def asked(count: int, poison: dict[int, str]) -> list[dict[str, str]]:
    return [{"name": f"Item-{number:04d}", "does": poison.get(number, "well")} for number in range(count)]


def check(rows: list[ReadRow], given: list[dict[str, str]], failed: dict[int, str]) -> None:
    """Each row once, in order; those in ``failed`` failed with that code, all others were answered by all three tools."""
    assert [row.index for row in rows] == list(range(len(given)))
    found = {row.index: row.error.code for row in rows if row.mark == "failed" and row.error is not None}
    assert found == failed
    for row in rows:
        if row.mark != "failed":
            name = given[row.index]["name"]
            assert msgspec.json.decode(row.data)["done"] == f"{name.upper()} {name.lower()} paid"


def close_the_gate(ward: Ward) -> None:
    """And forget what was noted before."""
    for file in ("open", "begun", "paid"):
        ward.project.joinpath(file).unlink(missing_ok=True)


def lines(ward: Ward, file: str) -> int:
    """How often the tools' module has noted something there."""
    noted = ward.project / file
    return len(noted.read_text().splitlines()) if noted.exists() else 0


async def at_rest(ward: Ward, client: Client) -> bool:
    """Whether it is on record that no author code works of the suspect that was in hand last, if one was."""
    in_hand = re.findall(r"suspect_in_hand .*message_id=(\S+)", ward.services["row-executor"].log_file.read_text())
    if in_hand:
        name = record_name(EXECUTOR_ROWS, in_hand[-1])
        with suppress(ChannelNotFoundEntity):
            return (await client.bus.depths([name]))[name][0] == 0
    return True


async def test_tool_functions_that_never_return_fail_their_calls_and_starve_no_other(ward: Ward, client: Client) -> None:
    poison = {2: "never", 3: "stuck thread", 5: "stuck thread", 9: "stuck thread"}
    given = asked(16, poison)
    summary, rows = await ward.ended(client, await client.start(ward.play("asking"), items=given))
    check(rows, given, dict.fromkeys(poison, "timeout"))
    assert summary.counts.failed == len(poison)
    assert not ward.deaths["tool-gateway"]


@pytest.mark.long
async def test_a_payment_that_takes_its_gateway_with_it_is_sent_once(ward: Ward, client: Client) -> None:
    given = asked(12, {5: "exit while paying"})
    _, rows = await ward.ended(client, await client.start(ward.play("asking"), items=given))
    beside = {row.index for row in rows if row.error is not None and row.error.code == "outcome_unknown"}  # was on its way with it, perhaps
    check(rows, given, dict.fromkeys({5} | beside, "outcome_unknown"))
    assert ward.deaths["tool-gateway"] == {ENDED: 1}


async def test_a_row_that_waits_for_its_call_while_executor_after_executor_is_killed_completes(ward: Ward, client: Client) -> None:
    """It has done nothing but wait, and that is on record when the process dies that has it in hand."""
    close_the_gate(ward)
    job = await client.start(ward.play("asking_at_the_gate"), items=[{"name": "Patient", "does": "well"}])
    async with asyncio.timeout(BOUND):
        for death in range(SUSPECTED_AFTER + POISON_AFTER + 1):
            while lines(ward, "begun") <= death or not await at_rest(ward, client):
                await asyncio.sleep(0.02)
            ward.services["row-executor"].signal(signal.SIGKILL)
        ward.project.joinpath("open").touch()
    summary, rows = await ward.ended(client, job)
    assert (summary.state, summary.counts.completed) == ("completed", 1)
    assert msgspec.json.decode(rows[0].data)["done"] == "Patient paid"
    assert lines(ward, "paid") == 1
    assert ward.deaths["row-executor"] == {-signal.SIGKILL: SUSPECTED_AFTER + POISON_AFTER + 1}
    assert not await ward.letters()


@pytest.mark.long
async def test_rows_that_wait_for_their_calls_complete_whenever_their_executors_are_killed(ward: Ward, client: Client) -> None:
    close_the_gate(ward)
    given = [{"name": f"Patient-{number}", "does": "well"} for number in range(8)]
    job = await client.start(ward.play("asking_at_the_gate"), items=given)
    random = Random(24)
    for _ in range(KILLS):
        await ward.kill_once_it_serves("row-executor", after=random.random())
    ward.project.joinpath("open").touch()
    summary, rows = await ward.ended(client, job)
    assert (summary.state, summary.counts.completed) == ("completed", len(given))
    assert [msgspec.json.decode(row.data)["done"] for row in rows] == [f"{item['name']} paid" for item in given]
    assert lines(ward, "paid") == len(given)
    assert ward.deaths["row-executor"] == {-signal.SIGKILL: KILLS}
    assert not await ward.letters()
