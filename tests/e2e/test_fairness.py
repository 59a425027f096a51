"""A huge run starves no small one: the order in which rows are told."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage
from tests.e2e.stage import BOUND, Stage, leads

from rowmill.client import Client
from rowmill_contracts import topology
from rowmill_contracts.envelope import decode
from rowmill_contracts.events import RowsCompleted

BESIDE = 50
"""Rows of the small run."""


async def rows_before_the_small_runs_last(system: Stage, client: Client, word: str, *, rows: int) -> int:
    """Start a run of so many rows, and beside it, once its first rows are told, one of 50.

    Returns how many rows of the big one are told before the small one's last, once both are over.
    """
    told: list[str] = []
    async with await aio_pika.connect(system.broker_url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1_000)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(topology.EVENTS, "rows.completed.#")

        async def hear(message: AbstractIncomingMessage) -> None:
            event = decode(message.type, message.body)
            assert isinstance(event, RowsCompleted)
            told.extend([event.run_id] * len(event.rows))

        await queue.consume(hear, no_ack=True)
        big = await client.start(system.play(), leads=leads(rows, f"{word}-big"))
        async with asyncio.timeout(10 * BOUND):
            while not told:
                await asyncio.sleep(0.01)
            small = await client.start(system.play(), leads=leads(BESIDE, f"{word}-small"))
            await small.wait()
            await big.wait()
            while len(told) < rows + BESIDE:
                await asyncio.sleep(0.05)
    last = max(place for place, run_id in enumerate(told) if run_id == small.run_id)
    return sum(run_id == big.run_id for run_id in told[:last])


async def test_a_small_run_ends_early_in_a_big_one(system: Stage, client: Client, word: str) -> None:
    assert await rows_before_the_small_runs_last(system, client, word, rows=12_000) < 10_000


@pytest.mark.long
@pytest.mark.timeout(3_600)
async def test_a_small_run_ends_within_the_first_fiftieth_of_a_huge_one(system: Stage, client: Client, word: str) -> None:
    assert await rows_before_the_small_runs_last(system, client, word, rows=500_000) < 10_000
