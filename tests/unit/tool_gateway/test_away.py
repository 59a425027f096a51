"""A provider that does not serve: the longer a call has waited, the less often it asks; once it serves, who waits is called back."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.tool_gateway.conftest import Rig, answering, in_turn

from rowmill import HttpTool, Provider
from rowmill_contracts.runs import ProviderServes
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.settling import CALLED_BACK


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


def away_tool(**options: Any) -> type[HttpTool[FindIn, FindOut]]:
    away = Provider("away", base_url="http://127.0.0.1:1", concurrency=4, **options)

    @away.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        pass

    return Find


async def refusing(request: HttpRequest) -> HttpResponse:
    raise NoResponse("never_opened", "connection refused")


@pytest.mark.parametrize(("waited", "least", "most"), [(0.0, 1.0, 1.2), (20.0, 10.0, 10.2), (500.0, 250.0, 250.2), (2_000.0, 300.0, 300.2)])
async def test_a_call_is_deferred_for_half_as_long_as_it_has_waited_and_no_longer_than_the_limit(waited: float, least: float, most: float) -> None:
    rig = Rig(ToolGatewaySettings(rejected_wait=1.0))
    rig.port.script = answering({}, status=429)
    try:
        [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"}, asked=rig.clock.now() - waited)])
    finally:
        await rig.stop()
    assert (outcome.outcome, outcome.provider) == ("deferred", "away")
    assert least * 1000 <= outcome.wait_ms <= most * 1000


async def test_a_call_is_never_deferred_beyond_what_it_may_wait_in_all() -> None:
    rig = Rig(ToolGatewaySettings(rejected_wait=1.0))
    rig.port.script = answering({}, status=429)
    try:
        [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"}, asked=rig.clock.now() - 3_590)])
        [leg] = await rig.ask([rig.item(away_tool(), {"domain": "b.example"}, asked=rig.clock.now() - 100, max_wait=3.0)])
    finally:
        await rig.stop()
    assert 9_000 <= outcome.wait_ms <= 10_000
    assert leg.wait_ms <= 3_000


async def test_that_a_provider_serves_again_is_told_once_with_its_rate(rig: Rig) -> None:
    find = away_tool(rate="50/s")
    rig.port.script = answering({}, status=429, Retry_After="0.4")
    [deferred] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    assert deferred.outcome == "deferred"
    assert not rig.serving
    rig.port.script = answering({"email": "a@example"})
    while (await rig.ask([rig.item(find, {"domain": "a.example"})]))[0].outcome == "deferred":
        await rig.clock.sleep(0.05)
    await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert rig.serving == [ProviderServes(org="acme", provider="away", per_second=CALLED_BACK * 50.0)]


async def test_that_nobody_waited_elsewhere_is_not_told(rig: Rig) -> None:
    rig.port.script = in_turn(refusing, answering({"email": "a@example"}))
    [outcome] = await rig.ask([rig.item(away_tool(), {"domain": "a.example"})])
    assert outcome.outcome == "completed"
    assert not rig.serving
