"""Bounds: queues filled to theirs drain, readers who do not read stop nobody."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

import aio_pika
import asyncpg
import msgspec
import pytest
from aio_pika.abc import AbstractChannel
from tests.e2e.stage import BOUND, SCALE, Stage, leads

from rowmill.client import Client
from rowmill.dev.services import STOP_TIMEOUT
from rowmill_contracts import topology
from rowmill_contracts.counts import Counts
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.receipts import ClaimReceipts, Renew
from rowmill_contracts.row_keys import KeyPage
from rowmill_contracts.rows import ReadCounts, RowsSettled, RowTask, RowTasks, SettledRow
from rowmill_contracts.run_questions import GetRun
from rowmill_contracts.runs import AdvanceRun, EventArrived, InputPage, ParkedRow, RowsCommitted, RowsParked
from rowmill_contracts.tools import CallItem, ToolCalls

LENGTH = 60
"""Messages of each work queue at most in these tests, by a policy; 100 000 by their own arguments."""

NOBODY = "run-of-nobody"
EMPTY = msgspec.Raw(b"{}")
KEY = "ab" * 32


def well_formed(queue: str, run_id: str, number: int) -> Message:
    """A message that belongs on the queue, of a run that need not exist."""
    task = RowTask(key=KEY, index=0, page=0)
    settled = SettledRow(key=KEY, index=0, page=0, attempt=1, status="completed")
    parked = ParkedRow(key=KEY, index=0, page=0, attempt=1, waits=1)
    org, play, dataset = "default", "leads", "other"
    messages: dict[str, Message] = {
        topology.ADMISSION_RUNS: EventArrived(event_id=f"event-{number}", name="nothing", key="nothing", payload=EMPTY),
        topology.ADMISSION_INPUTS: InputPage(input_id=f"input-of-nobody-{run_id}", page=number, rows=[EMPTY]),
        topology.ADMISSION_ASKS: GetRun(run_id=run_id),
        topology.ADMISSION_COUNTS: RowsCommitted(run_id=run_id, dataset=dataset, counts=Counts(), version=1),
        topology.ADMISSION_PARKED: RowsParked(run_id=run_id, dataset=dataset, reason="test", rows=[parked]),
        topology.EXECUTOR_ADVANCE: AdvanceRun(run_id=run_id),
        topology.EXECUTOR_KEYS: KeyPage(run_id=run_id, dataset=dataset, page=0, first_index=0, rows=[EMPTY]),
        topology.EXECUTOR_ROWS: RowTasks(run_id=run_id, number=1, org=org, play=play, dataset=dataset, started_at=1.0, code_digest="", rows=[task]),
        topology.SHEETS_ASKS: ReadCounts(run_id=run_id, dataset=dataset),
        topology.SHEETS_SETTLE: RowsSettled(run_id=run_id, number=1, org=org, play=play, dataset=dataset, rows=[settled]),
        topology.RECEIPTS_CLAIMS: ClaimReceipts(holder="nobody", claims=[]),
        topology.RECEIPTS_SETTLE: Renew(leases=[]),
    }
    if queue in messages:
        return messages[queue]
    calls = [CallItem(call_id=f"call-{number}", tool="hunter.nothing", receipt_key=KEY, input=EMPTY)]
    return ToolCalls(run_id=run_id, org="default", play="leads", started_at=1.0, calls=calls)


@asynccontextmanager
async def channel_to(system: Stage) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(system.broker_url) as connection:
        yield await connection.channel()


async def depths(channel: AbstractChannel, names: list[str]) -> dict[str, int]:
    """Messages ready in each queue, those that have any."""
    found = {name: (await channel.declare_queue(name, passive=True)).declaration_result.message_count or 0 for name in names}
    return {name: number for name, number in found.items() if number}


async def fill(channel: AbstractChannel, queue: str, run_id: str) -> int:
    """Publish by hand until the queue takes no more: a third malformed, a third of a run that there is, a third of one that there is not.

    Returns how many malformed ones it took.
    """
    malformed = 0
    exchange = await channel.get_exchange(topology.EXCHANGE, ensure=False)
    key = {topology.ADMISSION_RUNS: topology.RUNS_EVENT, topology.ADMISSION_INPUTS: topology.INPUTS}.get(queue, queue)
    for number in range(10 * LENGTH):
        message = well_formed(queue, (run_id, NOBODY)[number % 2], number)
        body, bad = encode(message), number % 3 == 0
        sent = aio_pika.Message(b"{" if bad else body, type=message.message_type, message_id=f"{queue}-{number}", reply_to="replies.of.nobody")
        try:
            await exchange.publish(sent, key)
        except aio_pika.exceptions.DeliveryError:
            return malformed
        malformed += bad
    raise AssertionError(f"{queue} has no bound")


@pytest.fixture
def bounded(system: Stage) -> Iterator[Stage]:
    """Services whose work queues hold little."""
    control = getattr(system._servers.broker, "control", None)
    if control is None:
        pytest.skip("the broker is not ours to set a policy on")
    vhost = unquote(urlsplit(system.broker_url).path.removeprefix("/"))
    policy = ("-p", vhost, "small")
    control("set_policy", *policy, r"^(admission|executor|gateway|receipts|sheets)\.[a-z]+(\.[0-9]+)?\.v1$", f'{{"max-length":{LENGTH}}}')
    yield system
    control("clear_policy", *policy)


@pytest.mark.long
async def test_full_queues_drain_and_the_run_that_waits_behind_them_completes(bounded: Stage, client: Client, word: str) -> None:
    system = bounded
    warm = await client.start(system.play(), leads=leads(10, f"{word}-before"))
    await warm.wait()
    for process in system.services.processes:
        process.signal(signal.SIGTERM)
    for process in system.services.processes:
        await asyncio.to_thread(process.wait, STOP_TIMEOUT)

    queues = [queue.name for queue in topology.WORK_QUEUES]
    async with channel_to(system) as channel:
        malformed = {queue: await fill(channel, queue, warm.run_id) for queue in queues}
        assert all(malformed.values())
        given = leads(300, word)
        starting = asyncio.create_task(client.start(system.play(), leads=given))
        for process in system.services.processes:
            process.start()
        async with asyncio.timeout(BOUND):
            job = await starting
            await job.wait()
            delays = [topology.delay_queue(name, int(ttl * SCALE)).name for name, ttl in topology.DELAYS.items()]
            names = [*queues, *(topology.suspect(queue) for queue in queues), *delays, topology.ADMISSION_DEAD]
            while await depths(channel, names) or await system._unacknowledged():
                await asyncio.sleep(0.2)
        summary = await job.status()
        assert summary is not None
        assert (summary.state, summary.counts.completed) == ("completed", len(given))
        dead = await depths(channel, [topology.dead(queue) for queue in queues])
        assert all(dead.get(topology.dead(queue), 0) >= number for queue, number in malformed.items()), (dead, malformed)
        for name in dead:
            await (await channel.get_queue(name, ensure=False)).purge()
    await system.audit(client, job, given)
    assert system.all_run()


async def test_a_reader_of_events_that_takes_none_stops_nobody(system: Stage, client: Client, word: str) -> None:
    """Its queue is full and refuses what comes, so that events are not confirmed; what is owed to it is noted, and told once it is gone."""
    async with channel_to(system) as channel:
        deaf = await channel.declare_queue(
            f"deaf.{word}", durable=True, arguments={"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}
        )
        await deaf.bind(topology.EVENTS, "#")
        given = leads(300, word)
        async with asyncio.timeout(BOUND):
            job = await client.start(system.play(), leads=given)
            await job.wait()
        assert await owed(system) > 0, "every event was confirmed: the reader was not deaf"
        await deaf.delete(if_unused=False, if_empty=False)
        async with asyncio.timeout(BOUND):
            while await owed(system):
                await asyncio.sleep(0.1)
    await system.audit(client, job, given)


async def owed(system: Stage) -> int:
    connection = await asyncpg.connect(system.database_url)
    try:
        number: int = await connection.fetchval("SELECT (SELECT count(*) FROM sheets.events_owed) + (SELECT count(*) FROM admission.owed)")
        return number
    finally:
        await connection.close()
