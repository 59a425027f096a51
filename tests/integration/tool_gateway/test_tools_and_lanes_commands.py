"""`rowmill tools call` and `rowmill lanes` against a gateway that runs, and against none."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from provider import ProviderProcess
from tests.integration.tool_gateway.conftest import Neighbours
from typer.testing import CliRunner, Result

from rowmill import registry
from rowmill.cli.main import app as command
from rowmill.client import calls
from rowmill_contracts.digests import shard_of
from rowmill_contracts.topology import gateway_calls
from rowmill_tool_gateway.app import App

pytestmark = pytest.mark.servers


class Operator:
    """Types commands in the project's folder."""

    async def types(self, *arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, command, list(arguments))

    async def reads(self, *arguments: str) -> Any:
        result = await self.types(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return printed(result)


def printed(result: Result) -> Any:
    """The document; what the gateway of this process logs meanwhile stands before it."""
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def operator(broker_url: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.setenv("ROWMILL_BROKER_URL", broker_url)
    monkeypatch.chdir(project)
    return Operator()


async def test_a_call_is_made_once_under_a_receipt_that_serves_others(
    operator: Operator, gateway: App, neighbours: Neighbours, provider: ProviderProcess
) -> None:
    first = await operator.reads("tools", "call", "apollo.match", "domain=a.example", "--org", "acme")
    assert first["outcome"] in {"completed", "no_result"}
    assert (first["execution"], first["cost"]) == ("live", "0.02")
    again = await operator.reads("tools", "call", "apollo.match", "--input", '{"domain": "a.example"}', "--org", "acme")
    assert (again["execution"], again["cost"], again["result"], again["receipt"]) == ("cache", "0", first["result"], first["receipt"])
    [served] = await neighbours.ask([neighbours.item("apollo.match", "a.example")])
    assert (served.execution, served.receipt) == ("cache", first["receipt"])
    assert provider.stats()["requests"] == {"/match": 1}
    told = await operator.types("tools", "call", "apollo.match", "domain=a.example", "--org", "acme", "--force")
    assert f"receipt {first['receipt']}, cost 0.02, sent now" in told.stdout
    assert provider.stats()["requests"] == {"/match": 2}


async def test_a_call_that_must_wait_for_its_provider_is_asked_for_again(
    operator: Operator, gateway: App, neighbours: Neighbours, provider: ProviderProcess
) -> None:
    provider.control(reply_429={"path": "/match", "count": 1, "retry_after": 1})
    result = await operator.types("tools", "call", "apollo.match", "domain=a.example", "--json")
    assert result.exit_code == 0, result.output
    assert "rowmill: waits" in result.stderr
    assert provider.stats()["requests"] == {"/match": 2}


async def test_a_call_that_fails_says_why_and_what_is_wrongly_asked_is_not_sent(
    operator: Operator, gateway: App, neighbours: Neighbours, provider: ProviderProcess
) -> None:
    provider.control(reply={"path": "/match", "status": 422, "body": "no such thing"})
    failed = await operator.types("tools", "call", "apollo.match", "domain=a.example", "--json")
    assert failed.exit_code == 1
    assert printed(failed)["failure"]["code"] == "http_422"
    provider.reset()
    wrong = await operator.types("tools", "call", "apollo.match", "domain=7")
    assert (wrong.exit_code, "domain" in wrong.stderr) == (2, True)
    unknown = await operator.types("tools", "call", "apollo.nothing")
    assert (unknown.exit_code, "apollo.match" in unknown.stderr) == (2, True)
    assert not provider.stats()["requests"]


async def test_without_a_gateway_a_call_is_not_left_behind_to_be_paid_for_later(
    operator: Operator, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "PRESENCE_SECONDS", 0.5)
    result = await operator.types("tools", "call", "apollo.match", "domain=a.example")
    assert (result.exit_code, "rowmill up" in result.stderr) == (1, True)
    session = await neighbours.bus.live_session()
    async with session.connection.channel() as channel:
        queue = await channel.declare_queue(gateway_calls(shard_of("default", "apollo")), passive=True)
        assert queue.declaration_result.message_count == 0
    assert "no tool-gateway answered" in (await operator.types("lanes", "--wait", "0.5")).stdout
    assert await operator.reads("lanes", "--wait", "0.5") == []


async def test_lanes_say_what_is_closed_and_what_waits(operator: Operator, gateway: App, neighbours: Neighbours, provider: ProviderProcess) -> None:
    await neighbours.ask([neighbours.item("apollo.match", "a.example")])
    provider.control(reply_429={"path": "/v2/find", "count": 1, "retry_after": 90})
    await neighbours.ask([neighbours.item("hunter.find", "a.example")])
    provider.control(hold=True)
    held = neighbours.item("apollo.match", "b.example")
    await neighbours.send([held])
    async with asyncio.timeout(10):
        while not provider.stats()["in_flight"]:
            await asyncio.sleep(0.01)
    [answer] = await operator.reads("lanes", "--wait", "1")
    lanes = {lane["provider"]: lane for lane in answer["lanes"]}
    assert answer["storing"]
    assert (lanes["apollo"]["in_flight"], lanes["apollo"].get("closed_seconds"), lanes["apollo"]["held"]) == (1, None, True)
    assert 60 < lanes["hunter"]["closed_seconds"] <= 90
    told = (await operator.types("lanes", "--wait", "1", "--provider", "hunter")).stdout
    assert "acme/hunter" in told
    assert "acme/apollo" not in told
    assert "closed for" in told
    assert "0/20 requests open" in told
    provider.control(hold=False)
    await neighbours.outcome(held)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that sends no call away, however slow the machine is."""
    monkeypatch.setenv("ROWMILL_HAND", "300")


@pytest.mark.usefixtures("patient")
async def test_lanes_say_what_their_rate_allows_and_since_when_calls_wait(
    operator: Operator, gateway: App, neighbours: Neighbours, provider: ProviderProcess
) -> None:
    registry.tool_named("apollo.match").provider.configure(rate="100/s", concurrency=2)
    provider.control(hold=True)
    now = neighbours.clock.now()
    items = [neighbours.item("apollo.match", f"{number}.example", asked=now - 5 * number) for number in range(5)]
    await neighbours.send(items)
    async with asyncio.timeout(10):
        while provider.stats()["in_flight"] < 2:
            await asyncio.sleep(0.01)
    [answer] = await operator.reads("lanes", "--wait", "0.5", "--provider", "apollo")
    [lane] = answer["lanes"]
    assert (lane["in_flight"], lane["concurrency"], lane["waiting"], lane["rate"]) == (2, 2, 3, "100/s")
    assert 0 < lane["permits"] <= 100
    assert lane["oldest_asked"] == pytest.approx(now - 10, abs=0.001), "those that were asked for 20 and 15 s ago are open"
    told = (await operator.types("lanes", "--wait", "0.5", "--provider", "apollo")).stdout
    since = datetime.fromtimestamp(now - 10, UTC).isoformat(timespec="seconds")
    assert "2/2 requests open, rate 100/s, " in told
    assert f"3 waiting since {since}" in told
    provider.control(hold=False)
    for item in items:
        await neighbours.outcome(item)
