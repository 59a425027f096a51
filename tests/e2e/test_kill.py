"""Each service is killed in the middle of a run and started again: no row is lost, stuck or doubled, and nothing idempotent happens twice. And an
executor is told to stop.
"""

from __future__ import annotations

import asyncio
import signal

import asyncpg
import pytest
from tests.e2e.stage import BOUND, SCALE, Books, Stage, leads

from rowmill.client import Client
from rowmill.dev.services import STOP_TIMEOUT, ServiceProcess
from rowmill.runtime.hosting import SERVICES
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.topology import gateway_calls

ROWS = 2_000
SHARE = 0.4
"""Of what the provider is asked in all, the part after which the service is killed."""


async def _asked(system: Stage, items: float) -> None:
    """Return when the provider was asked that many items."""
    async with asyncio.timeout(BOUND):
        while Books.told(await asyncio.to_thread(system.provider.stats, brief=True)).total < items:
            await asyncio.sleep(0.01)


async def _calls_under_way(system: Stage) -> dict[str, int]:
    """Calls whose request was sent and whose outcome is not stored, by tool."""
    connection = await asyncpg.connect(system.database_url)
    try:
        rows = await connection.fetch("SELECT tool, count(*) AS calls FROM receipts.receipts WHERE state = 'running' GROUP BY tool")
        return {row["tool"]: row["calls"] for row in rows}
    finally:
        await connection.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_survives_the_death_of_each_service(system: Stage, client: Client, word: str, service: str) -> None:
    system.provider.control(latency_ms=12)
    rows = leads(ROWS, word)
    due = Books.of(row["domain"] for row in rows)
    job = await client.start(system.play(), leads=rows)
    await _asked(system, SHARE * due.total)

    system.kill9(service)
    under_way = await _calls_under_way(system)
    assert Books.told(system.provider.stats(brief=True)).total < due.total, "killed too late to show anything"
    system.restart(service)
    async with asyncio.timeout(BOUND):
        await job.wait()

    summary = await system.audit(client, job, rows)
    assert summary.counts.completed == ROWS
    stats = system.provider.stats()
    told = Books.told(stats)
    assert stats["max_effects_per_key"] == 1, "an idempotent item had two effects under one key"
    assert "crm" not in stats["repeated_by_provider"], "an idempotent item was sent under two keys"
    repeated_reads = told.reads - due.reads
    if service == "tool-gateway":
        assert 0 <= repeated_reads <= under_way.get("hunter.find", 0) + under_way.get("apollo.match", 0)
        assert 0 <= told.crm - due.crm <= under_way.get("crm.score", 0)
    else:
        assert told == due, f"asked again although the gateway lived: {told}, due {due}"
    assert system.all_run()


async def _told_to_stop(process: ServiceProcess) -> None:
    process.signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, STOP_TIMEOUT)
    assert process.exit_status == 0, process.last_words(40)


async def _calls_wait(client: Client) -> None:
    """Return when calls wait for a gateway."""
    async with asyncio.timeout(BOUND):
        while not any(ready for ready, _ in (await client.bus.depths([gateway_calls(shard) for shard in range(SHARDS)])).values()):
            await asyncio.sleep(0.05)


async def test_an_executor_that_is_told_to_stop_waits_for_no_call_that_nobody_answers(system: Stage, client: Client, word: str) -> None:
    """The gateways may be told as well, and before it. Its rows are worked by the next one."""
    executor, gateway = system.services["row-executor"], system.services["tool-gateway"]
    patient = {name: str(2 * STOP_TIMEOUT / SCALE) for name in ("ROWMILL_DRAIN_TIMEOUT", "ROWMILL_CALL_HOLD")}
    await _told_to_stop(gateway)
    await _told_to_stop(executor)
    executor._environment.update(patient)
    executor.start()
    rows = leads(100, word)
    try:
        job = await client.start(system.play(), leads=rows)
        await _calls_wait(client)
        await _told_to_stop(executor)
    finally:
        for name in patient:
            del executor._environment[name]
    gateway.start()
    executor.start()
    async with asyncio.timeout(BOUND):
        await job.wait()
    assert (await system.audit(client, job, rows)).counts.completed == 100
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in rows)
