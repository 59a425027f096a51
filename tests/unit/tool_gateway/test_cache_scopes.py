"""Who shares the result of a call: from the author's ``cache=`` and ``stale_after=``, through the executor's key, to the gateway's requests."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import FindIn, Rig, answering, find_tool, in_turn, lost

from rowmill.errors import DefinitionError
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.tools import CallOutcome
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.tool_calling import prepare

STARTED = 1_000_000_000.0


class Author:
    """Rows of runs that call one tool with one input, prepared by the executor and sent by the gateway."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        self.rig = rig
        self.tool = find_tool(**options)
        self._calls = 0

    async def call(self, *, run: str = "run-1", play: str = "leads", row: str = "leads/1", started_at: float = STARTED, **said: Any) -> CallOutcome:
        self._calls += 1
        asker = Asker(run, "acme", play, started_at)
        call = prepare(asker, f"call-{self._calls}", tool=self.tool, input=FindIn(domain="a.example"), caller=row, asked=self.rig.clock.now(), **said)
        return (await self.rig.ask([call.item], run=run, started_at=started_at))[0]

    @property
    def requests(self) -> int:
        return len(self.rig.port.requests)


@pytest.mark.parametrize(
    ("cache", "same_run", "same_play", "other_play"),
    [("org", 1, 1, 1), ("play", 1, 1, 2), ("run", 1, 2, 3), ("none", 2, 3, 4)],
)
async def test_equal_calls_share_one_request_as_far_as_the_tool_says(rig: Rig, cache: str, same_run: int, same_play: int, other_play: int) -> None:
    author = Author(rig, cache=cache)

    await author.call()
    await author.call(row="leads/2")
    assert author.requests == same_run
    await author.call(run="run-2")
    assert author.requests == same_play
    await author.call(run="run-3", play="others")
    assert author.requests == other_play


@pytest.mark.parametrize("cache", ["org", "play", "run", "none"])
async def test_a_logical_call_is_paid_for_once_however_often_its_row_is_worked(rig: Rig, cache: str) -> None:
    """Delivered again, worked again after it was parked, replayed under another attempt: it is the same run, row and call id."""
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))
    author = Author(rig, cache=cache)
    rig.port.script = in_turn(answering({}, status=429, Retry_After="0.06"), answering({"email": "a"}))
    parked = await author.call()
    assert parked.outcome == "deferred"
    while (first := await author.call()).outcome == "deferred":
        pass

    again = [await author.call() for _ in range(3)]

    assert [(outcome.outcome, outcome.execution, outcome.cost) for outcome in (first, *again)] == [("completed", "live", Decimal("0.01"))] * 4
    assert len({bytes(outcome.result) for outcome in again}) == 1
    assert author.requests == 2
    assert rig.store.runs["run-1"].charged() == Decimal("0.01")


async def test_a_logical_call_of_unknown_outcome_is_not_made_again_by_its_row(rig: Rig) -> None:
    author = Author(rig, cache="none", effect="non_idempotent")
    rig.port.script = in_turn(lost, answering({"email": "a"}))
    assert [(await author.call()).outcome for _ in range(3)] == ["unknown"] * 3
    assert author.requests == 1
    assert (await author.call(row="leads/2")).outcome == "completed"


async def test_calls_of_one_row_with_ids_of_their_own_are_calls_of_their_own(rig: Rig) -> None:
    author = Author(rig, cache="none")
    for call_id in ("morning", "evening", "morning"):
        await author.call(id=call_id)
    assert author.requests == 2


def test_no_name_can_be_taken_for_another_call(rig: Rig) -> None:
    """Whatever ids and keys hold, two logical calls never have one key."""
    tool = find_tool(cache="none")
    keys = set()
    for run, caller, call_id in (("r", "d/k", "x"), ("r", "d", "k/x"), ("r/d", "k", "x"), ('r","d', "k", "x")):
        call = prepare(Asker(run, "acme", "p", STARTED), "1", tool=tool, input=FindIn(domain="a"), caller=caller, asked=0.0, id=call_id)
        keys.add(call.item.receipt_key)
    assert len(keys) == 4


async def test_results_serve_as_long_as_the_tool_or_the_call_says_judged_at_the_runs_start(rig: Rig) -> None:
    author = Author(rig, stale_after="1h")
    now = rig.clock.now()
    await author.call(started_at=now)
    for run, later, said, requests in (
        ("run-2", 3_500, {}, 1),
        ("run-3", 3_700, {"stale_after": "2h"}, 1),
        ("run-4", 3_700, {}, 2),
        ("run-5", 3_500, {"stale_after": 60}, 3),
    ):
        await author.call(run=run, started_at=now + later, **said)
        assert author.requests == requests, run


async def test_what_was_fresh_when_the_run_started_serves_it_to_its_end(rig: Rig) -> None:
    author = Author(rig, stale_after=0.05)
    await author.call()
    started = rig.clock.now()
    [stored] = rig.store.receipts.values()
    assert stored.output is not None
    stored.output = msgspec.structs.replace(stored.output, completed_at=started - 0.04)

    assert (await author.call(run="run-2", started_at=started)).execution == "cache"
    assert author.requests == 1
    assert (await author.call(run="run-3", started_at=started + 0.02)).execution == "live"
    assert author.requests == 2


def test_another_word_for_cache_is_refused() -> None:
    with pytest.raises(DefinitionError, match="cache must be one of org, play, run, none, not 'all'"):
        find_tool(cache="all")
