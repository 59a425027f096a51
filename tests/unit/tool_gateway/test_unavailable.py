"""A provider that answers to all that it does not serve is asked by one request at a time, and no row is spent on finding out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import Rig, answering, find_tool, in_turn

from rowmill_contracts.tools import CallOutcome
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.leaping

OUTAGE = 300.0
CONCURRENCY = 10
CALLS = 200


@pytest.fixture
async def patient() -> AsyncIterator[Rig]:
    """A gateway at full size."""
    made = Rig(ToolGatewaySettings())
    yield made
    await made.stop()


def serving_from(rig: Rig, seconds: float, status: int) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
    """It answers with the status for so long from now, each time after a while."""
    back = rig.clock.monotonic() + seconds

    async def script(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0.1)
        return await (answering({"email": "a@example"}) if rig.clock.monotonic() >= back else answering({}, status=status))(request)

    return script


async def worked(rig: Rig, find: Any, domain: str) -> CallOutcome:
    """How a call ends that comes again each time when it was told to."""
    started = rig.clock.now()
    while True:
        [outcome] = await rig.ask([rig.item(find, {"domain": domain}, asked=started)], started_at=started)
        if outcome.outcome != "deferred":
            return outcome
        await asyncio.sleep(outcome.wait_ms / 1000)


async def all_worked(rig: Rig, find: Any) -> list[str]:
    return [each.outcome for each in await asyncio.gather(*(worked(rig, find, f"d{number}.example") for number in range(CALLS)))]


def asked(rig: Rig, domain: str) -> int:
    return sum(msgspec.json.decode(request.body or b"null")["domain"] == domain for request in rig.port.requests)


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_all_calls_survive_an_outage_of_minutes_in_which_few_requests_are_made(patient: Rig, status: int) -> None:
    find = find_tool(concurrency=CONCURRENCY)
    patient.port.script = serving_from(patient, OUTAGE, status)
    outcomes = await all_worked(patient, find)
    assert outcomes == ["completed"] * CALLS
    in_vain = len(patient.port.requests) - CALLS
    probes = 5 + OUTAGE / (patient.settings.probe_limit / 2)
    assert CONCURRENCY <= in_vain <= CONCURRENCY + probes


async def test_whose_effect_may_not_be_repeated_is_risked_for_few(patient: Rig) -> None:
    find = find_tool(concurrency=CONCURRENCY, effect="non_idempotent")
    patient.port.script = serving_from(patient, OUTAGE, 503)
    outcomes = await all_worked(patient, find)
    assert len(patient.port.requests) == CALLS
    assert outcomes.count("completed") >= CALLS - CONCURRENCY - 5 - OUTAGE / (patient.settings.probe_limit / 2)


@pytest.mark.parametrize("status", [500, 501, 505])
async def test_what_may_be_the_fault_of_a_call_closes_nothing(patient: Rig, status: int) -> None:
    find = find_tool(concurrency=CONCURRENCY)
    patient.port.script = answering({}, status=status)
    outcomes = await all_worked(patient, find)
    assert outcomes == ["failed"] * CALLS
    assert len(patient.port.requests) == CALLS * patient.settings.call_attempts


async def test_a_call_to_which_alone_it_does_not_serve_fails_after_its_tries(patient: Rig) -> None:
    find = find_tool(concurrency=CONCURRENCY)
    serves, refuses = answering({"email": "a@example"}), answering({}, status=503)

    async def script(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0.1)
        bad = msgspec.json.decode(request.body or b"null")["domain"] == "d7.example"
        return await (refuses if bad else serves)(request)

    patient.port.script = script
    outcomes = await all_worked(patient, find)
    assert [number for number, outcome in enumerate(outcomes) if outcome != "completed"] == [7]
    assert asked(patient, "d7.example") == patient.settings.call_attempts


async def test_a_call_that_is_alone_fails_after_its_tries(patient: Rig) -> None:
    patient.port.script = answering({}, status=503)
    outcome = await worked(patient, find_tool(), "a.example")
    assert outcome.failure is not None
    assert (outcome.outcome, outcome.failure.code) == ("failed", "http_503")
    assert len(patient.port.requests) == patient.settings.call_attempts


async def test_who_finds_out_has_as_many_tries_left_as_before() -> None:
    rig = Rig(ToolGatewaySettings(unreachable_after=1))
    away, broken = answering({}, status=503), answering({}, status=500)
    rig.port.script = in_turn(away, away, away, broken)
    outcome = await worked(rig, find_tool(), "a.example")
    await rig.stop()
    assert outcome.outcome == "failed"
    assert len(rig.port.requests) == 2 + rig.settings.call_attempts, "all but the first of the 503s were to find out"


async def test_nobody_waits_for_ever_for_a_provider_that_never_serves_again(patient: Rig) -> None:
    find = find_tool(concurrency=CONCURRENCY)
    patient.port.script = answering({}, status=503)
    outcomes = await asyncio.gather(*(worked(patient, find, f"d{number}.example") for number in range(2 * CONCURRENCY)))
    assert {(each.outcome, each.failure and each.failure.code) for each in outcomes} == {("failed", "provider_unavailable")}
    assert len(patient.port.requests) <= CONCURRENCY + 5 + 3600 / (patient.settings.probe_limit / 2)
