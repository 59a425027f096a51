"""A gateway is killed with every lane at work and more claimed ahead, under a budget: that is spent by what was sent, by the provider's count."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.integration.tool_gateway.conftest import loaded_project
from tests.integration.tool_gateway.test_pacing import BOUND, Clocked, clocked  # noqa: F401 - a fixture
from tests.integration.tool_gateway.test_restart import gateway_process
from tests.integration.tool_gateway.test_sharing import NAMES, Executor, answered, bodies, read

from rowmill.runtime.db import Database
from rowmill_contracts.budgets import Limits
from rowmill_contracts.receipts import HaltRun, RunHalted
from rowmill_contracts.tools import CallItem, ToolCalls
from rowmill_contracts.topology import RECEIPTS_SETTLE
from rowmill_receipt_store.app import App as ReceiptStore
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.servers

SCALE = 0.3
CONCURRENCY = 3
EACH, MORE = 6, 4
"""Calls that are asked of each lane before the gateway dies, and after it."""
OPEN = len(NAMES) // 2 * CONCURRENCY
"""Requests of each run that are on the wire when the gateway dies: half of the lanes are one run's, the others the other's."""
AHEAD = 15
"""Calls of each run at least that are claimed by then and wait for a request to end."""
DISPATCHES, CALLS = 80, 60
COST = Decimal("0.01")

PLAYS = """
from decimal import Decimal
from pydantic import BaseModel
from rowmill import HttpTool, Provider

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

def lane(name: str) -> None:
    provider = Provider(name, base_url="{url}", concurrency={concurrency})

    @provider.post(f"/held/{{name}}", effect="idempotent", id="held", cost=Decimal("{cost}"))
    class Held(HttpTool[FindIn, FindOut]): ...

for name in {names}:
    lane(name)
"""


@pytest.fixture
def project(tmp_path: Path, clocked: Clocked) -> Iterator[Path]:  # noqa: F811 - the fixture
    with loaded_project(tmp_path, PLAYS.format(url=clocked.url, concurrency=CONCURRENCY, cost=COST, names=NAMES)):
        yield tmp_path


class OfOneRun(Executor):
    """Asks for calls of a run of its own, in lanes of its own, which no other test has asked for. ``limits``: pay for so many ``requests``."""

    def __init__(self, broker_url: str, database: Database, names: list[str], limits: Limits, requests: int) -> None:
        super().__init__(broker_url)
        self.names = names
        self.limits = limits
        self.requests = requests
        self.word = secrets.token_hex(4)
        self.run = f"run-{self.word}"
        self._database = database

    async def send(self, items: list[CallItem], **facts: Any) -> ToolCalls:
        return await super().send(items, run=self.run, **facts)

    async def start(self) -> None:
        await super().start()
        await self.bus.ask(HaltRun(run_id=self.run, action="resume", budget=self.limits, decision=1), RECEIPTS_SETTLE, RunHalted)

    async def ask_for(self, numbers: range) -> None:
        """Calls of these numbers in each lane."""
        for name in self.names:
            items = [self.item(f"{name}.held", f"{self.word}-{name}-{number}.example", asked=self.clock.now()) for number in numbers]
            self.items.update({item.call_id: item for item in items})
            await self.send(items, started_at=1.0)

    async def ask_again(self) -> None:
        while True:
            await self.send_again()
            await asyncio.sleep(0.02)

    async def leases(self) -> Counter[str]:
        """The run's receipts by their state."""
        rows = await self._database.fetch("SELECT state, count(*) FROM receipts WHERE run_id = $1 GROUP BY state", self.run)
        return Counter({row[0]: row[1] for row in rows})

    async def claimed(self) -> int:
        """Calls that are claimed, whether or not they are sent."""
        leases = await self.leases()
        return leases["queued"] + leases["running"]

    async def unsent(self) -> int:
        """Calls that have a part of the budget and are not sent."""
        [row] = await self._database.fetch("SELECT count(*) FROM charges WHERE run_id = $1 AND unsent", self.run)
        return int(row[0])

    def of_ours(self, asked: Counter[str]) -> Counter[str]:
        """Of what the provider was asked, what this run asked."""
        return Counter({body: times for body, times in asked.items() if self.word in body})

    async def check(self, asked: Counter[str], on_the_wire: Counter[str]) -> None:
        """The run was charged for what the provider was asked, and used its budget."""
        repeated = asked - Counter(set(asked))
        assert repeated <= on_the_wire, "only what was on the wire is asked again"
        [row] = await self._database.fetch("SELECT charged, calls, retries FROM runs WHERE run_id = $1", self.run)
        assert row["charged"] == asked.total() * COST, "nothing is paid for that was not sent"
        assert (row["calls"], row["retries"]) == ((len(asked), repeated.total()) if self.limits.calls else (0, 0))
        completed = len(asked) - (OPEN - repeated.total())
        assert Counter(self.ended.values()) == {"completed": completed, "halted": len(self.items) - completed}
        assert self.requests - OPEN <= asked.total() <= self.requests, "the budget is used, but for what was under way"


