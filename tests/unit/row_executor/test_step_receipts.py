"""Whose lease a step runs under: claims that are not answered, are answered late, or are another's; leases that move."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill_contracts.envelope import Message
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import ClaimReceipts, Complete, Confirm, Release
from rowmill_row_executor import step_receipts
from rowmill_row_executor.ports import Asker

from .conftest import until
from .step_executors import HOLD, RUN, Now, step_of


async def test_an_outcome_whose_storing_was_not_answered_is_asked_for_again(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    here.asks.lose, here.asks.drop = [Complete], [Complete]
    assert bytes((await here.run(lambda: 7)).result) == b'{"raw":7}'
    assert here.asks.of(Complete) == 3
    assert [receipt.state for receipt in store.receipts.values()] == ["completed"]


@pytest.mark.parametrize("kind", [ClaimReceipts, Confirm])
@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_claim_that_was_not_answered_is_asked_for_again_and_is_the_same_claim(
    new_executor: Any, store: MemoryReceipts, kind: type[Message], carried_out: bool
) -> None:
    here = new_executor()
    (here.asks.lose if carried_out else here.asks.drop).append(kind)
    assert (await here.run(lambda: 7, effect="non_idempotent")).outcome == "completed"
    assert here.asks.of(kind) == 2
    assert [receipt.dispatch for receipt in store.receipts.values()] == [1]


async def test_a_claim_that_nobody_waits_for_any_more_is_asked_for_no_more_and_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    here.asks.go.clear()
    here.asks.lose, here.asks.drop = [ClaimReceipts], [Release]
    running = asyncio.ensure_future(here.run(lambda: 7))
    await until(lambda: here.asks.of(ClaimReceipts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert (here.asks.of(ClaimReceipts), here.asks.of(Release)) == (1, 2)


async def test_a_claim_that_is_answered_after_its_row_has_gone_is_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here, there = new_executor(), new_executor()
    here.asks.go.clear()
    running = asyncio.ensure_future(here.run(lambda: 7))
    await until(lambda: here.asks.of(ClaimReceipts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert (await there.run(lambda: 8)).outcome == "completed"


async def test_a_claim_that_is_answered_as_its_row_goes_is_given_back(
    new_executor: Any, store: MemoryReceipts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_executor()
    tell = step_receipts._tell

    def told_too_late(*facts: Any) -> None:
        tell(*facts)
        running.cancel()

    running = asyncio.ensure_future(here.run(lambda: 7))
    monkeypatch.setattr(step_receipts, "_tell", told_too_late)
    await asyncio.gather(running, return_exceptions=True)
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]


async def test_a_claim_of_a_row_that_was_begun_by_hand_and_dropped_is_given_back(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    await here.run(lambda: 1)
    store.receipts.clear()
    here.asks.go.clear()
    by_hand = here.run(lambda: 2)
    by_hand.send(None)
    await until(lambda: here.asks.of(ClaimReceipts) == 2)
    by_hand.close()
    here.asks.go.set()
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values()] == ["released"]
    assert bytes((await here.run(lambda: 3)).result) == b'{"raw":3}'


async def test_a_step_that_another_executor_runs_is_waited_for_and_not_run(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    go = asyncio.Event()

    async def slow() -> int:
        await go.wait()
        return 1

    first = asyncio.ensure_future(there.run(slow))
    await until(lambda: there.leases.lost)
    second = asyncio.ensure_future(here.run(lambda: pytest.fail("it is run there")))
    await until(lambda: here.asks.of(ClaimReceipts) > 3)
    go.set()
    assert [bytes((await each).result) for each in (first, second)] == [b'{"raw":1}'] * 2


async def test_it_is_waited_for_no_longer_than_the_hand_holds(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    never = asyncio.Event()
    running = asyncio.ensure_future(there.run(never.wait, run="run-2", stale_after=60))
    await until(lambda: there.leases.lost)
    outcome = await here.run(never.wait, stale_after=60)
    assert (outcome.outcome, outcome.wait_ms) == ("deferred", 5000)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await there.receipts.drain()
    never.set()
    assert (await here.run(never.wait, stale_after=60)).outcome == "completed"


async def test_what_its_own_run_left_behind_is_waited_for_until_its_executor_counts_as_dead(new_executor: Any, store: MemoryReceipts) -> None:
    here, there = new_executor(), new_executor()
    dead = asyncio.ensure_future(there.run(asyncio.Event().wait))
    await until(lambda: there.leases.lost)
    again = asyncio.ensure_future(here.run(lambda: 1))
    await asyncio.sleep(3 * HOLD)
    store.answer(KeepPresence(presence=there.leases.names[0], leave=True))
    assert (await again).outcome == "completed"
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)


async def test_who_loses_a_lease_stops_and_gets_what_the_other_stored(new_executor: Any, now: Now) -> None:
    here, there = new_executor(), new_executor()
    stopped = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    running = asyncio.ensure_future(here.run(slow))
    await until(lambda: here.leases.lost)
    now.time += 100
    there.leases.names.clear()
    assert bytes((await there.run(lambda: 2)).result) == b'{"raw":2}'
    for lost in list(here.leases.lost.values()):
        lost()
    assert bytes((await running).result) == b'{"raw":2}'
    assert stopped.is_set()


async def test_a_result_that_comes_after_its_lease_moved_serves_its_row_alone(new_executor: Any, store: MemoryReceipts, now: Now) -> None:
    here, there = new_executor(), new_executor()
    go = asyncio.Event()

    async def slow() -> int:
        await go.wait()
        return 1

    running = asyncio.ensure_future(here.run(slow))
    await until(lambda: here.leases.lost)
    now.time += 100
    await there.run(lambda: 2)
    go.set()
    assert bytes((await running).result) == b'{"raw":1}'
    [receipt] = store.receipts.values()
    assert receipt.output is not None
    assert bytes(receipt.output.output) == b'{"raw":2}'


async def test_a_process_whose_presence_has_ended_goes_on_under_another(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    await here.run(lambda: 1)
    store.answer(KeepPresence(presence=here.leases.names[0], leave=True))
    assert (await here.run(lambda: 2, semantic_key=2)).outcome == "completed"
    assert len(here.leases.names) == 2


async def test_a_newer_body_takes_over_at_once(new_executor: Any) -> None:
    here, there = new_executor(), new_executor()
    asker = Asker(RUN, "org", "play", 0.0)
    older = asyncio.ensure_future(here.runner.run(asker, step_of(asker, asyncio.Event().wait), run_term=1))
    await until(lambda: here.leases.lost)
    newer = await there.runner.run(asker, step_of(asker, lambda: 2), run_term=2)
    assert bytes(newer.result) == b'{"raw":2}'
    older.cancel()
    await asyncio.gather(older, return_exceptions=True)
