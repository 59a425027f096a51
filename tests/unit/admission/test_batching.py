"""Many messages in one commit, each with its own outcome."""

from __future__ import annotations

import asyncio

import pytest

from rowmill.errors import UnavailableError
from rowmill_admission.batching import Batches


async def test_items_that_come_together_are_handled_together() -> None:
    flushed: list[list[int]] = []

    async def flush(items: list[int]) -> None:
        flushed.append(items)
        await asyncio.sleep(0)

    batches = Batches(flush, max_items=10, max_age=60)
    await asyncio.gather(*(batches.handle(item) for item in range(25)))
    assert sorted(item for items in flushed for item in items) == list(range(25))
    assert len(flushed) < 25


async def test_a_bad_item_fails_alone() -> None:
    async def flush(items: list[int]) -> None:
        if 3 in items:
            raise LookupError("three")

    batches = Batches(flush, max_items=10, max_age=60)
    outcomes = await asyncio.gather(*(batches.handle(item) for item in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), type(None), LookupError, type(None)]


async def test_an_outage_is_everyones() -> None:
    attempts = 0

    async def flush(items: list[int]) -> None:
        nonlocal attempts
        attempts += 1
        raise UnavailableError("away")

    batches = Batches(flush, max_items=10, max_age=60)
    for outcome in await asyncio.gather(*(batches.handle(item) for item in range(5)), return_exceptions=True):
        assert isinstance(outcome, UnavailableError)
    assert attempts == 1
    with pytest.raises(UnavailableError):
        await batches.handle(9)