@pytest.fixture
async def runs(broker_url: str, database_url: str) -> AsyncIterator[list[OfOneRun]]:
    store = ReceiptStore(ReceiptStoreSettings(broker_url=broker_url, database_url=database_url, time_scale=SCALE))
    await store.start()
    database = await Database.connect(database_url, schema="receipts", size=1)
    by_money = OfOneRun(broker_url, database, NAMES[::2], Limits(money=DISPATCHES * COST), DISPATCHES)
    by_number = OfOneRun(broker_url, database, NAMES[1::2], Limits(calls=CALLS, retries=OPEN), CALLS + OPEN)
    for run in (by_money, by_number):
        await run.start()
    yield [by_money, by_number]
    for run in (by_money, by_number):
        await run.bus.stop()
    await database.close()
    await store.stop()


async def test_a_killed_gateway_leaves_budgets_spent_by_what_was_sent(
    broker_url: str,
    project: Path,
    runs: list[OfOneRun],
    clocked: Clocked,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The provider holds its answers, so that at the death every slot is on the wire and nothing else is."""
    for name, seconds in {"ROWMILL_HAND": "25", "ROWMILL_LOOK_AFTER": "25", "ROWMILL_CLAIM_AHEAD": "1"}.items():
        monkeypatch.setenv(name, seconds)  # what is asked stays in hand, and is claimed ahead, while the provider holds its answers
    settings = ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)
    async with gateway_process(settings, SCALE) as mortal:
        for run in runs:
            await run.ask_for(range(EACH))
        asking = [asyncio.create_task(run.ask_again()) for run in runs]
        await clocked.seen(2 * OPEN)
        async with asyncio.timeout(BOUND):
            while min([await run.claimed() for run in runs]) < OPEN + AHEAD:
                await asyncio.sleep(0.02)
        on_the_wire = bodies(await read(clocked))
        assert [(await run.leases())["running"] for run in runs] == [OPEN, OPEN], "what is claimed ahead is not confirmed"
        assert on_the_wire.total() == 2 * OPEN
        mortal.kill()
        await mortal.wait()
    next_one = App(settings)
    await next_one.start()
    try:
        for run in runs:
            await run.ask_for(range(EACH, EACH + MORE))
        async with asyncio.timeout(BOUND):
            while any(len(run.ended) < len(run.items) for run in runs):
                for run in runs:
                    if "halted" in run.ended.values():
                        assert await run.unsent() == 0, "the budget is said to be spent, and calls that it pays for are not sent"
                await answered(clocked)
                await asyncio.sleep(0.05)
    finally:
        for task in asking:
            task.cancel()
        await next_one.stop()
    asked = bodies(await read(clocked))
    for run in runs:
        await run.check(run.of_ours(asked), run.of_ours(on_the_wire))
