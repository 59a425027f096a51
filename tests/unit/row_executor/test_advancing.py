"""A run's body whose lease another executor has: sent round, or waited for in hand where that executor may have died of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.suspicion import CRASHES
from rowmill_contracts.runs import AdvanceRun, RunTaken
from rowmill_row_executor.handlers import AdvanceHandler


class QuickClock:
    """Time that passes only while somebody sleeps, and then at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


class Leased:
    """Stands for the engine and its admission: the run is somebody else's until ``until``, then over."""

    def __init__(self, until: float) -> None:
        self.clock = QuickClock()
        self.admission = self
        self.until = until
        self.sent_round: list[str] = []

    async def take(self, run_id: str, *, lease_id: str) -> RunTaken:
        del run_id, lease_id
        return RunTaken(outcome="busy" if self.clock.time < self.until else "over")

    async def advance_later(self, run_id: str, *, reason: str) -> None:
        del reason
        self.sent_round.append(run_id)


def handler(leased: Leased) -> AdvanceHandler:
    unused: Any = None
    return AdvanceHandler(cast("Any", leased), unused, unused, lease_patience=12.0)


def delivery(**facts: Any) -> Delivery:
    return Delivery(AdvanceRun(run_id="r"), b"", "executor.advance.v1", **facts)


async def test_a_body_that_comes_for_the_first_time_is_sent_round_while_another_has_the_run() -> None:
    leased = Leased(until=8.0)
    await handler(leased)(delivery())
    assert (leased.sent_round, leased.clock.time) == (["r"], 0.0)


@pytest.mark.parametrize("facts", [{"deliveries": 2}, {"headers": {CRASHES: 2}}])
async def test_one_that_may_have_crashed_that_executor_is_kept_so_that_its_crashes_stay_counted(facts: dict[str, Any]) -> None:
    leased = Leased(until=8.0)
    await handler(leased)(delivery(**facts))
    assert leased.sent_round == []
    assert 8.0 <= leased.clock.time < 9.0


async def test_where_that_executor_lives_it_is_sent_round_after_all() -> None:
    leased = Leased(until=1e9)
    await handler(leased)(delivery(deliveries=2))
    assert leased.sent_round == ["r"]
    assert leased.clock.time < 13.0
