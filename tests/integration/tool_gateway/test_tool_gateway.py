"""Calls over the broker to the example's provider and back."""

from __future__ import annotations

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from provider import ProviderProcess, crm_score
from tests.integration.tool_gateway.conftest import KEY, Neighbours, raw_of

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.digests import shard_of
from rowmill_contracts.tools import ToolCalls
from rowmill_contracts.topology import ADMISSION_DEAD, gateway_calls
from rowmill_tool_gateway.app import App
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("gateway")]


def domains(count: int) -> list[str]:
    return [f"d{number}.example" for number in range(count)]


async def test_single_and_batched_calls_are_answered_with_what_the_provider_says(neighbours: Neighbours, provider: ProviderProcess) -> None:
    finds = [neighbours.item("hunter.find", domain, row=f"leads/{domain}") for domain in domains(120)]
    matches = [neighbours.item("apollo.match", domain, row=f"leads/{domain}") for domain in domains(120)]
    outcomes = [*await neighbours.ask(finds), *await neighbours.ask(matches)]
    assert {outcome.outcome for outcome in outcomes} == {"completed", "no_result"}
    assert {outcome.execution for outcome in outcomes} == {"live"}
    assert sum(outcome.cost for outcome in outcomes) == Decimal("0.01") * 120 + Decimal("0.02") * 120
    books = provider.stats()
    assert books["requests"] == {"/v2/bulk": 3, "/match": 120}
    assert books["items"] == {"/v2/bulk": 120, "/match": 120}
    assert books["in_flight_max"]["apollo"] <= 50


async def test_what_is_stored_answers_other_runs_without_a_request(neighbours: Neighbours, provider: ProviderProcess) -> None:
    await neighbours.ask([neighbours.item("apollo.match", domain) for domain in domains(20)])
    outcomes = await neighbours.ask([neighbours.item("apollo.match", domain, row="leads/2") for domain in domains(20)], run="run-2")
    assert {(outcome.execution, outcome.cost) for outcome in outcomes} == {("cache", Decimal(0))}
    assert provider.stats()["requests"] == {"/match": 20}


async def test_equal_calls_of_two_runs_share_one_request(neighbours: Neighbours, provider: ProviderProcess) -> None:
    provider.control(latency_ms=100)
    one = neighbours.item("apollo.match", "a.example", row="leads/1")
    two = neighbours.item("apollo.match", "a.example", row="leads/2")
    await neighbours.send([one], run="run-1")
    await neighbours.send([two], run="run-2")
    executions = {(await neighbours.outcome(item)).execution for item in (one, two)}
    assert executions == {"live", "in_flight"}
    assert provider.stats()["requests"] == {"/match": 1}


async def test_a_page_that_comes_twice_is_answered_twice_and_sent_once(neighbours: Neighbours, provider: ProviderProcess) -> None:
    provider.control(hold=True)
    items = [neighbours.item("apollo.match", domain) for domain in domains(5)]
    started = neighbours.clock.now()
    await neighbours.send(items, started_at=started)
    await neighbours.send(items, started_at=started)
    async with asyncio.timeout(10):
        while provider.stats()["in_flight"] < 5:
            await asyncio.sleep(0.01)
    provider.control(hold=False)
    for item in items:
        assert (await neighbours.outcome(item, answers=2)).execution == "live"
    assert provider.stats()["requests"] == {"/match": 5}


async def test_a_429_is_answered_deferred_and_nothing_is_charged(neighbours: Neighbours, provider: ProviderProcess) -> None:
    provider.control(reply_429={"path": "/match", "count": 1, "retry_after": 9})
    [outcome] = await neighbours.ask([neighbours.item("apollo.match", "a.example")])
    assert outcome.outcome == "deferred"
    assert outcome.wait_ms >= 9000
    assert {receipt.state for receipt in neighbours.store.receipts.values()} == {"released"}
    assert neighbours.store.runs["run-1"].charged() == 0


async def test_a_500_is_tried_again_under_the_same_key(neighbours: Neighbours, provider: ProviderProcess) -> None:
    provider.control(reply_500={"path": "/match", "count": 2, "effect": True})
    [outcome] = await neighbours.ask([neighbours.item("apollo.order", "a.example")])
    assert outcome.outcome in {"completed", "no_result"}
    books = provider.stats()
    assert (books["requests"], books["keys"], books["repeated_keys"], books["max_effects_per_key"]) == ({"/match": 3}, 1, 2, 1)


