"""What a service has stored and not said, or said and not noted, when it dies right there: it is said after all, and nothing happens twice.

What else may be lost, a message that was confirmed, is missed by the next look at what is stored. The look comes after 30 s, here 1.5 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aio_pika
import asyncpg
import pytest
from aio_pika.abc import AbstractIncomingMessage
from tests.e2e.gaps.gap import DyingProcess, Gap
from tests.e2e.stage import BOUND, Books, ProviderProcess, Stage, leads, make_project

from rowmill.client import Client
from rowmill.dev import ServerSet
from rowmill.dev.services import STOP_TIMEOUT, ServiceProcess
from rowmill_contracts.envelope import decode
from rowmill_contracts.events import RowsCompleted
from rowmill_contracts.topology import ADMISSION_COUNTS, EVENTS

ROWS = 600
PARKED = 20
"""Requests that the provider refuses at first, so that their rows are parked."""

OWED = "what is owed is stored with what calls for it, and sent at the next start"
AGAIN = "the broker delivers again what was not acknowledged"
ASKED = "who asked asks again"
LOOKED = "the look at what is stored"

GAPS = [
    Gap("admission", "AdvanceRun", "before", OWED),
    Gap("admission", "AdvanceRun", "after", OWED),
    Gap("admission", "AdvanceRun", "before", OWED, number=2),
    Gap("admission", "AdvanceRun", "lost", LOOKED),
    Gap("admission", "RowTasks", "before", "the next feeder publishes what is on record at the sheet-writer", number=2),
    Gap("admission", "RowTasks", "after", "the next feeder publishes it again", number=2),
    Gap("admission", "RowTasks", "lost", LOOKED, number=2),
    Gap("admission", "RowTasks", "before", LOOKED, returning=True),
    Gap("admission", "RowTasks", "after", LOOKED, returning=True),
    Gap("admission", "RunEvent", "before", OWED, key="run.completed"),
    Gap("admission", "RunEvent", "after", OWED, key="run.completed"),
    Gap("row-executor", "OpenDataset", "before", AGAIN),
    Gap("row-executor", "OpenDataset", "after", AGAIN),
    Gap("row-executor", "ToolCalls", "before", AGAIN, number=3),
    Gap("row-executor", "ToolCalls", "after", AGAIN, number=3),
    Gap("row-executor", "RowsSettled", "before", AGAIN, number=2),
    Gap("row-executor", "RowsSettled", "after", AGAIN, number=2),
    Gap("row-executor", "RowsSettled", "lost", LOOKED, number=2),
    Gap("row-executor", "RowsParked", "before", AGAIN),
    Gap("row-executor", "RowsParked", "after", AGAIN),
    Gap("row-executor", "RowsParked", "lost", LOOKED),
    Gap("row-executor", "TakeRun", "after", AGAIN),
    Gap("row-executor", "ReleaseRun", "before", AGAIN),
    Gap("row-executor", "ReleaseRun", "after", AGAIN),
    Gap("row-executor", "ReleaseRun", "after", AGAIN, number=2),
    Gap("tool-gateway", "ClaimReceipts", "after", "the shard's next term ends the leases", number=3),
    Gap("tool-gateway", "Complete", "before", "the shard's next term ends the leases", number=3),
    Gap("tool-gateway", "Complete", "after", AGAIN, number=3),
    Gap("tool-gateway", "ToolResults", "before", AGAIN, number=3),
    Gap("tool-gateway", "ToolResults", "after", AGAIN, number=3),
    Gap("tool-gateway", "ToolResults", "lost", ASKED, number=3),
    Gap("receipt-store", "ReceiptsClaimed", "before", ASKED, number=3),
    Gap("receipt-store", "Completed", "before", ASKED, number=3),
    Gap("receipt-store", "Completed", "lost", ASKED, number=3),
    Gap("receipt-store", "ShardsLeased", "before", ASKED),
    Gap("sheet-writer", "RowsLooked", "before", ASKED, number=2),
    Gap("sheet-writer", "RowsCommitted", "before", AGAIN, number=2, key=ADMISSION_COUNTS),
    Gap("sheet-writer", "RowsCommitted", "after", AGAIN, number=2, key=ADMISSION_COUNTS),
    Gap("sheet-writer", "RowsCommitted", "lost", LOOKED, number=2, lost=1_000_000, key=ADMISSION_COUNTS),
    Gap("sheet-writer", "RowsCompleted", "before", AGAIN, number=2),
    Gap("sheet-writer", "RowsCompleted", "after", AGAIN, number=2),
]


def among(*names: str) -> list[Gap]:
    by_name = {gap.name: gap for gap in GAPS}
    return [by_name[name] for name in names]


STORED_NOT_SAID = among(
    "admission before RowTasks 2",
    "row-executor before RowsSettled 2",
    "tool-gateway before ToolResults 3",
    "receipt-store before Completed 3",
    "sheet-writer before RowsCommitted 2",
)
CONFIRMED_AND_LOST = among("admission lost AdvanceRun", "row-executor lost RowsSettled 2", "sheet-writer lost RowsCommitted 2")


@pytest.fixture(scope="module")
def _stage(
    servers: ServerSet, broker_url: str, database_url: str, _provider: ProviderProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    stage = Stage(make_project(tmp_path_factory.mktemp("leads")), servers, broker_url, database_url, _provider)
    yield stage
    stage.services.stop()


def arm(system: Stage, gaps: list[Gap]) -> list[DyingProcess]:
    """Put services in place that have these gaps, and start what does not run.

    Admission publishes a page again of which nobody has heard for 15 minutes: no test can wait for that, not at a twentieth either, so where
    something gets lost it is 30 s. Where a service dies its page must not need that look.
    """
    patience = "30" if any(gap.when == "lost" for gap in gaps) else "900"
    environment = {**os.environ, **system.environment, "ROWMILL_PAGE_AGAIN_AFTER": patience}
    armed = [DyingProcess(gap, environment, system.services[gap.service].log_file) for gap in gaps]
    fresh: list[ServiceProcess] = list(armed)
    if all(gap.service != "admission" for gap in gaps):
        fresh.append(ServiceProcess("admission", environment, system.services["admission"].log_file))
    processes = system.services.processes
    for process in fresh:
        place = next(number for number, former in enumerate(processes) if former.name == process.name)
        processes[place].signal(signal.SIGTERM)
        processes[place].wait(STOP_TIMEOUT)
        processes[place] = process
    for process in processes:
        if process.pid is None:
            process.start()
    return armed


async def died(system: Stage, dying: DyingProcess) -> int:
    """Wait for its death, and start it again. Returns the items that only it knew to be asked for: those of requests whose outcome is not stored."""
    async with asyncio.timeout(BOUND):
        while dying.exit_status is None:
            await asyncio.sleep(0.01)
    assert dying.exit_status == -signal.SIGKILL, dying.last_words(40)
    connection = await asyncpg.connect(system.database_url)
    try:
        under_way: int = await connection.fetchval("SELECT count(*) FROM receipts.receipts WHERE state = 'running'")
    finally:
        await connection.close()
    dying.start()
    return under_way if dying.name == "tool-gateway" else 0


@asynccontextmanager
async def told(system: Stage) -> AsyncIterator[set[str]]:
    """The keys of the rows of which events say that they were completed, so far."""
    keys: set[str] = set()
    async with await aio_pika.connect(system.broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(EVENTS, "rows.completed.#")

        async def hear(message: AbstractIncomingMessage) -> None:
            event = decode(message.type, message.body)
            assert isinstance(event, RowsCompleted)
            keys.update(row.key for row in event.rows)

        await queue.consume(hear, no_ack=True)
        yield keys


async def survives(system: Stage, client: Client, word: str, gaps: list[Gap]) -> None:
    """A run with services that have these gaps ends as if they had none."""
    system.provider.control(latency_ms=5, reply_429={"path": "/match", "count": PARKED})
    armed = arm(system, gaps)
    await system.consuming()
    given = leads(ROWS, word)
    due = Books.of(row["domain"] for row in given)
    async with told(system) as keys:
        job = await client.start(system.play(), leads=given)
        under_way = sum(await asyncio.gather(*(died(system, process) for process, gap in zip(armed, gaps, strict=True) if gap.deadly)))
        try:
            async with asyncio.timeout(BOUND):
                await job.wait()
        except TimeoutError:
            words = "\n\n".join(f"{process.name}:\n{process.last_words(30)}" for process in system.services.processes)
            raise AssertionError(f"the run is stuck: {await job.status()}\n{words}") from None
        summary = await system.audit(client, job, given)
        assert summary.counts.completed == ROWS
        async with asyncio.timeout(BOUND):
            while len(keys) < ROWS:
                await asyncio.sleep(0.05)
    stats = await asyncio.to_thread(system.provider.stats)
    asked = Books.told(stats)
    assert set(stats["effects"].values()) == {1}, "an idempotent item had two effects"
    assert "crm" not in stats["repeated_by_provider"], "an idempotent item was sent under two keys"
    assert due.total <= asked.total <= due.total + under_way, f"{asked} were asked, {due} were due, {under_way} were under way"
    assert system.all_run()


async def test_a_run_survives_a_service_of_each_kind_that_dies_between_storing_and_saying(system: Stage, client: Client, word: str) -> None:
    await survives(system, client, word, STORED_NOT_SAID)


async def test_a_look_at_what_is_stored_finds_what_was_confirmed_and_lost(system: Stage, client: Client, word: str) -> None:
    await survives(system, client, word, CONFIRMED_AND_LOST)


@pytest.mark.long
@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.name.replace(" ", "-"))
async def test_a_run_survives_the_gap(system: Stage, client: Client, word: str, gap: Gap) -> None:
    await survives(system, client, word, [gap])
