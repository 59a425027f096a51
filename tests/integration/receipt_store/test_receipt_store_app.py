"""The receipt-store over the bus: what gateways, executors and admission say to it, end to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import pytest

from rowmill.dev.private import PrivateServers
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.receipts import (
    Claim,
    ClaimReceipts,
    Complete,
    Completed,
    Completion,
    Confirm,
    Confirmed,
    Fail,
    FailedCall,
    HaltRun,
    LeaseRef,
    ReceiptsClaimed,
    Release,
    Released,
    Renew,
    Renewed,
    RunHalted,
)
from rowmill_contracts.shards import LeaseShard, ShardsLeased
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE, dead
from rowmill_receipt_store.app import App
from rowmill_receipt_store.settings import ReceiptStoreSettings

from .conftest import FAILURE, new_keys, new_run

pytestmark = pytest.mark.servers

AnswerT = TypeVar("AnswerT", bound=Message)

MIB = 1024 * 1024


class Gateway:
    """Asks over a bus of its own."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def claim(self, keys: list[bytes], run: str, *, lease: str = "lease", **request: Any) -> ReceiptsClaimed:
        facts: dict[str, Any] = {"tool": "hunter.find", "effect": "read", "started_at": time.time(), "cost": Decimal("0.01")}
        claims = [Claim(key=key.hex(), lease_id=lease, run_id=run, **facts) for key in keys]
        return await self.bus.ask(ClaimReceipts(holder="gateway", claims=claims, **request), RECEIPTS_CLAIMS, ReceiptsClaimed)

    async def settle(self, message: Message, answer: type[AnswerT]) -> AnswerT:
        return await self.bus.ask(message, RECEIPTS_SETTLE, answer)


def refs(keys: list[bytes], run: str, dispatch: int = 0) -> list[LeaseRef]:
    return [LeaseRef(key=key.hex(), lease_id="lease", run_id=run, dispatch=dispatch) for key in keys]


def completions(keys: list[bytes], run: str, output: bytes = b'{"raw":1}') -> list[Completion]:
    raw = msgspec.Raw(output)
    return [Completion(key=key.hex(), lease_id="lease", dispatch=1, output=raw, run_id=run, cost=Decimal("0.01")) for key in keys]


@pytest.fixture
def settings(broker_url: str, database_url: str) -> ReceiptStoreSettings:
    return ReceiptStoreSettings(broker_url=broker_url, database_url=database_url)


@pytest.fixture
async def app(settings: ReceiptStoreSettings) -> AsyncIterator[App]:
    found = App(settings)
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def bus(broker_url: str, database_url: str) -> AsyncIterator[Bus]:
    async with Bus(ServiceSettings(broker_url=broker_url, database_url=database_url), service="gateway") as found:
        yield found


@pytest.fixture
def gateway(app: App, bus: Bus) -> Gateway:
    return Gateway(bus)