@pytest.mark.parametrize(
    ("tool", "outcomes", "requests"),
    [("apollo.match", {"completed", "no_result"}, 2), ("apollo.order", {"completed", "no_result"}, 2), ("apollo.charge", {"unknown"}, 1)],
)
async def test_an_answer_that_is_lost_after_the_effect(
    neighbours: Neighbours, provider: ProviderProcess, tool: str, outcomes: set[str], requests: int
) -> None:
    provider.control(drop={"path": "/match", "count": 1})
    [outcome] = await neighbours.ask([neighbours.item(tool, "a.example")])
    assert outcome.outcome in outcomes
    books = provider.stats()
    assert books["requests"] == {"/match": requests}
    assert books["max_effects_per_key"] == 1


async def test_tool_functions_run_over_batches_and_in_threads(neighbours: Neighbours, provider: ProviderProcess) -> None:
    items = [neighbours.item("crm.score", domain) for domain in domains(150)]
    outcomes = await neighbours.ask(items)
    assert [raw_of(outcome) for outcome in outcomes] == [crm_score(domain) for domain in domains(150)]
    assert provider.stats()["items"] == {"/score": 150}
    assert provider.stats()["requests"]["/score"] == 2
    good, bad = await neighbours.ask([neighbours.item("crm.slow", "a.example"), neighbours.item("crm.slow", "bad.example")])
    assert raw_of(good) == "A.EXAMPLE"
    assert bad.failure is not None
    assert (bad.failure.code, bad.failure.message, bad.failure.origin) == ("no_domain", "no such domain", "tool")


async def test_errors_of_httpx_in_a_function_are_classed_like_any_answer(neighbours: Neighbours, provider: ProviderProcess) -> None:
    provider.control(reply_500={"path": "/score", "count": 1})
    [outcome] = await neighbours.ask([neighbours.item("crm.score", "a.example")])
    assert outcome.outcome == "completed"
    provider.control(reply_429={"path": "/score", "count": 1, "retry_after": 9})
    [waiting] = await neighbours.ask([neighbours.item("crm.score", "b.example")])
    assert waiting.outcome == "deferred"


async def test_a_secret_is_sent_and_never_comes_back(
    neighbours: Neighbours, provider: ProviderProcess, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    [echoed] = await neighbours.ask([neighbours.item("hunter.echo", "a.example")])
    assert raw_of(echoed)["headers"]["Authorization"] == "Bearer ***"
    provider.control(reply={"path": "/echo", "status": 400, "body": f"the key {KEY} is bad"})
    [refused] = await neighbours.ask([neighbours.item("hunter.echo", "b.example")])
    assert refused.failure is not None
    assert "the key *** is bad" in refused.failure.message
    out, err = capfd.readouterr()
    stored = [bytes(receipt.output.output) for receipt in neighbours.store.receipts.values() if receipt.output is not None]
    assert len(stored) == 1
    for text in (caplog.text, out, err, str(stored), str(neighbours.outcomes)):
        assert KEY not in text


async def test_while_results_cannot_be_stored_nothing_new_is_sent(neighbours: Neighbours, provider: ProviderProcess) -> None:
    await neighbours.ask([neighbours.item("apollo.match", "warm.example")])
    provider.control(hold=True)
    first = neighbours.item("apollo.match", "a.example")
    await neighbours.send([first])
    async with asyncio.timeout(10):
        while not provider.stats()["in_flight"]:
            await asyncio.sleep(0.01)
    neighbours.answering.clear()
    provider.control(hold=False)
    [blocked] = await neighbours.ask([neighbours.item("apollo.match", "b.example")])
    assert blocked.outcome == "deferred"
    neighbours.answering.set()
    assert (await neighbours.outcome(first)).outcome in {"completed", "no_result"}
    assert provider.stats()["requests"] == {"/match": 2}


async def test_calls_without_a_reply_queue_are_dead_lettered(neighbours: Neighbours, settings: ToolGatewaySettings) -> None:
    dead: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with Bus(settings, service="graveyard") as bus:

        async def bury(delivery: Delivery) -> None:
            dead.put_nowait(delivery.headers)

        await bus.consume(ADMISSION_DEAD, bury)
        message = ToolCalls(run_id="run-1", org="acme", play="leads", started_at=0, calls=[neighbours.item("apollo.match", "a.example")])
        await bus.publish(message, gateway_calls(shard_of("acme", "apollo")))
        async with asyncio.timeout(10):
            headers = await dead.get()
    assert "reply queue" in headers["x-rowmill-error"]


async def test_a_second_gateway_stands_by_and_takes_over_when_the_first_stops(
    gateway: App, neighbours: Neighbours, settings: ToolGatewaySettings, provider: ProviderProcess
) -> None:
    await neighbours.ask([neighbours.item("apollo.match", "a.example")])
    second = App(settings)
    await second.start()
    await gateway.stop()
    items = [neighbours.item("apollo.match", domain) for domain in domains(10)]
    outcomes = await neighbours.ask(items)
    assert {outcome.outcome for outcome in outcomes} <= {"completed", "no_result"}
    assert {shard.term for shard in neighbours.store.shards.values()} == {2}
    await second.stop()
