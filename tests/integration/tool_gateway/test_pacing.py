"""A rate over two gateways of which one is killed, frozen and resumed: never exceeded in any window, by the provider's own clock."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.fakes.receipts import MemoryReceipts
from tests.integration.tool_gateway.conftest import Neighbours, loaded_project
from tests.integration.tool_gateway.test_restart import gateway_process

from rowmill.durations import Rate
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.tools import CallItem, ToolResults
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers

SCALE = 0.3
TOLERANCE = 0.05
"""Seconds between two requests on their ways to the provider that may differ."""
BOUND = 120.0
HEARTBEAT = 1
"""Seconds; a frozen consumer is noticed after about three of them."""

PLAYS = """
from pydantic import BaseModel
from rowmill import HttpTool, Provider

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

apollo = Provider("apollo", base_url="{url}", rate="{rate}", burst={burst}, concurrency=20)

@apollo.post("/match", effect="read")
class Match(HttpTool[FindIn, FindOut]): ...

@apollo.post("/slow", effect="read", rate="{own}", id="slow")
class Slow(HttpTool[FindIn, FindOut]): ...
"""


class Clocked:
    """The provider, and what it noted."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def arrivals(self) -> list[tuple[float, float]]:
        def read() -> list[tuple[float, float]]:
            with urllib.request.urlopen(f"{self.url}/arrivals", timeout=10) as answer:  # noqa: S310 - our own loopback address
                return [(at, late) for at, late in json.loads(answer.read())]

        return await asyncio.to_thread(read)

    async def count(self) -> int:
        def read() -> int:
            with urllib.request.urlopen(f"{self.url}/count", timeout=10) as answer:  # noqa: S310 - our own loopback address
                return int(answer.read())

        return await asyncio.to_thread(read)

    async def seen(self, count: int) -> None:
        async with asyncio.timeout(BOUND):
            while await self.count() < count:
                await asyncio.sleep(0.05)


