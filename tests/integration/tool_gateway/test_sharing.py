"""Gateways share the shards: who comes gets its share, who goes or dies is followed by the others, and at the providers nobody can tell."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts
from tests.integration.tool_gateway.conftest import ORG, Neighbours, loaded_project
from tests.integration.tool_gateway.test_pacing import BOUND, Clocked, clocked, exceeded  # noqa: F401 - a fixture
from tests.integration.tool_gateway.test_restart import gateway_process

from rowmill.client.lanes import ask_lanes
from rowmill.durations import Rate
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_contracts.digests import SHARDS, shard_of
from rowmill_contracts.tools import CallItem, ToolResults
from rowmill_receipt_store.app import App as ReceiptStore
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers

SCALE = 0.3
RATE = Rate(20, 4.0)
CONCURRENCY = 3
OUTSTANDING = 2
"""Calls of each lane that are asked for at a time, where lanes are at work."""

PLAYS = """
from pydantic import BaseModel
from rowmill import HttpTool, Provider

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

def lane(name: str, **limits: object) -> None:
    provider = Provider(name, base_url="{url}", **limits)

    @provider.post(f"/after/{latency}/{{name}}", effect="idempotent", id="match")
    class Match(HttpTool[FindIn, FindOut]): ...

    @provider.post(f"/held/{{name}}", effect="idempotent", id="held")
    class Held(HttpTool[FindIn, FindOut]): ...

for name in {paced}:
    lane(name, rate="{rate}", burst={burst}, concurrency={concurrency})
for name in {others}:
    lane(name, concurrency={concurrency})
"""
LATENCY_MS = 600


def lane_names() -> list[str]:
    """A provider for each shard, in the shards' order."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < SHARDS:
        found.setdefault(shard_of(ORG, f"p{number}"), f"p{number}")
        number += 1
    return [found[shard] for shard in range(SHARDS)]


NAMES = lane_names()
PACED, OTHERS = NAMES[::2], NAMES[1::2]


@pytest.fixture
def project(tmp_path: Path, clocked: Clocked) -> Iterator[Path]:  # noqa: F811 - the fixture
    limits = {"rate": f"{RATE.requests}/{RATE.window_seconds:g}s", "burst": RATE.requests, "concurrency": CONCURRENCY}
    with loaded_project(tmp_path, PLAYS.format(url=clocked.url, latency=LATENCY_MS, paced=PACED, others=OTHERS, **limits)):
        yield tmp_path


class Executor(Neighbours):
    """Keeps so many calls of each lane asked for, until told to stop; asks again for those that are deferred."""

    def __init__(self, broker_url: str) -> None:
        super().__init__(broker_url, MemoryReceipts(SystemClock().now))
        self.ended: dict[str, str] = {}
        self.items: dict[str, CallItem] = {}
        self.deferred: set[str] = set()
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
                self.deferred.add(outcome.call_id)
                self._due.append((now + outcome.wait_ms / 1000, item))
            elif outcome.call_id not in self.ended:
                self.ended[outcome.call_id] = outcome.outcome
                self._outstanding[item.tool] -= 1

    def call(self, tool: str) -> CallItem:
        """Another call of that tool."""
        self._numbers_of[tool] += 1
        lead = f"{tool}-{self._numbers_of[tool]}"
        item = self.item(tool, f"{lead}.example", row=f"leads/{lead}", asked=self.clock.now())
        self.items[item.call_id] = item
        return item

    async def send_one_each(self) -> set[str]:
        """One more call of each lane, which the provider holds; their ids."""
        items = [self.call(f"{name}.held") for name in NAMES]
        for item in items:
            await self.send([item], started_at=1.0)
        return {item.call_id for item in items}

    async def send_again(self) -> None:
        """Ask for what was deferred and is due."""
        now = asyncio.get_running_loop().time()
        again = [item for at, item in self._due if at <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for item in again:
            await self.send([item], started_at=1.0)

    async def work(self) -> None:
        """Ask until nothing more is wanted and everything has ended."""
        while self.wanted or len(self.ended) < len(self.items):
            await self.send_again()
            for name in NAMES:
                tool = f"{name}.match"
                items = [self.call(tool) for _ in range(self.wanted - self._outstanding[tool])]
                self._outstanding[tool] += len(items)
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


async def shown(executor: Executor, *shares: int) -> None:
    """Wait until `rowmill lanes` shows that these are the shares: every lane has a shard of its own."""
    async with asyncio.timeout(BOUND):
        while True:
            answers = await ask_lanes(executor.bus, seconds=0.3)
            if sorted(sum(lane.held for lane in answer.lanes) for answer in answers) == sorted(shares):
                return


async def reckon(*shares: tuple[App, int]) -> None:
    """Wait until these gateways know how many shards are theirs. What nobody takes they have all the same, for a while at a time: so, where a dead
    one is taken for alive, the shards are held as they should be now and then.
    """
    async with asyncio.timeout(BOUND):
        for app, share in shares:
            assert app._engine is not None
            while len(app._engine.shards._sharing.shards or ()) != share:
                await asyncio.sleep(0.05)


async def answered(clocked: Clocked) -> None:  # noqa: F811
    """Let the provider answer what it holds."""
    await asyncio.to_thread(lambda: urllib.request.urlopen(f"{clocked.url}/answer", timeout=10).close())  # noqa: S310


Joining = Callable[[], Awaitable[App]]


@pytest.fixture
async def join(broker_url: str, project: Path) -> AsyncIterator[Joining]:
    """Starts gateways in this process."""
    apps: list[App] = []

    async def start() -> App:
        apps.append(App(ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)))
        await apps[-1].start()
        return apps[-1]

    yield start
    for app in apps:
        await app.stop()


