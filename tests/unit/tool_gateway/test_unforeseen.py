"""Errors that nobody foresaw: the gateway goes on keeping time and leases, and whoever waits is answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.tool_gateway.conftest import Rig


@pytest.mark.parametrize(("part", "step"), [("hand", "sweep"), ("sender", "renew"), ("shards", "_renew")])
async def test_a_clock_whose_turn_failed_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch, part: str, step: str) -> None:
    owner = getattr(rig.engine, part)
    fine = getattr(owner, step)
    turns = 0
    again = asyncio.Event()

    def fragile(*given: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns <= 2:
            raise KeyError("a mistake of ours")
        again.set()
        return fine(*given)

    monkeypatch.setattr(owner, step, fragile)
    async with asyncio.timeout(20):
        await again.wait()
    for loop in rig.engine._loops:
        loop.cancel()
    await asyncio.gather(*rig.engine._loops, return_exceptions=True)
    assert all(loop.cancelled() for loop in rig.engine._loops)