async def test_a_page_of_calls_from_shard_to_settled(gateway: Gateway) -> None:
    run = new_run()
    keys = new_keys(200)
    (shard,) = (await gateway.settle(LeaseShard(holder="gateway", shards=[3]), ShardsLeased)).shards
    assert shard.held
    assert (await gateway.settle(HaltRun(run_id=run, action="resume", budget=Decimal(5)), RunHalted)).state == "running"

    claimed = await gateway.claim(keys, run, shard=3, term=shard.term)
    assert [answer.state for answer in claimed.answers] == ["granted"] * 200
    released = await gateway.settle(Release(leases=refs(keys[100:], run)), Released)
    assert released.released == 100
    confirm = Confirm(leases=refs(keys, run), shard=3, term=shard.term, batch_id="request-1")
    confirmed = await gateway.settle(confirm, Confirmed)
    assert [answer.state for answer in confirmed.answers] == ["confirmed"] * 100 + ["lost"] * 100
    renewed = await gateway.settle(Renew(leases=refs(keys, run)), Renewed)
    assert renewed.held == [True] * 100 + [False] * 100
    stored = await gateway.settle(Complete(completions=completions(keys[:50], run)), Completed)
    assert {answer.state for answer in stored.answers} == {"stored"}
    failures = [FailedCall(key=key.hex(), lease_id="lease", dispatch=1, run_id=run, failure=FAILURE) for key in keys[50:100]]
    failed = await gateway.settle(Fail(failures=failures), Completed)
    assert {answer.state for answer in failed.answers} == {"stored"}

    again = await gateway.claim(keys, run, lease="redelivered", confirm=True, shard=3, term=shard.term)
    assert [answer.state for answer in again.answers] == ["completed"] * 50 + ["failed"] * 50 + ["granted"] * 100
    assert bytes(again.answers[0].output) == b'{"raw":1}'
    assert (again.answers[0].cost, again.answers[0].run_id) == (Decimal("0.01"), run)
    assert again.answers[50].failure == FAILURE
    assert again.answers[150].dispatch == 0, "a budget pays for it"

    assert (await gateway.settle(HaltRun(run_id=run, action="stop", reason="enough"), RunHalted)).state == "stopped"
    assert {answer.state for answer in (await gateway.claim(keys, run, only_cached=True)).answers} == {"halted"}
    given_up = await gateway.settle(LeaseShard(holder="gateway", shards=[3], release=True), ShardsLeased)
    assert not given_up.shards[0].held
    refused = await gateway.claim(new_keys(1), new_run(), shard=3, term=shard.term)
    assert refused.answers[0].state == "refused"


async def test_many_requests_at_once_are_each_answered_in_their_order(gateway: Gateway) -> None:
    run = new_run()
    pages = [new_keys(number + 1) for number in range(40)]
    await asyncio.gather(*(gateway.claim(page, run, confirm=True) for page in pages[::2]))
    outputs = [
        [completions([key], run, f'"{number}-{place}"'.encode())[0] for place, key in enumerate(page)] for number, page in enumerate(pages[::2])
    ]
    await asyncio.gather(*(gateway.settle(Complete(completions=page), Completed) for page in outputs))

    answers = await asyncio.gather(*(gateway.claim(page, run, lease="second") for page in pages))

    for number, claimed in enumerate(answers):
        assert len(claimed.answers) == number + 1
        if number % 2:
            assert {answer.state for answer in claimed.answers} == {"granted"}
        else:
            assert [bytes(answer.output) for answer in claimed.answers] == [f'"{number // 2}-{place}"'.encode() for place in range(number + 1)]


async def test_equal_keys_of_requests_at_once_have_one_holder(gateway: Gateway) -> None:
    keys = new_keys(100)

    answers = await asyncio.gather(*(gateway.claim(keys, new_run(), lease=f"lease-{number}") for number in range(8)))

    for key_answers in zip(*(claimed.answers for claimed in answers), strict=True):
        assert sorted(answer.state for answer in key_answers) == ["granted"] + ["held"] * 7


async def test_a_message_delivered_again_changes_nothing(gateway: Gateway) -> None:
    run = new_run()
    keys = new_keys(10)
    for _ in range(2):
        claimed = await gateway.claim(keys, run, confirm=True)
        assert [(answer.state, answer.dispatch) for answer in claimed.answers] == [("granted", 1)] * 10
    first = await gateway.settle(Complete(completions=completions(keys, run)), Completed)
    assert await gateway.settle(Complete(completions=completions(keys, run)), Completed) == first


@pytest.mark.parametrize("size", [8 * MIB - 1, 8 * MIB, 8 * MIB + 1])
async def test_outputs_around_the_limit_through_every_hop(size: int, gateway: Gateway) -> None:
    run = new_run()
    keys = new_keys(2)
    await gateway.claim(keys, run, confirm=True)
    output = b'"' + b"x" * (size - 2) + b'"'
    stored = await gateway.settle(Complete(completions=completions(keys[:1], run, output)), Completed)
    await gateway.settle(Complete(completions=completions(keys[1:], run)), Completed)

    (answer, small) = (await gateway.claim(keys, run, lease="second")).answers
    if size > 8 * MIB:
        assert stored.answers[0].state == "rejected"
        assert answer.failure is not None
        assert (answer.state, answer.failure.code, answer.failure.tool) == ("failed", "too_large", "hunter.find")
    else:
        assert stored.answers[0].state == "stored"
        if answer.state == "held":  # the other came first, and together they are too large for one answer
            assert (small.state, answer.wait_ms) == ("completed", 0)
            (answer,) = (await gateway.claim(keys[:1], run, lease="third")).answers
        assert bytes(answer.output) == output