@pytest.fixture
async def executor(broker_url: str) -> AsyncIterator[Executor]:
    made = Executor(broker_url)
    await made.start()
    yield made
    await made.bus.stop()


async def test_who_is_handed_a_lane_counts_what_is_still_open(
    holders: Holders,
    join: Joining,
    executor: Executor,
    clocked: Clocked,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One gateway has as much open as it may, and the provider answers nothing; then another comes, and more calls."""
    monkeypatch.setenv("ROWMILL_SHARD_DRAIN", "0.25")  # not worth waiting for
    await join()
    asking = asyncio.create_task(asked_again(executor))
    for _ in range(CONCURRENCY):
        await executor.send_one_each()
    await clocked.seen(SHARDS * CONCURRENCY)
    assert list((await holders.now()).values()) == [SHARDS]

    await join()
    await executor.send_one_each()
    await holders.are(8, 8)
    async with asyncio.timeout(BOUND):
        last = await executor.send_one_each()
        while not last <= executor.deferred and await clocked.count() == SHARDS * CONCURRENCY:
            await asyncio.sleep(0.05)
    assert await clocked.count() == SHARDS * CONCURRENCY, "whoever has the lanes by now sends nothing more"

    async with asyncio.timeout(BOUND):
        while len(executor.ended) < len(executor.items):
            await answered(clocked)
            await asyncio.sleep(0.05)
    asking.cancel()
    lanes = await read(clocked)
    assert {lane["open"] for lane in lanes.values()} == {CONCURRENCY}
    assert set(bodies(lanes).values()) == {1}, "nothing is repeated by handing over"
    assert set(executor.ended.values()) == {"completed"}


async def asked_again(executor: Executor) -> None:
    while True:
        await executor.send_again()
        await asyncio.sleep(0.02)


async def test_shards_are_shared_among_those_who_come_go_and_die(
    broker_url: str,
    project: Path,
    holders: Holders,
    join: Joining,
    executor: Executor,
    clocked: Clocked,  # noqa: F811
) -> None:
    async with gateway_process(ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE), SCALE) as mortal:
        first = await join()
        working = asyncio.create_task(executor.work())
        await holders.are(8, 8)
        second = await join()
        await holders.are(5, 5, 6)
        await shown(executor, 5, 5, 6)
        assert set(bodies(await read(clocked)).values()) == {1}, "nothing is repeated by handing over"
        mortal.kill()
        await mortal.wait()
        left = await holders.are(8, 8)
        await reckon((first, 8), (second, 8))
        await first.stop()
        assert set((await holders.are(16)).items()) <= {(name, 16) for name in left}
        await reckon((second, 16))
    executor.wanted = 0
    async with asyncio.timeout(BOUND):
        await working
    lanes = await read(clocked)
    assert {name: over for name in PACED if (over := exceeded(lanes[name]["arrivals"], RATE))} == {}
    assert {name: lanes[name]["open"] for name in NAMES if lanes[name]["open"] > CONCURRENCY} == {}
    assert set(executor.ended.values()) == {"completed"}
    asked = bodies(lanes)
    assert len(asked) == len(executor.items), "each effect once"
    assert sum(asked.values()) - len(asked) <= SHARDS * OUTSTANDING, "only what was under way at the death is repeated"
