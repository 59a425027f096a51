"""A run in whose middle something breaks, and what must hold of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.e2e.stage import BOUND, Books, leads
from tests.integration.faults.conftest import Harmed

from rowmill.client import Client

ROWS = 600
SHARE = 0.3
"""Of what the provider is asked in all, the part after which the fault comes."""


async def asked(system: Harmed, items: float) -> None:
    """Return when the provider was asked that many items."""
    async with asyncio.timeout(BOUND):
        while Books.told(await asyncio.to_thread(system.provider.stats, brief=True)).total < items:
            await asyncio.sleep(0.01)


def logged(system: Harmed, words: str) -> int:
    """How often the broker has said so."""
    return sum(log.read_text(errors="replace").count(words) for log in (system.nodes.folder / "rabbitmq" / "log").glob("*.log"))


ALARMS = {
    "memory": ("set_vm_memory_high_watermark", "0.00001", "0.4"),
    "disk": ("set_disk_free_limit", "1000000GB", "200MB"),
}
"""What is too little of each for the broker to take messages, and what is enough."""


async def alarm(system: Harmed, of: str, seconds: float) -> None:
    """The broker takes no messages for so long: it says so itself."""
    order, too_little, enough = ALARMS[of]
    said = f"{of} resource limit alarm set"
    before = logged(system, said)
    await asyncio.to_thread(system.nodes.broker.control, order, too_little)
    try:
        async with asyncio.timeout(BOUND):
            while logged(system, said) == before:
                await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(system.nodes.broker.control, order, enough)


async def survives(
    system: Harmed, client: Client, word: str, fault: Callable[[], Awaitable[None]], *, rows: int = ROWS, within: float = BOUND
) -> None:
    """Start a run, let ``fault`` happen in its middle, and assert that nobody can tell by the outcome.

    No gateway dies of these faults, so nothing is asked of a provider twice: what was sent is waited for and stored, however long that takes.
    """
    await asyncio.to_thread(system.provider.reset)
    given = leads(rows, word)
    due = Books.of(row["domain"] for row in given)
    job = await client.start(system.play(), leads=given)
    await asked(system, SHARE * due.total)
    assert Books.told(await asyncio.to_thread(system.provider.stats, brief=True)).total < due.total, "too late to show anything"
    await fault()
    try:
        async with asyncio.timeout(within):
            await job.wait()
    except TimeoutError:
        words = "\n\n".join(f"{process.name} {process.exit_status}:\n{process.last_words()}" for process in system.services.processes)
        raise AssertionError(f"the run is stuck: {await job.status()}\n{words}") from None
    summary = await system.audit(client, job, given)
    assert summary.counts.completed == rows
    stats = await asyncio.to_thread(system.provider.stats)
    told = Books.told(stats)
    assert set(stats["effects"].values()) == {1}, "an idempotent item had two effects"
    assert "crm" not in stats["repeated_by_provider"], "an idempotent item was sent under two keys"
    assert told == due, f"{told} were asked, {due} were due"
    assert system.all_run(), "a service fell over"
