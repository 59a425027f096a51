"""Steps whose requests no receipt-store survives or answers, and processes that run out of memory: each ends, and holds up no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fakes.clocks import HurriedClock
from tests.fakes.receipts import MemoryReceipts

from rowmill.errors import AskDied
from rowmill_contracts.receipts import ClaimReceipts, Complete, Confirm
from rowmill_contracts.tools import CallOutcome
from rowmill_row_executor import step_runner

from .conftest import until


async def test_steps_that_are_ready_together_are_claimed_together(new_executor: Any) -> None:
    here = new_executor()
    await here.run(lambda: 0)
    before = here.asks.of(ClaimReceipts)
    await asyncio.gather(*(here.run(lambda: 1, semantic_key=number) for number in range(500)))
    assert here.asks.of(ClaimReceipts) - before < 10
    assert here.asks.of(Complete) < 12


async def test_a_claim_that_no_store_survives_fails_alone(new_executor: Any) -> None:
    here = new_executor()
    await here.run(lambda: 0)
    here.asks.deadly = "bad"
    runs = ["bad" if number == 7 else f"run-{number}" for number in range(20)]
    outcomes = await asyncio.gather(*(here.run(lambda: 1, run=run) for run in runs))
    assert [run for run, outcome in zip(runs, outcomes, strict=True) if outcome.outcome != "completed"] == ["bad"]
    assert outcomes[7].failure.code == "dead_lettered"


@pytest.mark.parametrize(("error", "code"), [(AskDied, "dead_lettered"), (RuntimeError, "claim_failed")])
async def test_a_step_whose_confirmation_no_store_survives_fails_alone_and_unbegun(
    new_executor: Any, store: MemoryReceipts, error: type[Exception], code: str
) -> None:
    here = new_executor(HurriedClock())
    await here.run(lambda: 0)
    here.asks.unconfirmed = error
    runs = [*(f"run-{number}" for number in range(20)), "unconfirmed"]
    done: list[str] = []

    async def one(run: str) -> CallOutcome:
        return await here.run(lambda: done.append(run), run=run, effect="non_idempotent")  # type: ignore[no-any-return]

    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*map(one, runs))
    assert sorted(done) == sorted(runs[:-1])
    assert {outcome.outcome for outcome in outcomes[:-1]} == {"completed"}
    failure = outcomes[-1].failure
    assert failure is not None
    assert (outcomes[-1].outcome, failure.code) == ("failed", code)
    assert "dead-lettered" in failure.message
    await here.receipts.drain()
    assert [receipt.state for receipt in store.receipts.values() if receipt.claim.run_id == "unconfirmed"] == ["released"]


async def test_steps_of_a_process_that_cannot_say_that_it_is_there_fail(new_executor: Any) -> None:
    here = new_executor()

    async def gone(instead_of: str = "") -> str:
        raise AskDied("dead-lettered")

    here.leases.present = gone
    outcome = await here.run(lambda: pytest.fail("it has no lease"))
    assert (outcome.outcome, outcome.failure.code) == ("failed", "dead_lettered")


@pytest.mark.parametrize("error", [AskDied, RuntimeError])
async def test_an_outcome_that_cannot_be_stored_holds_up_no_other_of_its_page_and_is_given_up(new_executor: Any, error: type[Exception]) -> None:
    here = new_executor(HurriedClock())
    await here.run(lambda: 0)
    here.asks.odd = {"bad-done": error, "bad-failed": error, "bad-gone": error}
    runs = [*(f"run-{number}" for number in range(20)), "bad-done"]
    done = asyncio.gather(*(here.run(lambda: 1, run=run) for run in runs))
    failed = asyncio.gather(*(here.run(lambda: 1 / 0, run=run) for run in ("run-x", "bad-failed")))
    gone = asyncio.ensure_future(here.run(asyncio.Event().wait, run="bad-gone"))
    await until(lambda: any(lease for lease in here.leases.lost))
    async with asyncio.timeout(20):
        assert [run for run, outcome in zip(runs, await done, strict=True) if outcome.outcome != "completed"] == ["bad-done"]
        assert [outcome.failure.message for outcome in await failed] == ["step 'work' failed: ZeroDivisionError: division by zero"] * 2
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await here.receipts.drain()


@pytest.mark.parametrize(("effect", "state"), [("idempotent", "released"), ("non_idempotent", "outcome_unknown")])
async def test_a_step_that_runs_out_of_memory_leaves_no_lease_behind_when_its_process_is_told(
    new_executor: Any, store: MemoryReceipts, effect: str, state: str
) -> None:
    def greedy() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await new_executor().run(greedy, effect=effect)
    assert [receipt.state for receipt in store.receipts.values()] == [state]


async def test_a_process_without_memory_waits_for_no_store_that_does_not_answer(new_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner, "_LAST_WORD", 0.01)
    here = new_executor()

    def greedy() -> None:
        here.asks.go.clear()
        raise MemoryError

    async with asyncio.timeout(20):
        with pytest.raises(MemoryError):
            await here.run(greedy)
    here.asks.go.set()


async def test_draining_ends_where_nobody_answers(new_executor: Any) -> None:
    here = new_executor()
    running = asyncio.ensure_future(here.run(asyncio.Event().wait))
    await until(lambda: here.leases.lost)
    here.asks.go.clear()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not await here.receipts.drain(within=0.01)
    here.asks.go.set()
    assert await here.receipts.drain(within=20)


async def test_a_cut_off_step_that_must_not_be_repeated_is_stored_as_unknown(new_executor: Any, store: MemoryReceipts) -> None:
    here = new_executor()
    running = asyncio.ensure_future(here.run(asyncio.Event().wait, effect="non_idempotent"))
    await until(lambda: here.leases.lost)
    assert here.asks.of(Confirm) == 1, "confirmed right before it is run"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await here.receipts.drain()
    assert (await here.run(lambda: pytest.fail("it may have had its effect"), effect="non_idempotent")).outcome == "unknown"
