"""The broker goes away while calls are in hand: nothing more is sent, and what was sent is stored as soon as it is back."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.tool_gateway.conftest import Hold, Rig, find_tool

from rowmill_contracts.receipts import Complete
from rowmill_tool_gateway.settings import ToolGatewaySettings


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_without_a_session_what_is_claimed_is_not_sent(settings: ToolGatewaySettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome could not be stored: it would only be one more that another gateway may have to ask for again."""
    rig = Rig(settings.model_copy(update={"claim_ahead": 10.0, "hand": 60.0}))
    provider = Hold(rig)
    find = find_tool(concurrency=1)
    first, second = rig.item(find, {"domain": "a.example"}), rig.item(find, {"domain": "b.example"})
    connected = True
    monkeypatch.setattr(rig.engine._receipts, "_connected", lambda: connected)
    async with asyncio.timeout(10):
        rig.hand_in([first, second])
        while rig.bus.claims < 2 or not rig.port.requests:
            await asyncio.sleep(0)
        connected = False
        provider.answer()
        await rig.bus.outcome(first.call_id)
        await turns(100)
        assert len(rig.port.requests) == 1
        connected = True
        rig.engine.reconnected()
        assert (await rig.bus.outcome(second.call_id)).outcome == "completed"
    await rig.stop()


async def test_an_outcome_that_waits_is_stored_once_there_is_a_session_again(settings: ToolGatewaySettings) -> None:
    """Whatever the wait between tries has come to: who asks for its key meanwhile would send it again."""
    rig = Rig(settings.model_copy(update={"store_timeout": 3_600.0}))
    rig.bus.silent = {Complete}
    find = find_tool()
    item = rig.item(find, {"domain": "a.example"})
    async with asyncio.timeout(10):
        rig.hand_in([item])
        while sum(isinstance(asked, Complete) for asked in rig.bus.asked) < 12:  # by now the waits are of minutes
            rig.engine.reconnected()
            await asyncio.sleep(0)
        rig.bus.silent = set()
        rig.engine.reconnected()
        assert (await rig.bus.outcome(item.call_id)).outcome == "completed"
    assert len(rig.port.requests) == 1
    await rig.stop()
