"""A gateway on a real broker with the example's real provider; a second bus plays the receipt-store and the executor."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill import registry
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key
from rowmill.project import Project
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.digests import shard_of
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE, gateway_calls
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "leads"
sys.path.insert(0, str(EXAMPLE))

from provider import ProviderProcess  # noqa: E402 - found through the path above

SCALE = 0.2
ORG = "acme"
KEY = "a-key-that-nobody-may-see"


@contextmanager
def loaded_project(folder: Path, plays: str) -> Iterator[None]:
    """The project of one module of ``plays`` in that folder, loaded in this process as long as it is entered."""
    module = f"plays_{abs(hash(folder)):x}"
    (folder / f"{module}.py").write_text(plays)
    (folder / "rowmill.toml").write_text(f'plays = ["{module}"]\n')
    with registry.isolated():
        Project.find(folder).load()
        yield
    sys.modules.pop(module, None)
    sys.path.remove(str(folder))


PLAYS = """
from decimal import Decimal
from pydantic import BaseModel
from rowmill import Batch, Bearer, HttpTool, Provider, ToolCall, ToolError, secret

class FindIn(BaseModel):
    domain: str

class FindOut(BaseModel):
    email: str | None = None

hunter = Provider("hunter", base_url="https://api.hunter.example", auth=Bearer(secret("HUNTER_KEY")), concurrency=20)
apollo = Provider("apollo", base_url="https://api.apollo.example", concurrency=50)
crm = Provider("crm", base_url="https://crm.example")

@hunter.post("/v2/find", effect="read", cost=Decimal("0.01"), batch=Batch(50, path="/v2/bulk", items="items", results="results"))
class Find(HttpTool[FindIn, FindOut]):
    extract = {"email": ["email", "data.emails.0.value"]}

@apollo.post("/match", effect="read", cost=Decimal("0.02"))
class Match(HttpTool[FindIn, FindOut]):
    extract = {"email": ["email"]}

@apollo.post("/match", effect="idempotent", id="order")
class Order(HttpTool[FindIn, FindOut]): ...

@apollo.post("/match", effect="non_idempotent", id="charge")
class Charge(HttpTool[FindIn, FindOut]): ...

@hunter.post("/echo", effect="read", id="echo")
class Echo(HttpTool[FindIn, dict]): ...

@crm.tool("score", effect="idempotent", batch=Batch(100))
async def score(inputs: list[FindIn], call: ToolCall) -> list[int | ToolError]:
    body = [{"key": key, **item.model_dump()} for key, item in zip(call.keys, inputs, strict=True)]
    answer = await call.http.post("/score", json=body)
    answer.raise_for_status()
    return answer.json()

@crm.tool("slow", effect="read", blocking=True)
def slow(given: FindIn, call: ToolCall) -> str:
    if given.domain == "bad.example":
        raise ToolError("no such domain", failure_code="no_domain")
    return given.domain.upper()
"""


class Neighbours:
    """The receipt-store, which asks `MemoryReceipts`, and an executor that collects outcomes."""

    def __init__(self, broker_url: str, store: MemoryReceipts) -> None:
        self.store = store
        self.clock = SystemClock()
        self.bus = Bus(ServiceSettings(broker_url=broker_url), service="neighbours")
        self.outcomes: dict[str, list[CallOutcome]] = {}
        self.answering = asyncio.Event()
        self.answering.set()
        self._arrived = asyncio.Event()
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        self.bus.on_reply(ToolResults, self._collect)
        await self.bus.consume(RECEIPTS_CLAIMS, self._answer)
        await self.bus.consume(RECEIPTS_SETTLE, self._answer)
        await self.bus.start()

    async def _answer(self, delivery: Delivery) -> None:
        await self.answering.wait()
        await self.bus.reply(delivery, self.store.answer(delivery.message))

    def _collect(self, message: ToolResults) -> None:
        for outcome in message.results:
            self.outcomes.setdefault(outcome.call_id, []).append(outcome)
        self._arrived.set()

    def item(self, tool_id: str, domain: str, *, row: str = "leads/1", **facts: Any) -> CallItem:
        tool = registry.tool_named(tool_id)
        encoded = canonical({"domain": domain})
        key = receipt_key(ORG, "", tool_id, tool.version, encoded, tool.provider.credential_scope)
        return CallItem(call_id=f"call-{next(self._numbers)}", tool=tool_id, receipt_key=key, input=msgspec.Raw(encoded), row=row, **facts)

    async def send(self, items: list[CallItem], *, run: str = "run-1", started_at: float | None = None, **facts: Any) -> ToolCalls:
        message = ToolCalls(
            run_id=run, org=ORG, play="leads", started_at=self.clock.now() if started_at is None else started_at, calls=items, **facts
        )
        provider = registry.tool_named(items[0].tool).provider.name
        await self.bus.publish(message, gateway_calls(shard_of(ORG, provider)), reply_to=self.bus.reply_to)
        return message

    async def outcome(self, item: CallItem, *, answers: int = 1) -> CallOutcome:
        async with asyncio.timeout(30):
            while len(self.outcomes.get(item.call_id, ())) < answers:
                self._arrived.clear()
                await self._arrived.wait()
        return self.outcomes[item.call_id][-1]

    async def ask(self, items: list[CallItem], **facts: Any) -> list[CallOutcome]:
        await self.send(items, **facts)
        return [await self.outcome(item) for item in items]


@pytest.fixture(scope="session")
def _provider_process() -> Iterator[ProviderProcess]:
    with ProviderProcess() as running:
        yield running


@pytest.fixture
def provider(_provider_process: ProviderProcess) -> ProviderProcess:
    """The provider, its books and orders empty."""
    _provider_process.control(latency_ms=0, rate_limit=None, hold=False)
    _provider_process.reset()
    return _provider_process


@pytest.fixture
def project(tmp_path: Path, provider: ProviderProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose providers live at the local one."""
    module = f"gateway_plays_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{module}.py").write_text(PLAYS)
    overrides = "".join(f'\n[providers.{name}]\nbase_url = "{provider.url}"\n' for name in ("hunter", "apollo", "crm"))
    (tmp_path / "rowmill.toml").write_text(f'plays = ["{module}"]\n{overrides}')
    monkeypatch.setenv("HUNTER_KEY", KEY)
    with registry.isolated():
        yield tmp_path
    sys.modules.pop(module, None)
    sys.path.remove(str(tmp_path))


@pytest.fixture
def settings(broker_url: str, project: Path) -> ToolGatewaySettings:
    return ToolGatewaySettings(broker_url=broker_url, project=project, time_scale=SCALE)


@pytest.fixture
async def neighbours(settings: ToolGatewaySettings) -> AsyncIterator[Neighbours]:
    clock = SystemClock()
    store = MemoryReceipts(clock.now, queued=10 * SCALE, running=60 * SCALE, shard=6 * SCALE)
    made = Neighbours(settings.broker_url, store)
    await made.start()
    yield made
    await made.bus.stop()


@pytest.fixture
async def gateway(settings: ToolGatewaySettings, neighbours: Neighbours) -> AsyncIterator[App]:
    app = App(settings)
    await app.start()
    yield app
    await app.stop()


def raw_of(outcome: CallOutcome) -> Any:
    return msgspec.json.decode(outcome.result)["raw"]
