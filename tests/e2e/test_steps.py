"""Steps over the five services: what is stored is never run again, and what is cut off runs again, whoever dies.

Leases of running steps outlive every wait of these tests: a dead executor's are free because its presence has ended, and its bodies' by their term.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.e2e.stage import BOUND, SCALE
from tests.e2e.waiting.system import WaitingSystem

from rowmill.client import Client, Job
from rowmill.client.reading import SheetReader

ROWS = 20


class StepsSystem(WaitingSystem):
    """Steps write what they do into ``folder``."""

    source = Path(__file__).parent / "steps" / "project"
    module = "step_plays"
    folder: Path

    def done(self) -> Counter[str]:
        """How often each step's function was run."""
        return Counter({path.stem: path.read_text().count("\n") for path in self.folder.glob("*.done")})

    def open(self, gate: str) -> None:
        (self.folder / f"{gate}.gate").touch()

    def kill_executor(self) -> None:
        process = self.services["row-executor"]
        process.signal(signal.SIGKILL)
        process.wait(10)


@pytest.fixture(scope="module")
def system(broker_url: str, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepsSystem]:
    folder = tmp_path_factory.mktemp("steps")
    settings = {"STEPS_FOLDER": str(folder), "ROWMILL_RUNNING_LEASE": str(10 * BOUND / SCALE)}
    running = StepsSystem(tmp_path_factory.mktemp("system"), broker_url, database_url, settings)
    running.folder = folder
    asyncio.run(running.__aenter__())
    yield running
    asyncio.run(running.__aexit__(None, None, None))


@pytest.fixture
async def client(system: StepsSystem, broker_url: str) -> AsyncIterator[Client]:
    async with Client(broker_url) as connected:
        yield connected


async def stored(database_url: str) -> dict[str, int]:
    """Receipts of steps by step and state, such as ``step:make completed``."""
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT tool || ' ' || state AS what, count(*) AS receipts FROM receipts.receipts GROUP BY 1")
        return {row["what"]: row["receipts"] for row in rows}
    finally:
        await connection.close()


async def output(job: Job) -> Any:
    async with asyncio.timeout(BOUND):
        summary = await job.wait()
    assert summary.state == "completed", summary.error
    return msgspec.json.decode(summary.output)


async def test_a_killed_executor_repeats_what_it_was_in_the_middle_of_and_nothing_else(
    system: StepsSystem, client: Client, database_url: str
) -> None:
    items = [{"name": str(number), "stands": "between" if number % 2 else "within"} for number in range(ROWS)]
    making = await client.start(system.play("making"), items=items)
    holding = await client.start(system.play("holding"))
    expected = {"step:salt completed": 1, "step:one completed": 1, "step:make completed": ROWS, "step:make running": ROWS // 2, "step:two running": 1}
    async with asyncio.timeout(BOUND):
        while await stored(database_url) != expected or len(before := system.done()) < 3 + ROWS + ROWS // 2:
            await asyncio.sleep(0.02)
    assert set(before.values()) == {1}

    system.kill_executor()
    system.services["row-executor"].start()
    within = {f"second-{number}" for number in range(0, ROWS, 2)} | {"two"}
    async with asyncio.timeout(BOUND):
        while (now := system.done()) != before + Counter(within):
            assert now <= before + Counter(within), f"run again although it is stored: {now - before - Counter(within)}"
            await asyncio.sleep(0.02)
    for gate in ("rows", "body"):
        system.open(gate)

    assert (await output(making))["salt"] == 1
    assert await output(holding) == [1, 2]
    rows = [msgspec.json.decode(row.data)["made"] async for row in SheetReader(client.bus).rows(making.run_id, "items")]
    assert rows == [[1, 1] if number % 2 else [1, 2] for number in range(ROWS)]
    assert system.done() == before + Counter(within) + Counter(f"second-{number}" for number in range(1, ROWS, 2))


async def test_a_step_with_a_lifetime_serves_later_runs_of_its_play_alone(system: StepsSystem, client: Client) -> None:
    async def priced(of: str, play: str = "priced", **options: Any) -> Any:
        return await output(await client.start(system.play(play), of=of, **options))

    first = await priced("tea")
    assert await priced("tea") == first
    assert await priced("tea", force="tools") == first
    assert await priced("coffee") == first + 1
    assert await priced("tea", "priced-elsewhere") == first + 2
    assert await priced("tea", force="steps") == first + 3
    assert await priced("tea") == first + 3
