"""Both receipt-stores: the service on a real broker and database, and the one in memory."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import Message
from rowmill_contracts.receipts import (
    Claim,
    ClaimAnswer,
    ClaimReceipts,
    Complete,
    Completed,
    Completion,
    Confirm,
    ConfirmAnswer,
    Confirmed,
    Fail,
    FailedCall,
    HaltRun,
    LeaseRef,
    ReceiptsClaimed,
    Release,
    Released,
    RunHalted,
    StoreAnswer,
)
from rowmill_contracts.shards import Draw, Drawn, LeaseShard, ShardLease, ShardsLeased
from rowmill_contracts.tools import ToolFailure
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE
from rowmill_receipt_store.app import App
from rowmill_receipt_store.settings import ReceiptStoreSettings

ReplyT = TypeVar("ReplyT", bound=Message)
FAILURE = ToolFailure(tool="hunter.find", code="http_400", message="no")


class Asker:
    """Asks either store. Names are new for each test, so that tests share a database."""

    def __init__(self, bus: Bus | None, memory: MemoryReceipts | None) -> None:
        self._bus = bus
        self._memory = memory
        self.run = f"run-{secrets.token_hex(4)}"
        self.now = SystemClock().now()

    async def ask(self, message: Message, answer: type[ReplyT]) -> ReplyT:
        if self._memory is not None:
            reply = self._memory.answer(message)
            assert isinstance(reply, answer)
            return reply
        assert self._bus is not None
        return await self._bus.ask(message, RECEIPTS_CLAIMS if isinstance(message, ClaimReceipts) else RECEIPTS_SETTLE, answer)

    async def claim(self, key: str, lease: str = "lease-1", **facts: Any) -> ClaimAnswer:
        request = {name: facts.pop(name) for name in ("shard", "term", "confirm", "only_cached", "presence", "counts_deaths") if name in facts}
        given: dict[str, Any] = {"run_id": self.run, "tool": "hunter.find", "effect": "read", "started_at": self.now, "caller": "leads/1"} | facts
        claims = [Claim(key=key, lease_id=lease, **given)]
        return (await self.ask(ClaimReceipts(holder="gateway", claims=claims, **request), ReceiptsClaimed)).answers[0]

    async def claim_and_confirm(self, key: str, lease: str = "lease-1", **facts: Any) -> ClaimAnswer:
        """As a gateway does: what is not confirmed by its claim is right after."""
        answer = await self.claim(key, lease, confirm=True, **facts)
        if answer.state != "granted" or answer.dispatch:
            return answer
        return msgspec.structs.replace(answer, dispatch=(await self.confirm(key, lease)).dispatch)

    async def confirm(self, key: str, lease: str = "lease-1", **facts: Any) -> ConfirmAnswer:
        leases = [LeaseRef(key=key, lease_id=lease, run_id=self.run)]
        return (await self.ask(Confirm(leases=leases, batch_id="batch", **facts), Confirmed)).answers[0]

    async def complete(self, key: str, dispatch: int, lease: str = "lease-1", cost: str = "0") -> StoreAnswer:
        completion = Completion(key=key, lease_id=lease, dispatch=dispatch, output=msgspec.Raw(b'{"raw":1}'), run_id=self.run, cost=Decimal(cost))
        return (await self.ask(Complete(completions=[completion]), Completed)).answers[0]

    async def fail(self, key: str, dispatch: int, lease: str = "lease-1", **facts: Any) -> StoreAnswer:
        failed = FailedCall(key=key, lease_id=lease, dispatch=dispatch, run_id=self.run, failure=FAILURE, **facts)
        return (await self.ask(Fail(failures=[failed]), Completed)).answers[0]

    async def release(self, key: str, dispatch: int, lease: str = "lease-1") -> int:
        leases = [LeaseRef(key=key, lease_id=lease, run_id=self.run, dispatch=dispatch)]
        return (await self.ask(Release(leases=leases), Released)).released

    async def shard(self, shard: int, holder: str, *, release: bool = False) -> ShardLease:
        return (await self.ask(LeaseShard(holder=holder, shards=[shard], release=release), ShardsLeased)).shards[0]

    async def draw(self, holder: str, draw: Draw, *, release: bool = False) -> Drawn:
        request = LeaseShard(holder=holder, shards=[draw.shard], release=release, draws=[draw])
        return (await self.ask(request, ShardsLeased)).drawn[0]

    async def halt(self, action: Any, budget: str | None = None) -> str:
        request = HaltRun(run_id=self.run, action=action, budget=None if budget is None else Decimal(budget))
        return (await self.ask(request, RunHalted)).state


@pytest.fixture(params=["memory", "service"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Asker]:
    if request.param == "memory":
        yield Asker(None, MemoryReceipts(SystemClock().now))
        return
    urls = {"broker_url": request.getfixturevalue("broker_url"), "database_url": request.getfixturevalue("database_url")}
    app = App(ReceiptStoreSettings(**urls))
    await app.start()
    async with Bus(ServiceSettings(**urls), service="asker") as bus:
        yield Asker(bus, None)
    await app.stop()


@pytest.fixture
def key() -> str:
    return secrets.token_hex(32)