@pytest.fixture
async def clocked() -> AsyncIterator[Clocked]:
    command = [sys.executable, str(Path(__file__).with_name("clocked_provider.py")), "5"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    yield Clocked((await process.stdout.readline()).decode().split()[1])
    process.terminate()
    await process.wait()


@dataclass(frozen=True)
class Declared:
    """``rate`` and ``burst`` of the provider, ``own`` rate of a tool of its."""

    rate: Rate
    burst: int = 1
    own: Rate = field(default_factory=lambda: Rate(1000, 1.0))


@pytest.fixture
def project(tmp_path: Path, clocked: Clocked, request: pytest.FixtureRequest) -> Iterator[Path]:
    declared: Declared = request.param
    rate, own = (f"{one.requests}/{one.window_seconds:g}s" for one in (declared.rate, declared.own))
    with loaded_project(tmp_path, PLAYS.format(url=clocked.url, rate=rate, own=own, burst=declared.burst)):
        yield tmp_path


class Executor:
    """Sends calls, and again those that were deferred when it was told to; knows how each ended."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.ended: dict[str, str] = {}
        self.replays: Counter[str] = Counter()
        self._neighbours = neighbours
        self._items: dict[str, CallItem] = {}
        self._due: list[tuple[float, CallItem]] = []
        neighbours.bus.on_reply(ToolResults, self._collect)

    async def send(self, items: list[CallItem]) -> None:
        self._items |= {item.call_id: item for item in items}
        for start in range(0, len(items), 100):
            await self._neighbours.send(items[start : start + 100], started_at=1.0)

    def _collect(self, message: ToolResults) -> None:
        now = asyncio.get_running_loop().time()
        for outcome in message.results:
            if outcome.outcome == "deferred":
                self.replays[outcome.call_id] += 1
                self._due.append((now + outcome.wait_ms / 1000, self._items[outcome.call_id]))
            else:
                self.ended[outcome.call_id] = outcome.outcome

    async def all_ended(self) -> None:
        async with asyncio.timeout(BOUND):
            while len(self.ended) < len(self._items):
                now = asyncio.get_running_loop().time()
                again = [item for at, item in self._due if at <= now]
                self._due = [entry for entry in self._due if entry[0] > now]
                if again:
                    await self.send(again)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def neighbours(broker_url: str, scale: float) -> AsyncIterator[Neighbours]:
    made = Neighbours(broker_url, MemoryReceipts(SystemClock().now, queued=10 * scale, running=60 * scale, shard=6 * scale))
    await made.start()
    yield made
    await made.bus.stop()


@pytest.fixture
async def paced(broker_url: str, project: Path) -> AsyncIterator[Neighbours]:
    async with neighbours(broker_url, SCALE) as made:
        yield made


@pytest.fixture
async def paced_at_full_size(broker_url: str, project: Path) -> AsyncIterator[Neighbours]:
    async with neighbours(broker_url, 1.0) as made:
        yield made


def exceeded(arrivals: list[tuple[float, float]], rate: Rate) -> list[str]:
    """Windows in which more arrived than allowed. A request that the provider noted late may have come as much earlier."""
    return [
        f"{rate.requests + 1} requests within {beyond - first:.3f} s, {first - arrivals[0][0]:.3f} s after the first (noted {late:.3f} s late)"
        for (first, late), (beyond, _) in zip(arrivals, arrivals[rate.requests :], strict=False)
        if beyond - first + late < rate.window_seconds - TOLERANCE
    ]


def calls(neighbours: Neighbours, tool: str, count: int) -> list[CallItem]:
    now = neighbours.clock.now()
    return [neighbours.item(tool, f"d{number}.example", row=f"leads/{number}", asked=now) for number in range(count)]


LONG_WINDOW = Rate(120, 5.0)
"""Longer than a scaled lease, and with a burst: a successor that did not know what was sent before it would send too much at once."""


@dataclass(frozen=True)
class Course:
    """So many ``calls``; the holder of the lane is killed after ``killed`` requests and its successor frozen after ``frozen``, until the third
    gateway has sent ``beside`` instead of it.
    """

    rate: Rate
    calls: int
    killed: int
    frozen: int
    beside: int


FAST = Rate(200, 1.0)


@pytest.mark.parametrize(
    ("project", "course"),
    [
        pytest.param(Declared(LONG_WINDOW, burst=100), Course(LONG_WINDOW, calls=300, killed=60, frozen=140, beside=60), id="burst"),
        pytest.param(Declared(FAST), Course(FAST, calls=2_400, killed=300, frozen=700, beside=700), id="200-a-second", marks=pytest.mark.long),
    ],
    indirect=["project"],
)
async def test_a_rate_is_never_exceeded_while_gateways_are_killed_and_frozen(
    broker_url: str, project: Path, clocked: Clocked, paced: Neighbours, monkeypatch: pytest.MonkeyPatch, course: Course
) -> None:
    monkeypatch.setenv("ROWMILL_HEARTBEAT_SECONDS", str(HEARTBEAT))
    settings = ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)
    executor = Executor(paced)
    matches = calls(paced, "apollo.match", course.calls)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway_process(settings, SCALE))
        await executor.send(matches[:1])
        await clocked.seen(1)
        second = await stack.enter_async_context(gateway_process(settings, SCALE))
        await executor.send(matches[1:])
        ending = asyncio.create_task(executor.all_ended())
        stack.callback(ending.cancel)
        await clocked.seen(course.killed)  # in the middle of a burst, where there is one
        first.kill()
        await first.wait()
        await clocked.seen(course.frozen)  # the second has the lane, and the next window has begun
        await stack.enter_async_context(gateway_process(settings, SCALE))
        os.kill(second.pid, signal.SIGSTOP)
        await clocked.seen(await clocked.count() + course.beside)  # the third has the lane by then
        os.kill(second.pid, signal.SIGCONT)
        await ending
    arrivals = await clocked.arrivals()
    assert exceeded(arrivals, course.rate) == []
    assert Counter(executor.ended.values()) == {"completed": len(matches)}
    assert len(matches) <= len(arrivals) <= len(matches) + 2 * 20, "only what was under way when a gateway died or froze goes again"


OWN = Rate(25, 1.0)


@pytest.mark.parametrize("project", [Declared(Rate(100, 1.0), own=OWN)], indirect=True)
async def test_a_tools_own_rate_is_a_window_inside_its_providers(broker_url: str, project: Path, clocked: Clocked, paced: Neighbours) -> None:
    settings = ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)
    executor = Executor(paced)
    async with gateway_process(settings, SCALE):
        await executor.send(calls(paced, "apollo.slow", 2 * OWN.requests))
        await executor.all_ended()
    arrivals = await clocked.arrivals()
    assert len(arrivals) == 2 * OWN.requests
    assert exceeded(arrivals, OWN) == []


@pytest.mark.long
@pytest.mark.parametrize("project", [Declared(FAST)], indirect=True)
async def test_a_rate_is_used_to_the_full_while_there_is_work(
    broker_url: str, project: Path, clocked: Clocked, paced_at_full_size: Neighbours
) -> None:
    """At least 98 of 100 of what is allowed, over ten seconds in which a second gateway comes to share the lanes, and in half of all tries has the
    lane handed over to it; wants a machine that is not full.
    """
    settings = ToolGatewaySettings(broker_url=broker_url, project=project)
    executor = Executor(paced_at_full_size)
    async with gateway_process(settings, 1.0), gateway_process(settings, 1.0):
        await executor.send(calls(paced_at_full_size, "apollo.match", 12 * FAST.requests))
        await executor.all_ended()
    arrivals = await clocked.arrivals()
    assert exceeded(arrivals, FAST) == []
    started = arrivals[0][0] + 1.0
    assert sum(started <= at < started + 10.0 for at, _ in arrivals) >= 0.98 * 10 * FAST.requests
    assert max(executor.replays.values()) <= 3, "appointments come round"