async def test_a_request_that_is_wrong_is_dead_lettered_and_disturbs_no_other(gateway: Gateway, bus: Bus) -> None:
    reasons: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def bury(delivery: Delivery) -> None:
        reasons.put_nowait((delivery.headers["x-rowmill-error-type"], delivery.headers["x-rowmill-error"]))

    await bus.consume(dead(RECEIPTS_SETTLE), bury)
    await bus.consume(dead(RECEIPTS_CLAIMS), bury)
    no_digest = Renew(leases=[LeaseRef(key="no digest", lease_id="l")])
    await bus.publish(no_digest, RECEIPTS_SETTLE)
    assert "SHA-256" in (await reasons.get())[1]
    await bus.publish(no_digest, RECEIPTS_CLAIMS)
    assert "not for the claims" in (await reasons.get())[1]
    await bus.publish(ClaimReceipts(holder="gateway", claims=[]), RECEIPTS_SETTLE)
    assert "settle" in (await reasons.get())[1]

    unstorable = ClaimReceipts(  # as far as its kind tells it could be stored
        holder="gateway",
        claims=[Claim(key=new_keys(1)[0].hex(), lease_id="l", run_id="r", tool="t", effect="read", started_at=0, run_term=2**70)],
    )
    await bus.publish_body(encode(unstorable), unstorable.message_type, RECEIPTS_CLAIMS)
    good = await asyncio.gather(*(gateway.claim(new_keys(5), new_run()) for _ in range(5)))
    assert {answer.state for claimed in good for answer in claimed.answers} == {"granted"}
    assert (await reasons.get())[0] == "DataError"


async def test_two_stores_side_by_side_share_the_work(app: App, bus: Bus, settings: ReceiptStoreSettings) -> None:
    second = App(settings)
    await second.start()
    gateway = Gateway(bus)
    keys = new_keys(300)
    try:
        answers = await asyncio.gather(*(gateway.claim(keys, new_run(), lease=f"lease-{number}") for number in range(8)))
    finally:
        await second.stop()

    for key_answers in zip(*(claimed.answers for claimed in answers), strict=True):
        assert sorted(answer.state for answer in key_answers) == ["granted"] + ["held"] * 7


async def test_requests_outlast_a_database_that_dies(own_servers: PrivateServers) -> None:
    urls: dict[str, Any] = {"broker_url": own_servers.broker.url, "database_url": own_servers.database.url}
    store = App(ReceiptStoreSettings(**urls))
    await store.start()
    async with Bus(ServiceSettings(**urls), service="gateway") as bus:
        gateway = Gateway(bus)
        run = new_run()
        pages = [new_keys(100) for _ in range(20)]
        asked = [asyncio.ensure_future(gateway.claim(page, run, confirm=True)) for page in pages]
        await asked[0]
        await asyncio.to_thread(own_servers.database.kill)
        storing = asyncio.ensure_future(gateway.settle(Complete(completions=completions(pages[0], run)), Completed))
        await asyncio.to_thread(own_servers.database.start)
        claimed, stored = await asyncio.gather(*asked), await storing
    await store.stop()

    assert {(answer.state, answer.dispatch) for page in claimed for answer in page.answers} == {("granted", 1)}
    assert {answer.state for answer in stored.answers} == {"stored"}


async def test_it_is_ready_once_it_consumes(app: App, settings: ReceiptStoreSettings) -> None:
    assert app.ready
    assert not App(settings).ready


async def test_an_empty_request_is_answered(gateway: Gateway) -> None:
    assert (await gateway.claim([], new_run())).answers == []
    assert (await gateway.settle(Renew(leases=[]), Renewed)).held == []
    assert (await gateway.settle(Complete(completions=[]), Completed)).answers == []
    assert (await gateway.settle(LeaseShard(holder="gateway", shards=[]), ShardsLeased)).shards == []
