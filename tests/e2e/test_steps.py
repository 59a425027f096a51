"""Steps over the five services: what is stored is never run again, and what is cut off runs again, whoever dies.

Leases of running steps outlive every wait of these tests: a dead executor's are free because its presence has ended, and its bodies' by their term.
"""

from __future__ import annotations

import asyncio
import os
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
from rowmill.dev.services import ServiceProcess

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

    def another_executor(self) -> ServiceProcess:
        """Beside the first one."""
        process = ServiceProcess("row-executor", {**os.environ, **self.environment}, self.folder / "another.log")
        process.start()
        return process

    def kill(self, service: str) -> None:
        """End it without a word, and start it again."""
        process = self.services[service]
        process.signal(signal.SIGKILL)
        process.wait(10)
        process.start()


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
    """Nothing was done yet, and every gate is shut."""
    for path in (*system.folder.glob("*.done"), *system.folder.glob("*.gate")):
        path.unlink()
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

    system.kill("row-executor")
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


@pytest.mark.long
async def test_a_frozen_executor_is_taken_for_dead_and_what_it_says_later_changes_nothing(
    system: StepsSystem, client: Client, database_url: str
) -> None:
    job = await client.start(system.play("holding"))
    async with asyncio.timeout(BOUND):
        while not system.done()["two"]:
            await asyncio.sleep(0.02)
    frozen = system.services["row-executor"]
    frozen.signal(signal.SIGSTOP)
    other = system.another_executor()
    try:
        async with asyncio.timeout(BOUND):
            while system.done()["two"] < 2:
                await asyncio.sleep(0.02)
        frozen.signal(signal.SIGCONT)
        system.open("body")
        assert await output(job) == [1, 2]
        assert system.done()["one"] == 1
    finally:
        frozen.signal(signal.SIGCONT)
        other.signal(signal.SIGTERM)
        other.wait(20)


@pytest.mark.long
async def test_steps_are_run_no_more_often_than_their_receipts_say_while_executors_and_receipt_stores_are_killed(
    system: StepsSystem, client: Client, database_url: str
) -> None:
    names = [f"many-{number}" for number in range(600)]
    job = await client.start(system.play("many"), items=[{"name": name} for name in names])
    ended = asyncio.ensure_future(output(job))
    kills = 0
    while not ended.done() and kills < 10:
        kills += 1
        before = sum(system.done().values())
        while not ended.done() and sum(system.done().values()) < before + 40:
            await asyncio.sleep(0.02)
        system.kill("row-executor" if kills % 2 else "receipt-store")
    await ended
    assert kills == 10, "killed too seldom to show anything"
    connection = await asyncpg.connect(database_url)
    dispatches: Counter[str] = Counter()
    for row in await connection.fetch("SELECT caller, tool, state, dispatch, output FROM receipts.receipts WHERE caller LIKE 'many/%'"):
        assert row["state"] == "completed"
        dispatches[row["caller"]] += row["dispatch"]
    await connection.close()
    rows = {row.key: msgspec.json.decode(row.data) async for row in SheetReader(client.bus).rows(job.run_id, "many")}
    assert sorted(row["name"] for row in rows.values()) == sorted(names)
    done = system.done()
    for key, row in rows.items():
        runs = done[f"{row['name']}-1"] + done[f"{row['name']}-2"]
        assert 2 <= runs <= dispatches[f"many/{key}"], row
        assert row["both"] == [done[f"{row['name']}-1"], done[f"{row['name']}-2"]], "another result than the last run's serves"
    repeated = sum(done[f"{name}-{step}"] - 1 for name in names for step in (1, 2))
    assert repeated <= 20 * kills // 2, "more was repeated than can have been under way"


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
