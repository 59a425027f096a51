"""Pages that die in a real system and are replayed: their rows end as if they had never died, also after their run's end and a killed replay."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aio_pika.abc import AbstractIncomingMessage
from tests.e2e.stage import BOUND, SCALE, Books, ProviderProcess, Stage, hunter_email, leads, make_project

from rowmill.client import Client, Job
from rowmill.client.dead_letter_queues import letter_box
from rowmill.client.dead_letters import Filter
from rowmill.client.replaying import replayed
from rowmill.dev import ServerSet
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill.runtime.session import Session
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.counts import Counts
from rowmill_contracts.rows import RowTasks
from rowmill_contracts.runs import InputPage, InputSealed, RunStart
from rowmill_contracts.topology import EXCHANGE, EXECUTOR_ROWS, INPUTS, RUNS_START, dead

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

PAGE = 200
SLOW_PROVIDER = """
[providers.apollo]
rate = "10/s"
concurrency = 6
"""
"""So slow that rows of a page must wait longer than a gateway holds them (5 s at the test's scale)."""


@pytest.fixture(scope="module")
def provider() -> Iterator[ProviderProcess]:
    with ProviderProcess() as running:
        yield running


@pytest.fixture(scope="module")
def stage(
    servers: ServerSet, broker_url: str, database_url: str, provider: ProviderProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    project = make_project(tmp_path_factory.mktemp("leads"))
    settings = (project / "rowmill.toml").read_text()
    before, _, after = settings.partition("[providers.apollo]")
    (project / "rowmill.toml").write_text(before + SLOW_PROVIDER + "[providers.crm]" + after.partition("[providers.crm]")[2])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWMILL_PAGE_ROWS", str(PAGE))
        environment.setenv("ROWMILL_PAGE_AGAIN_AFTER", str(BOUND / SCALE))  # a page that comes again is no dead one any more: its rows complete
        stage = Stage(project, servers, broker_url, database_url, provider)
    try:
        asyncio.run(stage.start_services())
        yield stage
    finally:
        stage.services.stop()


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[Client]:
    stage.provider.control(latency_ms=0)
    stage.provider.reset()
    async with stage.connected() as connected:
        yield connected


@asynccontextmanager
async def undertaker(stage: Stage, pages: int, *, twice: bool, cut: bool) -> AsyncIterator[Callable[[], Any]]:
    """Buries so many pages of rows, as an executor does with those that it cannot handle; then it only holds on.

    A page that is delivered again, since its acknowledgement was lost, dies again. ``twice``: the first one dies in two messages of different ids;
    ``cut``: its acknowledgement is lost.
    """
    settings = ServiceSettings(broker_url=stage.broker_url, time_scale=SCALE, drain_timeout=1.0)
    buried: set[int] = set()
    enough = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        assert isinstance(delivery.message, RowTasks)
        first = delivery.message.rows[0].index
        if len(buried) == pages and first not in buried:
            enough.set()
            await asyncio.Event().wait()
        if not buried and twice:
            await bus.publish(delivery.message, dead(EXECUTOR_ROWS))
        buried.add(first)
        raise Rejected("poison")

    async with Bus(settings, service="undertaker") as bus:
        acknowledge = bus._handling_of._acknowledge

        async def lose_one(session: Session, queue: str, incoming: AbstractIncomingMessage) -> None:
            bus._handling_of._acknowledge = acknowledge  # type: ignore[method-assign]
            session.connection.abort()
            await session.ended.wait()

        if cut:
            bus._handling_of._acknowledge = lose_one  # type: ignore[method-assign]
        await bus.consume(EXECUTOR_ROWS, handle, prefetch=1)
        yield enough.wait


async def run_with_dead_pages(
    stage: Stage, client: Client, rows: list[dict[str, str]], dead_pages: int, *, twice: bool = False, cut: bool = False
) -> Job:
    """Start a run of which so many pages die (see `undertaker`); returns once it is over."""
    run_id = f"run-{rows[0]['domain']}"
    pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)]
    for number, page in enumerate(pages):
        await client.bus.publish(InputPage(input_id=run_id, page=number, rows=[msgspec.Raw(msgspec.json.encode(row)) for row in page]), INPUTS)
    await client.bus.publish(RunStart(run_id=run_id, play="leads", input_ref={"leads": run_id}), RUNS_START)
    job = await client.job(run_id)
    await until(lambda: opened(job))
    stage.kill9("row-executor")
    async with undertaker(stage, dead_pages, twice=twice, cut=cut) as enough:
        await client.bus.publish(InputSealed(input_id=run_id, pages=len(pages), rows=len(rows)), INPUTS)
        async with asyncio.timeout(BOUND):
            await enough()
    stage.restart("row-executor")
    async with asyncio.timeout(BOUND):
        summary = await job.wait()
    assert (summary.state, summary.counts.failed) == ("completed", dead_pages * PAGE)
    return job


