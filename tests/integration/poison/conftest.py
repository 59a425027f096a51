"""A whole system whose executors and gateways die of what they are given and are started again at once."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import aio_pika
import pytest

from rowmill import registry
from rowmill.client import Client, Job
from rowmill.client.reading import SheetReader
from rowmill.dev import ServerSet
from rowmill.dev.services import ServiceSet
from rowmill.dev.working_set import missing_services
from rowmill.doctor.health import look
from rowmill.plays import Play
from rowmill.project import Project
from rowmill.runtime.bus import Bus
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.rows import ReadRow
from rowmill_contracts.run_questions import RunSummary
from rowmill_contracts.topology import DELAYS, EXECUTOR_ROWS, WORK_QUEUES, dead, delay_queue, suspect

SCALE = 0.05
BOUND = 120.0
"""Seconds within which anything that is waited for must have happened; far over what it takes."""

PAGE_ROWS = 4


MORTALS = ("row-executor", "tool-gateway")


class Ward:
    """The services, of which executors and gateways are started again as soon as they have died; `deaths` counts by service and exit status.

    ``settings``: of the services, beside and above those that every ward has.
    """

    def __init__(self, folder: Path, servers: ServerSet, broker_url: str, database_url: str, **settings: str) -> None:
        self.project = folder / "project"
        shutil.copytree(Path(__file__).parent / "project", self.project)
        self.broker_url = broker_url
        self.database_url = database_url
        self._control = getattr(servers.broker, "control", None)
        environment = {
            "ROWMILL_BROKER_URL": broker_url,
            "ROWMILL_DATABASE_URL": database_url,
            "ROWMILL_PROJECT": str(self.project),
            "ROWMILL_TIME_SCALE": str(SCALE),
            "ROWMILL_PAGE_ROWS": str(PAGE_ROWS),
            "ROWMILL_MEMORY_LIMIT_MB": "1500",
            "ROWMILL_LOOP_BLOCK_LIMIT": "2",
            "ROWMILL_ROW_TIMEOUT": "60",
            **settings,
        }
        self.services = ServiceSet(environment, folder / "logs")
        self.deaths: dict[str, Counter[int]] = {name: Counter() for name in MORTALS}
        self.killed = 0
        """Gateways that `kill_gateways` killed."""
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper")

    async def start(self) -> None:
        self.services.start(keep_alive=False)
        async with asyncio.timeout(BOUND):
            while await missing_services(self.broker_url):
                await asyncio.sleep(0.1)
        self._keeper.start()

    def stop(self) -> None:
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.services.stop()

    def _keep(self) -> None:
        while not self._over.wait(0.02):
            for name in MORTALS:
                status = self.services[name].exit_status
                if status is not None:
                    self.deaths[name][status] += 1
                    self.services[name].start()

    async def kill_executors(self, *, every: float, times: int) -> None:
        """Kill the executor this often; what it had just begun is begun again by the next one."""
        for _ in range(times):
            await asyncio.sleep(every)
            self.services["row-executor"].signal(signal.SIGKILL)

    async def kill_gateways(self, *, times: int, after: float, random: Random) -> None:
        """Kill the gateway so often, each time between ``after`` and ``after`` + 4 seconds from its beginning to consume."""
        for _ in range(times):
            await self.kill_once_it_serves("tool-gateway", after=after + 4 * random.random())
            self.killed += 1

    async def kill_once_it_serves(self, name: str, *, after: float) -> None:
        """Kill that service so many seconds after it began to consume."""
        while await missing_services(self.broker_url):
            await asyncio.sleep(0.1)
        await asyncio.sleep(after)
        self.services[name].signal(signal.SIGKILL)
        await asyncio.sleep(0.5)  # until the broker has noticed

    # ---- runs -------------------------------------------------------------------------------------------------------------------------

    def play(self, name: str) -> Play[Any, Any]:
        Project.find(self.project).load()
        return registry.play_named(name)

    async def ended(self, client: Client, job: Job) -> tuple[RunSummary, list[ReadRow]]:
        """The run when it has ended, and its rows; afterwards nothing may be left in any queue."""
        try:
            async with asyncio.timeout(BOUND):
                summary = await job.wait()
        except TimeoutError:
            words = "\n".join(f"{process.name}: {process.last_words(30)}" for process in self.services.processes)
            raise AssertionError(f"the run is stuck: {await job.status()}, deaths {self.deaths}, left {await self.left()}\n{words}") from None
        rows = [row async for row in SheetReader(client.bus).rows(job.run_id, "items")]
        async with asyncio.timeout(BOUND):
            while await self.left():
                await asyncio.sleep(0.1)
        return summary, rows

    async def left(self) -> dict[str, int]:
        """Messages that wait in work, suspect and delay queues."""
        names = [name for queue in WORK_QUEUES for name in (queue.name, suspect(queue.name))]
        names += [delay_queue(name, max(1, int(ttl * SCALE))).name for name, ttl in DELAYS.items()]
        async with Bus(ServiceSettings(broker_url=self.broker_url, time_scale=SCALE), service="look") as bus:
            return {name: ready for name, (ready, _) in (await bus.depths(names)).items() if ready}

    async def nobody_holds_any(self) -> None:
        """Return when no message is unacknowledged, nor any left, as far as the broker is ours to ask."""
        if self._control is not None:
            async with asyncio.timeout(BOUND):
                while (await look(self.broker_url, self.database_url, self._control)).queued:
                    await asyncio.sleep(0.2)

    async def letters(self, of: str = EXECUTOR_ROWS) -> list[aio_pika.abc.AbstractIncomingMessage]:
        """The dead letters of a work queue, taken."""
        found = []
        async with await aio_pika.connect(self.broker_url) as connection:
            queue = await (await connection.channel()).get_queue(dead(of), ensure=False)
            while (message := await queue.get(fail=False)) is not None:
                await message.ack()
                found.append(message)
        return found


@pytest.fixture(scope="module")
def ward_settings() -> dict[str, str]:
    """What a module's ward has beside the usual settings."""
    return {}


@pytest.fixture(scope="module")
def _ward(
    servers: ServerSet, broker_url: str, database_url: str, ward_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ward]:
    ward = Ward(tmp_path_factory.mktemp("ward"), servers, broker_url, database_url, **ward_settings)
    try:
        asyncio.run(ward.start())
        yield ward
    finally:
        ward.stop()


@pytest.fixture
def ward(_ward: Ward) -> Iterator[Ward]:
    for deaths in _ward.deaths.values():
        deaths.clear()
    with registry.isolated():
        yield _ward
    for module in ("poison_plays", "poison_bodies", "poison_tools"):
        sys.modules.pop(module, None)
    while str(_ward.project) in sys.path:
        sys.path.remove(str(_ward.project))


@pytest.fixture
async def client(ward: Ward) -> AsyncIterator[Client]:
    async with Client(ward.broker_url) as connected:
        yield connected
