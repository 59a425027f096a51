"""Tries of a call over all its waits, and what a provider's Retry-After means for others."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.unit.tool_gateway.conftest import FindIn, FindOut, Hold, Rig, answering, in_turn

from rowmill import HttpTool, Provider


def find_tool(**options: Any) -> Any:
    provider = Provider("hunter", base_url="http://127.0.0.1:1")

    @provider.post("/v2/find", effect="read", **options)
    class Find(HttpTool[FindIn, FindOut]): ...

    return Find


async def test_a_503_that_says_when_to_come_back_closes_the_lane_for_all(rig: Rig) -> None:
    find = find_tool()
    rig.port.script = answering({}, status=503, Retry_After="9")
    [first] = await rig.ask([rig.item(find, {"domain": "a.example"})])
    [other] = await rig.ask([rig.item(find, {"domain": "b.example"})])
    assert (first.outcome, other.outcome) == ("deferred", "deferred")
    assert min(first.wait_ms, other.wait_ms) >= 8500
    assert len(rig.port.requests) == 1


async def asked_for(rig: Rig, find: Any, *, times: int) -> list[str]:
    """How a run's call ends each time that it comes back, at once instead of when it is due."""
    started = rig.clock.now()
    outcomes: list[str] = []
    for _ in range(times):
        [outcome] = await rig.ask([rig.item(find, {"domain": "a.example"})], started_at=started)
        outcomes.append(outcome.outcome)
        for lane in rig.engine.dispatcher.lanes:
            lane.closed_until = float("-inf")
    return outcomes


async def test_tries_are_counted_over_all_waits_elsewhere(rig: Rig) -> None:
    """A provider that always says "come back in 9 s" was once asked, and maybe paid, for an hour: each return began to count anew."""
    find = find_tool()
    rig.port.script = answering({}, status=503, Retry_After="9")
    assert await asked_for(rig, find, times=5) == ["deferred"] * 4 + ["failed"]
    assert len(rig.port.requests) == 5
    [again] = await rig.ask([rig.item(find, {"domain": "a.example"})], run="run-2")
    assert again.outcome == "deferred", "another run tries for itself"


async def test_a_provider_that_sends_the_call_away_in_between_does_not_begin_its_tries_anew(rig: Rig) -> None:
    """A 503 may have cost money, so a provider that answers one after every 429 must not be asked for as long as the call may wait."""
    find = find_tool()
    broken, busy = answering({}, status=503, Retry_After="9"), answering({}, status=429, Retry_After="9")
    rig.port.script = in_turn(*[broken, busy] * 4, broken)
    assert await asked_for(rig, find, times=9) == ["deferred"] * 8 + ["failed"]


async def test_a_call_has_its_whole_timeout_from_dispatch_however_long_it_waited_for_its_turn(rig: Rig) -> None:
    find = find_tool(timeout=7)
    provider = Hold(rig)
    find.__rowmill_tool__.provider.configure(concurrency=1)
    items = [rig.item(find, {"domain": f"d{n}.example"}) for n in range(2)]
    rig.hand_in(items)
    while not rig.port.requests:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    provider.answer()
    for item in items:
        await rig.bus.outcome(item.call_id)
    assert [request.timeout for request in rig.port.requests] == [7.0, 7.0]
