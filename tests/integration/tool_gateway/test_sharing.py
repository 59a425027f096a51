"""Gateways share the shards: who comes gets its share, who goes or dies is followed by the others, and at the providers nobody can tell."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts
from tests.integration.tool_gateway.conftest import ORG, Neighbours
from tests.integration.tool_gateway.test_pacing import BOUND, Clocked, clocked, exceeded  # noqa: F401 - a fixture
from tests.integration.tool_gateway.test_restart import gateway_process

from rowmill import registry
from rowmill.client.lanes import ask_lanes
from rowmill.durations import Rate
from rowmill.project import Project
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.digests import SHARDS, shard_of
from rowmill_contracts.tools import CallItem, ToolResults
from rowmill_receipt_store.app import App as ReceiptStore
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers

SCALE = 0.2
SLOW_MS = 900
"""Longer than a shard that is handed over waits for its open requests, at this scale."""
RATE = Rate(12, 1.0)
CONCURRENCY = 3
OUTSTANDING = 6
"""Calls of each lane that are asked for at a time: more than may be open."""

PLAYS = """
from pydantic import BaseModel
from rowmill import HttpTool, Provider

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

def lane(name: str, **limits: object) -> None:
    provider = Provider(name, base_url="{url}", **limits)

    @provider.post(f"/after/{{0 if 'rate' in limits else {slow}}}/{{name}}", effect="idempotent", id="match")
    class Match(HttpTool[FindIn, FindOut]): ...

for name in {paced}:
    lane(name, rate="{rate}", concurrency=50)
for name in {slow_ones}:
    lane(name, concurrency={concurrency})
"""


def lane_names() -> list[str]:
    """A provider for each shard, in the shards' order."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < SHARDS:
        found.setdefault(shard_of(ORG, f"p{number}"), f"p{number}")
        number += 1
    return [found[shard] for shard in range(SHARDS)]


NAMES = lane_names()
PACED, SLOW = NAMES[::2], NAMES[1::2]


@pytest.fixture
def project(tmp_path: Path, clocked: Clocked) -> Iterator[Path]:  # noqa: F811 - the fixture
    module = f"sharing_plays_{abs(hash(tmp_path)):x}"
    rate = f"{RATE.requests}/{RATE.window_seconds:g}s"
    text = PLAYS.format(url=clocked.url, rate=rate, paced=PACED, slow_ones=SLOW, slow=SLOW_MS, concurrency=CONCURRENCY)
    (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / "rowmill.toml").write_text(f'plays = ["{module}"]\n')
    with registry.isolated():
        Project.find(tmp_path).load()
        yield tmp_path
    sys.modules.pop(module, None)
    sys.path.remove(str(tmp_path))


class Executor(Neighbours):
    """Keeps so many calls of each lane asked for, until told to stop; asks again for those that are deferred."""

    def __init__(self, broker_url: str) -> None:
        super().__init__(broker_url, MemoryReceipts(SystemClock().now))
        self.ended: dict[str, str] = {}
        self.items: dict[str, CallItem] = {}
        self.wanted = OUTSTANDING
        self._outstanding: Counter[str] = Counter()
        self._due: list[tuple[float, CallItem]] = []
        self._numbers_of = Counter[str]()

    async def start(self) -> None:
        self.bus.on_reply(ToolResults, self._collected)
        await self.bus.start()

    def _collected(self, message: ToolResults) -> None:
        now = asyncio.get_running_loop().time()
        for outcome in message.results:
            item = self.items[outcome.call_id]
            if outcome.outcome == "deferred":
                self._due.append((now + outcome.wait_ms / 1000, item))
            elif outcome.call_id not in self.ended:
                self.ended[outcome.call_id] = outcome.outcome
                self._outstanding[item.tool] -= 1

    async def work(self) -> None:
        """Ask until nothing more is wanted and everything has ended."""
        while self.wanted or len(self.ended) < len(self.items):
            now = asyncio.get_running_loop().time()
            again = [item for at, item in self._due if at <= now]
            self._due = [entry for entry in self._due if entry[0] > now]
            for name in NAMES:
                tool = f"{name}.match"
                items = [item for item in again if item.tool == tool]
                while self._outstanding[tool] < self.wanted:
                    self._numbers_of[tool] += 1
                    made = self.item(
                        tool, f"{name}-{self._numbers_of[tool]}.example", row=f"leads/{name}-{self._numbers_of[tool]}", asked=self.clock.now()
                    )
                    self.items[made.call_id] = made
                    self._outstanding[tool] += 1
                    items.append(made)
                if items:
                    await self.send(items, started_at=1.0)
            await asyncio.sleep(0.02)


