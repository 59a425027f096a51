"""The documented play from Python: started, followed, read through its handle; and a provider that says when to come back."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal

import aio_pika
import pytest
from tests.e2e.stage import BOUND, Books, Stage, contact_of, leads, score_of

import rowmill
from rowmill.client import Client
from rowmill.errors import InputError
from rowmill_contracts.events import DatasetEvent, RowsCompleted, RunEvent
from rowmill_contracts.topology import ADMISSION_PARKED

ROWS = 300


async def test_a_run_is_followed_by_its_events_and_read_through_its_handle(system: Stage, client: Client, word: str) -> None:
    rows = leads(ROWS, word)
    due = Books.of(row["domain"] for row in rows)

    job = await client.start(system.play(), leads=iter(rows), min_score=60)
    async with asyncio.timeout(BOUND):
        heard = [event async for event in job.events()]
        result = await job.result()

    states = [event.state for event in heard if isinstance(event, RunEvent)]
    assert states[-1] == "completed"
    assert {event.state for event in heard if isinstance(event, DatasetEvent)} >= {"opened", "closed"}
    told = [row for event in heard if isinstance(event, RowsCompleted) for row in event.rows]
    assert {row.index for row in told} == set(range(ROWS))

    assert result.state == "completed"
    assert result.failed == []
    assert (result.counts.admitted, result.counts.completed) == (ROWS, ROWS)
    assert result.counts.calls == due.total
    assert result.cost == Decimal("0.01") * due.hunter + Decimal("0.02") * due.apollo
    assert result.output["found"] == ROWS
    handle = result.output["leads"]
    assert await handle.count() == ROWS
    assert [row["domain"] for row in await handle.peek(3)] == [row["domain"] for row in rows[:3]]
    assert (await handle.at(-1))["domain"] == rows[-1]["domain"]
    frame = await handle.to_polars(limit=100)
    assert frame.height == 100
    assert frame["contact"].to_list() == [contact_of(row["domain"]) for row in rows[:100]]
    assert frame["score"].to_list() == [score_of(row["domain"]) for row in rows[:100]]
    await system.audit(client, job, rows)


async def test_the_sync_form_works_inside_a_running_loop(system: Stage, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in system.environment.items():
        monkeypatch.setenv(name, value)
    rows = leads(30, word)

    result = rowmill.run(system.play(), leads=rows, limit=10)

    assert result.counts.completed == 10
    assert [row["contact"] for row in await result.output["leads"].peek(10)] == [contact_of(row["domain"]) for row in rows[:10]]


async def test_input_that_does_not_fit_the_play_is_refused_before_anything_starts(system: Stage, client: Client) -> None:
    before = await client.runs(play="leads")

    with pytest.raises(InputError, match="domain"):
        await client.start(system.play(), leads=[{"company": "acme"}])

    assert [run.run_id for run in await client.runs(play="leads")] == [run.run_id for run in before]


async def test_rows_wait_for_a_provider_that_says_when_to_come_back(system: Stage, client: Client, word: str) -> None:
    rows = leads(200, word)
    system.provider.control(reply_429={"path": "/match", "count": 5, "retry_after": 1})
    system.provider.control(reply_429={"path": "/score", "count": 1, "retry_after": 1})
    system.provider.control(reply_429={"path": "/v2/bulk", "count": 1, "retry_after": 1})

    connection = await aio_pika.connect(system.broker_url)
    async with connection, asyncio.timeout(BOUND):
        channel = await connection.channel()
        parked = await channel.declare_queue(exclusive=True)
        await parked.bind("rowmill", ADMISSION_PARKED)  # a copy of what tells admission that rows wait
        job = await client.start(system.play(), leads=rows)
        await job.wait()
        told = []
        while (message := await parked.get(fail=False)) is not None:  # gateways call rows back there, too
            told.append(json.loads(message.body))
    assert job.run_id in {each.get("run_id") for each in told}

    summary = await system.audit(client, job, rows)
    assert (summary.counts.completed, summary.counts.failed) == (200, 0)
    stats = system.provider.stats()
    assert stats["replies"]["429"] == 7
    assert Books.told(stats) == Books.of(row["domain"] for row in rows), "what was refused is asked once more, what was answered never"
    assert stats["repeated_subjects"] == 0
