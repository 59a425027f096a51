"""Author code that the engine calls outside of a task of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rowmill_contracts.row_keys import KeyPage
from rowmill_row_executor.handlers import keys_of
from rowmill_row_executor.stand_in import StandIn, apart


async def test_a_key_function_that_cancels_its_task_does_not_cancel_who_asked_for_the_keys() -> None:
    def key(row: dict[str, Any]) -> int:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return int(row["n"])

    page = KeyPage(run_id="run", dataset="leads", page=0, first_index=0, rows=[msgspec.Raw(b'{"n":%d}' % n) for n in range(3)])
    asked_by = asyncio.current_task()
    assert asked_by is not None
    assert len(set(apart(keys_of, key, page))) == 3
    assert asyncio.current_task() is asked_by
    assert not asked_by.cancelling()
    await asyncio.sleep(0)


async def test_each_that_is_run_in_a_stand_in_finds_a_task_that_nobody_cancelled() -> None:
    stand_in = StandIn()
    for _ in range(3):
        stand_in.enter()
        try:
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            task.cancel()
        finally:
            stand_in.leave()
        await asyncio.sleep(0)
    stand_in.end()
