"""Decisions on a run may come in any order and any number of times: the newest one stands."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill.runtime.db import Database
from rowmill_contracts.receipts import HaltRun
from rowmill_receipt_store.pinned_plans import SERVER_SETTINGS
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import SCHEMA, Store

from .conftest import OUTPUT_LIMIT, QUEUED, RUNNING, SHARD, Caller, new_key, new_run

pytestmark = pytest.mark.servers

STANDING = "SELECT state, reason, budget, charged, decision FROM runs WHERE run_id = $1"


class World:
    """A loop, the receipts, and a look into the table."""

    def __init__(self, database_url: str) -> None:
        self.loop = asyncio.new_event_loop()
        fast = SERVER_SETTINGS | {"synchronous_commit": "off"}
        self.database = self.run(Database.connect(database_url, schema=SCHEMA, size=2, server_settings=fast))
        self.run(self.database.migrate("rowmill_receipt_store"))
        store = Store(self.database, queued_lease=QUEUED, running_lease=RUNNING, shard_lease=SHARD, answer_bytes=OUTPUT_LIMIT)
        self.receipts = Receipts(store, held_poll=0.25, output_limit=OUTPUT_LIMIT)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.database.close())
        self.loop.close()

    async def standing(self, run: str) -> tuple[Any, ...]:
        (row,) = await self.database.fetch(STANDING, run)
        return tuple(row)


@pytest.fixture(scope="module")
def world(database_url: str) -> Iterator[World]:
    made = World(database_url)
    yield made
    made.close()


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int]]:
    """Decisions as admission takes them, of which the last may be a stop; and an order in which copies of them arrive, each at least once."""
    number = draw(st.integers(1, 5))
    decisions: list[dict[str, Any]] = []
    for decision in range(1, number + 1):
        action = draw(st.sampled_from(["halt", "resume"] if decision < number else ["halt", "resume", "stop"]))
        budget = draw(st.sampled_from([None, Decimal("0.05"), Decimal(3)]))
        decisions.append({"decision": decision, "action": action, "budget": budget, "reason": f"{action} {decision}"})
    copies = draw(st.lists(st.integers(0, number - 1), max_size=5))
    return decisions, draw(st.permutations([*range(number), *copies]))


@settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(history=histories())
def test_any_order_and_repetition_of_decisions_ends_as_the_newest_says(world: World, history: tuple[list[dict[str, Any]], list[int]]) -> None:
    decisions, order = history
    run = new_run()

    async def arrive() -> None:
        newest = 0
        for index in order:
            decision = decisions[index]
            answer = await world.receipts.halt_run(HaltRun(run_id=run, **decision))
            assert answer.superseded == (decision["decision"] < newest)
            newest = max(newest, decision["decision"])

    world.run(arrive())
    last = decisions[-1]
    state = {"halt": "halted", "resume": "running", "stop": "stopped"}[last["action"]]
    assert world.run(world.standing(run)) == (state, last["reason"], last["budget"], Decimal(0), last["decision"])


async def test_an_older_decision_is_answered_as_superseded_and_says_how_the_run_stands(ann: Caller) -> None:
    await ann.decided("halt", decision=2, reason="pause")

    late = await ann.decided("resume", decision=1, budget=Decimal(9))

    assert (late.state, late.superseded, late.reason) == ("halted", True, "pause")
    assert (await ann.claim(new_key())).state == "halted"
    again = await ann.decided("halt", decision=2, reason="pause")
    assert (again.state, again.superseded) == ("halted", False)
    assert (await ann.decided("resume", decision=3)).state == "running"
    assert (await ann.claim(new_key(), cost=Decimal(5))).state == "granted"


async def test_a_stop_stands_whatever_was_decided_before_or_after_it(ann: Caller, bob: Caller) -> None:
    await ann.decided("resume", decision=3)
    assert (await ann.decided("stop", decision=2)).state == "stopped"
    assert (await bob.decided("stop", decision=2)).state == "stopped"
    assert (await bob.decided("resume", decision=3)).state == "stopped"


async def test_a_copy_of_a_resumption_does_not_lift_a_halt_that_the_store_set_since(ann: Caller, key: bytes) -> None:
    resumed = {"decision": 1, "budget": Decimal("0.05")}
    await ann.decided("resume", **resumed)
    await ann.claim(key, confirm=True, cost=Decimal("0.01"))
    await ann.complete(key, cost="0.07")

    copy = await ann.decided("resume", **resumed)

    assert (copy.state, copy.superseded) == ("halted", False)
    assert key.hex()[:12] in copy.reason
