"""A shard goes from one gateway to another: nothing is lost, repeated, or open beyond what is declared, and nobody waits for a lease to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.tool_gateway.conftest import Hold, Rig, answering, find_tool

from rowmill.errors import AskTimeout
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.digests import SHARDS, shard_of
from rowmill_contracts.events import AskLanes
from rowmill_contracts.shards import LeaseShard, OpenRequests
from rowmill_contracts.tools import ToolCalls
from rowmill_tool_gateway.handlers import Handlers
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse, MaySend, always
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.sharing import shares

SHARD = shard_of("acme", "hunter")
FIRST = "first"
SECOND = next(name for name in (f"second-{number}" for number in range(100)) if SHARD in shares([FIRST, name])[name])
"""The name of a gateway to which the shard goes when it comes."""
THEIRS = sorted(shares([FIRST, SECOND])[SECOND])
LANE = "acme/hunter"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def present(rig: Rig, holder: str, number: int = 0) -> AsyncIterator[None]:
    """A gateway of that name is there, and does nothing. ``number``: of what it says, which is newer than what has a lower one."""

    async def say() -> None:
        while True:
            rig.store.answer(LeaseShard(holder=holder, shards=[], number=number))
            await asyncio.sleep(0.02)

    saying = asyncio.create_task(say())
    yield
    saying.cancel()


@pytest.fixture
def patient(settings: ToolGatewaySettings) -> ToolGatewaySettings:
    """Calls are held until something else lets them go, and claimed as soon as they come."""
    return settings.model_copy(update={"hand": 10.0, "claim_ahead": 60.0})


def holder(rig: Rig) -> str:
    shard = rig.store.shards.get(SHARD)
    return "" if shard is None else shard.holder


async def test_a_shard_that_is_anothers_is_given_up_with_what_is_not_sent_and_what_is_open_is_told(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=2)
    items = [first.item(find, {"domain": f"{number}.example"}) for number in range(8)]
    first.hand_in(items)
    await until(lambda: provider.open == 2 and first.bus.claims > 2)
    async with present(first, SECOND):
        await until(lambda: holder(first) == "")
        assert first.store.gateways[FIRST].open == [OpenRequests(LANE, 2)], "told before anyone could take the shard"
        unsent = [item for item in items if item.call_id in first.bus.outcomes]
        assert len(unsent) == 6
        assert {first.bus.outcomes[item.call_id].outcome for item in unsent} == {"deferred"}
        assert all(first.bus.outcomes[item.call_id].wait_ms <= 1000 * patient.shard_drain for item in unsent), "they go to the next one soon"
        states = {item.call_id: receipt.state for item in items if (receipt := first.store.receipts.get(item.receipt_key)) is not None}
        assert {states.get(item.call_id, "released") for item in unsent} == {"released"}, "and find nothing claimed there"
        await until(lambda: set(first.stepped_back) == set(THEIRS))

        provider.answer()
        sent = [item for item in items if item not in unsent]
        assert [(await first.bus.outcome(item.call_id)).outcome for item in sent] == ["completed"] * 2, "what was sent is finished"
        await until(lambda: first.store.gateways[FIRST].open == [])
        assert len(first.port.requests) == 2
    await first.stop()


async def test_what_is_in_hand_goes_on_being_sent_while_the_next_one_gathers_what_comes(patient: ToolGatewaySettings) -> None:
    """It asks for the shard as soon as that is given up: by the time of its own it would ask too late for this test."""
    first = Rig(patient.model_copy(update={"shard_parting": 600.0}), holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=2)
    before = [first.item(find, {"domain": f"{number}.example"}) for number in range(8)]
    first.hand_in(before)
    await until(lambda: provider.open == 2)
    second = Rig(patient.model_copy(update={"shard_retry": 600.0}), first.store, holder=SECOND)
    first.others.append(second)
    after = [second.item(find, {"domain": f"{number}.example"}) for number in range(10, 14)]
    await until(lambda: set(first.stepped_back) == set(THEIRS))
    second.hand_in(after)
    await until(lambda: any(SHARD in request.shards for request in second.bus.asked if isinstance(request, LeaseShard)))
    assert holder(first) == FIRST
    assert second.port.requests == []
    before.append(first.item(find, {"domain": "late.example"}))
    first.hand_in(before[-1:])  # had been sent here before
    provider.answer()
    assert [(await first.bus.outcome(item.call_id)).outcome for item in before] == ["completed"] * 9
    assert [(await second.bus.outcome(item.call_id)).outcome for item in after] == ["completed"] * 4
    assert first.stepped_back.count(SHARD) == 1
    await first.stop()
    await second.stop()


async def test_who_has_a_shard_now_learns_at_once_that_requests_have_ended_that_were_open_before(patient: ToolGatewaySettings) -> None:
    patient = patient.model_copy(update={"hand": 200.0})
    first = Rig(patient.model_copy(update={"shard_retry": 30.0}), holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=2)
    first.hand_in([first.item(find, {"domain": f"{number}.example"}) for number in range(2)])
    await until(lambda: provider.open == 2)
    second = Rig(patient.model_copy(update={"shard_retry": 600.0, "shard_renewal": 600.0}), first.store, holder=SECOND)
    first.others.append(second)
    async with present(first, SECOND, 1000):  # it asks no more by itself, but when it is told something
        await until(lambda: holder(first) == "")
        second.hand_in([second.item(find, {"domain": "10.example"})])
        await until(lambda: holder(first) == SECOND)
        first.store.shards[SHARD].expires = first.clock.now() + 600.0
        assert second.port.requests == []
        provider.answer()
        await until(lambda: len(second.bus.outcomes) == 1)
    await first.stop()
    await second.stop()


async def test_a_page_whose_handler_was_cancelled_with_its_session_is_let_go_like_any_other(patient: ToolGatewaySettings) -> None:
    """What was claimed for it was renewed for as long as its gateway lived, and whoever was given the page then was told to wait for that."""
    first = Rig(patient, holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=2)
    items = [first.item(find, {"domain": f"{number}.example"}) for number in range(8)]
    message = ToolCalls(run_id="run-1", org="acme", play="leads", started_at=first.clock.now(), calls=items)
    delivery = Delivery(message=message, body=b"", queue="", message_id="page", reply_to="replies.executor")
    handling = asyncio.create_task(Handlers(first.engine, first.bus).calls(delivery))
    await until(lambda: provider.open == 2 and first.bus.claims > 2)
    handling.cancel()
    await asyncio.gather(handling, return_exceptions=True)
    async with present(first, SECOND):
        await until(lambda: holder(first) == "")
        await until(lambda: len(first.bus.outcomes) == 6)
        states = Counter(receipt.state for item in items if (receipt := first.store.receipts.get(item.receipt_key)) is not None)
        assert states["running"] == 2, "that are sent"
        assert states["queued"] == 0
        provider.answer()
        await until(lambda: len(first.bus.outcomes) == 8)
    await first.stop()


class TwoRequests:
    """A port that asks for the right to send twice for a call, as a function does that makes two requests: the second time when it is told to."""

    def __init__(self, rig: Rig) -> None:
        self.go_on = asyncio.Event()
        self.rights: list[bool] = []
        rig.port.send = self.send  # type: ignore[method-assign]

    async def send(self, request: HttpRequest, may_send: MaySend = always) -> HttpResponse:
        self.rights.append(may_send())
        await self.go_on.wait()
        self.rights.append(may_send())
        return await answering({"email": "a@example"})(request)


class Late:
    """What gives shards up is not answered, nor carried out before it is said."""

    def __init__(self, rig: Rig) -> None:
        self.requests: list[LeaseShard] = []
        self.over = False
        self._ask = rig.bus.ask
        rig.bus.ask = self.ask  # type: ignore[method-assign]

    async def ask(self, message: Any, key: str, answer: Any, *, timeout: float | None = None) -> Any:
        if isinstance(message, LeaseShard) and message.release and not self.over:
            self.requests.append(message)
            raise AskTimeout("no answer")
        return await self._ask(message, key, answer, timeout=timeout)


async def test_a_shard_that_was_given_up_without_an_answer_is_not_spent_in_under_the_same_term(settings: ToolGatewaySettings) -> None:
    """It may be carried out at any moment, and another gateway takes the shard."""
    first = Rig(settings.model_copy(update={"hand": 60.0, "shard_again": 600.0}), holder=FIRST)
    find = find_tool()
    await first.ask([first.item(find, {"domain": "a.example"})])
    term = first.engine.shards.term(SHARD)
    late = Late(first)
    first.engine.reconnected()
    await until(lambda: late.requests != [])
    item = first.item(find, {"domain": "b.example"})
    first.hand_in([item])
    asked = len(first.bus.asked)
    await until(lambda: sum(SHARD in request.shards for request in first.bus.asked[asked:] if isinstance(request, LeaseShard)) >= 3)
    assert (holder(first), len(first.port.requests)) == (FIRST, 1)
    late.over = True
    assert (await first.bus.outcome(item.call_id)).outcome == "completed"
    assert first.engine.shards.term(SHARD) != term
    for request in late.requests:
        first.store.answer(request)
    assert holder(first) == FIRST
    await first.stop()


async def test_what_a_function_has_begun_is_not_cut_in_two_by_a_hand_over(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    function = TwoRequests(first)
    item = first.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})
    first.hand_in([item])
    await until(lambda: function.rights == [True])
    second = Rig(patient, first.store, holder=SECOND)
    second.hand_in([second.item(find_tool(), {"domain": "b.example"})])
    await until(lambda: holder(first) == SECOND)
    function.go_on.set()
    assert (await first.bus.outcome(item.call_id)).outcome == "completed"
    assert function.rights == [True, True]
    await first.stop()
    await second.stop()


async def test_a_function_whose_lane_was_taken_away_sends_no_more(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    function = TwoRequests(first)
    item = first.item(find_tool(), {"domain": "a.example"})
    first.hand_in([item])
    await until(lambda: function.rights == [True])
    shard = first.store.shards[SHARD]
    shard.ended_term, shard.term, shard.holder, shard.expires = shard.term, shard.term + 1, "another", first.clock.now() + 100
    await until(lambda: not first.engine.shards.holds(SHARD))
    function.go_on.set()
    await until(lambda: len(function.rights) == 2)
    assert function.rights == [True, False]
    await first.stop()


async def test_requests_that_end_soon_are_waited_for_so_that_nothing_is_open(patient: ToolGatewaySettings) -> None:
    first = Rig(patient.model_copy(update={"shard_drain": 60.0}), holder=FIRST)
    provider = Hold(first)
    item = first.item(find_tool(), {"domain": "a.example"})
    first.hand_in([item])
    await until(lambda: provider.open == 1)
    async with present(first, SECOND):
        await until(lambda: first.stepped_back != [] and not first.engine.shards.holds(SHARD))
        assert holder(first) == FIRST
        provider.answer()
        await until(lambda: holder(first) == "")
        assert (await first.bus.outcome(item.call_id)).outcome == "completed"
        assert first.store.gateways[FIRST].open == []
    await first.stop()


async def test_who_takes_a_shard_counts_what_its_former_holder_has_open(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=3)
    first.hand_in([first.item(find, {"domain": f"{number}.example"}) for number in range(2)])
    await until(lambda: provider.open == 2)
    second = Rig(patient, first.store, holder=SECOND)
    after = Hold(second)
    await until(lambda: holder(first) == "")
    second.hand_in([second.item(find, {"domain": f"{number}.example"}) for number in range(10, 20)])
    await until(lambda: after.open > 0)
    for _ in range(5):
        await asyncio.sleep(second.settings.shard_renewal)
        assert provider.open + after.open == 3
    provider.answer()
    await until(lambda: after.open == 3)
    after.answer()
    await until(lambda: len(second.bus.outcomes) == 10)
    await first.stop()
    await second.stop()


async def test_who_takes_a_shard_knows_what_its_former_holder_sent(patient: ToolGatewaySettings) -> None:
    settings = patient.model_copy(update={"hand": 600.0})
    first = Rig(settings, holder=FIRST)
    find = find_tool(rate="4/600s", burst=4)
    await first.ask([first.item(find, {"domain": f"{number}.example"}) for number in range(3)])
    second = Rig(settings, first.store, holder=SECOND)
    await until(lambda: holder(first) == "")
    second.hand_in([second.item(find, {"domain": f"{number}.example"}) for number in range(10, 13)])
    await until(lambda: len(second.port.requests) > 0)
    await until(lambda: len(second.bus.outcomes) == len(second.port.requests))
    [lane] = second.engine.show(AskLanes()).lanes
    assert (lane.held, lane.permits, lane.waiting) == (True, 0, 2)
    assert len(first.port.requests) + len(second.port.requests) == 4, "as many as the window holds"
    second.engine.hand.put_down()
    await first.stop()
    await second.stop()


async def test_who_leaves_hands_over_at_once_though_it_waits_for_what_it_has_open(patient: ToolGatewaySettings) -> None:
    first = Rig(patient, holder=FIRST)
    provider = Hold(first)
    find = find_tool(concurrency=2)
    items = [first.item(find, {"domain": f"{number}.example"}) for number in range(4)]
    first.hand_in(items)
    await until(lambda: provider.open == 2)
    leaving = asyncio.create_task(first.engine.stop(60.0))
    await until(lambda: holder(first) == "")
    assert (first.store.gateways[FIRST].open, first.store.gateways[FIRST].serving) == ([OpenRequests(LANE, 2)], False)
    assert len(first.bus.outcomes) == 2
    second = Rig(patient, first.store, holder=SECOND)
    after = Hold(second)
    second.hand_in([second.item(find, {"domain": f"{number}.example"}) for number in range(10, 12)])
    await until(lambda: holder(first) == SECOND)
    assert after.open == 0
    provider.answer()
    await leaving
    await until(lambda: after.open == 2)
    after.answer()
    await until(lambda: len(second.bus.outcomes) == 2)
    assert first.store.gateways[FIRST].open == []
    assert {outcome.outcome for outcome in first.bus.outcomes.values()} == {"deferred", "completed"}
    await second.stop()


async def test_calls_of_anothers_shard_are_sent_away_and_stepped_back_from_and_taken_where_they_come_again(settings: ToolGatewaySettings) -> None:
    first = Rig(settings.model_copy(update={"hand": 60.0, "shard_again": 60.0}), holder=FIRST)
    find = find_tool()
    async with present(first, SECOND):
        await until(lambda: set(first.stepped_back) == set(THEIRS))
        await until(lambda: not any(first.engine.shards.sends_away(shard) for shard in range(SHARDS)))
        first.engine.shards._sharing.stepped(SHARD, first.clock.monotonic() - 120.0)
        [outcome] = await first.ask([first.item(find, {"domain": "a.example"})])
        assert outcome.outcome == "deferred"
        assert holder(first) == ""
        await until(lambda: first.stepped_back.count(SHARD) == 2)
        await until(lambda: not first.engine.shards.sends_away(SHARD))
        [outcome] = await first.ask([first.item(find, {"domain": "a.example"})])
        assert outcome.outcome == "completed", "whose share it is seems to take no calls"
        assert holder(first) == FIRST
        assert not first.engine.shards.may_take(SHARD), "what may have crashed a gateway waits for whose share it is"
    await first.stop()


async def test_over_a_reconnect_a_gateway_keeps_its_share(settings: ToolGatewaySettings) -> None:
    """Whoever gets its calls first steps back; without a share it lets go of what it has no calls of."""
    second = Rig(settings, holder=SECOND)
    find = find_tool()
    await second.ask([second.item(find, {"domain": "a.example"})])
    second.engine.reconnected()
    await until(lambda: holder(second) == "")
    async with present(second, FIRST):
        await until(lambda: second.stepped_back != [])
        await second.ask([second.item(find, {"domain": "b.example"})])
        term = second.engine.shards.term(SHARD)
        asked = len(second.bus.asked)
        second.engine.reconnected()
        await until(lambda: sum(isinstance(request, LeaseShard) for request in second.bus.asked[asked:]) >= 3)
        assert second.engine.shards.term(SHARD) == term is not None
    await second.stop()