class Holders:
    """Who holds the shards, as the receipt-store has it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def now(self) -> dict[str, int]:
        sql = "SELECT holder, count(*) AS shards FROM shards WHERE holder IS NOT NULL AND expires_at > now() GROUP BY holder"
        return {row["holder"]: row["shards"] for row in await self._database.fetch(sql)}

    async def are(self, *shares: int) -> dict[str, int]:
        """Wait until these are the shares."""
        try:
            async with asyncio.timeout(BOUND):
                while sorted((found := await self.now()).values()) != sorted(shares):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"the shares are {await self.now()}, not {shares}") from None
        return found


@pytest.fixture
async def holders(broker_url: str, database_url: str) -> AsyncIterator[Holders]:
    store = ReceiptStore(ReceiptStoreSettings(broker_url=broker_url, database_url=database_url, time_scale=SCALE))
    await store.start()
    database = await Database.connect(database_url, schema="receipts", size=1)
    yield Holders(database)
    await database.close()
    await store.stop()


async def read(clocked: Clocked) -> dict[str, Any]:  # noqa: F811
    def ask() -> Any:
        with urllib.request.urlopen(f"{clocked.url}/lanes", timeout=10) as answer:  # noqa: S310 - our own loopback address
            return json.loads(answer.read())

    return {path.rsplit("/", 1)[1]: lane for path, lane in (await asyncio.to_thread(ask)).items()}


def bodies(lanes: dict[str, Any]) -> Counter[str]:
    return Counter(body for lane in lanes.values() for body in lane["bodies"])


def kept(lanes: dict[str, Any]) -> None:
    """No provider saw more than it allows."""
    assert {name: over for name in PACED if (over := exceeded(lanes[name]["arrivals"], RATE))} == {}
    assert {name: lanes[name]["open"] for name in SLOW if lanes[name]["open"] > CONCURRENCY} == {}


async def shown(executor: Executor, *shares: int) -> None:
    """Wait until `rowmill lanes` shows that these are the shares: every lane has a shard of its own."""
    async with asyncio.timeout(BOUND):
        while True:
            answers = await ask_lanes(executor.bus, seconds=0.3)
            if sorted(sum(lane.held for lane in answer.lanes) for answer in answers) == sorted(shares):
                return


async def test_shards_are_shared_among_those_who_come_go_and_die(
    broker_url: str,
    project: Path,
    clocked: Clocked,  # noqa: F811
    holders: Holders,
) -> None:
    settings = ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)
    executor = Executor(broker_url)
    await executor.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(executor.bus.stop)
        mortal = await stack.enter_async_context(gateway_process(settings, SCALE))

        async def join() -> Callable[[], Any]:
            app = App(settings)
            await app.start()
            return app.stop

        leave_first = await join()
        working = asyncio.create_task(executor.work())
        stack.callback(working.cancel)
        await holders.are(8, 8)
        leave_third = await join()
        await holders.are(5, 5, 6)
        lanes = await read(clocked)
        assert max(bodies(lanes).values()) == 1, "nothing is repeated by handing over"
        await shown(executor, 5, 5, 6)
        mortal.kill()
        await mortal.wait()
        left = await holders.are(8, 8)
        await leave_first()
        assert set((await holders.are(16)).items()) <= {(name, 16) for name in left}
        executor.wanted = 0
        async with asyncio.timeout(BOUND):
            await working
        await leave_third()
    lanes = await read(clocked)
    kept(lanes)
    assert set(executor.ended.values()) == {"completed"}
    asked = bodies(lanes)
    assert len(asked) == len(executor.items), "each effect once"
    assert sum(asked.values()) - len(asked) <= len(SLOW) * CONCURRENCY + len(PACED) * 2, "only what was under way at the death is repeated"