async def opened(job: Job) -> bool:
    summary = await job.status()
    return summary is not None and bool(summary.datasets) and summary.state == "waiting"


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND):
        while not await true():
            await asyncio.sleep(0.05)


async def counts(job: Job) -> Counts:
    summary = await job.status()
    assert summary is not None
    return summary.counts


async def letters(stage: Stage) -> int:
    async with letter_box(stage.broker_url) as box:
        return len([got async for got in box.letters(Filter())])


async def test_a_replay_works_dead_rows_after_their_run_has_ended_and_corrects_its_counts(stage: Stage, client: Client) -> None:
    rows = leads(3 * PAGE, "ended")
    job = await run_with_dead_pages(stage, client, rows, dead_pages=1, twice=True)
    async with Bus(ServiceSettings(broker_url=stage.broker_url), service="look") as bus:
        assert (await bus.depths([dead(EXECUTOR_ROWS)]))[dead(EXECUTOR_ROWS)][0] == 2
    assert await letters(stage) == 1
    done = await asyncio.to_thread(stage.rowmill, "dlq", "replay", "--run", job.run_id)
    assert "1 of 1 dead letters replayed" in done.stdout, done.stderr

    async def corrected() -> bool:
        return (await counts(job)).failed == 0

    await until(corrected)
    summary = await stage.audit(client, job, rows)
    assert (summary.state, summary.counts.completed) == ("completed", len(rows))
    assert Books.told(stage.provider.stats()) == Books.of(row["domain"] for row in rows)


async def test_a_replay_killed_half_way_loses_and_doubles_nothing(stage: Stage, client: Client) -> None:
    rows = [row for row in leads(12 * PAGE, "killed") if hunter_email(row["domain"])][: 6 * PAGE]  # none waits for the slow provider
    job = await run_with_dead_pages(stage, client, rows, dead_pages=4, cut=True)

    async with letter_box(stage.broker_url) as box:  # ended right between the broker's confirm and its acknowledgement
        async for got in box.letters(Filter(run_id=job.run_id)):
            exchange = await box._channel.get_exchange(EXCHANGE, ensure=False)
            await exchange.publish(replayed(got.message, "half-way"), EXECUTOR_ROWS)
            break
    assert await letters(stage) == 4

    command = [sys.executable, "-m", "rowmill", "dlq", "replay", "--queue", EXECUTOR_ROWS, "--rate", "1/s"]
    process = await asyncio.create_subprocess_exec(*command, cwd=stage.project, env={**os.environ, **stage.environment})
    async with Bus(ServiceSettings(broker_url=stage.broker_url), service="look") as bus:

        async def half_way() -> bool:
            return (await bus.depths([dead(EXECUTOR_ROWS)]))[dead(EXECUTOR_ROWS)][0] <= 2  # one is in its hands, perhaps

        await until(half_way)
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL

        async def given_back() -> bool:
            return (await bus.depths([dead(EXECUTOR_ROWS)]))[dead(EXECUTOR_ROWS)][0] >= 2

        await until(given_back)
    left = await letters(stage)
    assert 0 < left < 4
    rest = await asyncio.to_thread(stage.rowmill, "dlq", "replay", "--json")
    assert msgspec.json.decode(rest.stdout)["replayed"] == left, rest.stderr
    assert await letters(stage) == 0

    async def corrected() -> bool:
        return (await counts(job)).failed == 0

    await until(corrected)
    summary = await stage.audit(client, job, rows)
    stats = stage.provider.stats()
    assert (summary.state, summary.counts.completed) == ("completed", len(rows))
    assert set(stats["effects"].values()) == {1}
    assert Books.told(stats) == Books.of(row["domain"] for row in rows)
