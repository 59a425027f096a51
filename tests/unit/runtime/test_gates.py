"""Handlers at the gate of their queue."""

from __future__ import annotations

import asyncio

import pytest

from rowmill.runtime.gates import Gate


async def test_who_is_alone_waits_for_those_inside_and_keeps_the_others_out() -> None:
    gate = Gate()
    order: list[str] = []
    await gate.enter()

    async def alone() -> None:
        async with gate.closed():
            assert await gate.idle(60)
            order.append("alone")

    async def other() -> None:
        await gate.enter()
        order.append("other")
        gate.leave()

    tasks = [asyncio.create_task(alone())]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(other()))
    await asyncio.sleep(0)
    assert order == []
    gate.leave()
    await asyncio.gather(*tasks)
    assert order == ["alone", "other"]


async def test_patience_ends_and_the_gate_opens_again_even_after_a_failure() -> None:
    gate = Gate()
    await gate.enter()
    assert not await gate.idle(0)
    with pytest.raises(ZeroDivisionError):
        async with gate.closed():
            _ = 1 / 0
    await gate.enter()


async def test_who_waits_at_the_gate_gets_in_between_two_who_want_to_be_alone() -> None:
    """However many those are, nobody waits for more than one of them."""
    gate = Gate()
    order: list[str] = []

    async def alone(name: str) -> None:
        async with gate.closed():
            order.append(f"{name} begins")
            await asyncio.sleep(0.001)
            order.append(f"{name} ends")

    async def other(name: str) -> None:
        await gate.enter()
        order.append(name)
        await asyncio.sleep(0.001)
        gate.leave()

    takers = [asyncio.create_task(alone(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    others = [asyncio.create_task(other(name)) for name in ("one", "another")]
    await asyncio.gather(*takers, *others)
    assert order == ["first begins", "first ends", "one", "another", "second begins", "second ends", "third begins", "third ends"]
