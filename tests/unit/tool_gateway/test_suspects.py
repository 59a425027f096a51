"""Calls that gateways died with: each goes alone, so that another death can be nobody's but its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pydantic import BaseModel
from tests.fakes.receipts import Receipt
from tests.unit.tool_gateway.conftest import Rig, find_tool

from rowmill import Batch, Provider, ToolCall
from rowmill_contracts.receipts import Claim, Complete, Confirm
from rowmill_contracts.tools import CallItem
from rowmill_receipt_store.deaths import USUAL
from rowmill_tool_gateway.settings import ToolGatewaySettings


class Asked(BaseModel):
    name: str


class Workshop:
    """A tool function whose calls last until they are let go. ``beside``: for each name, who was at work while it was."""

    def __init__(self, *, batch: int | None = None) -> None:
        self.at_work: set[str] = set()
        self.beside: dict[str, set[str]] = {}
        self.requests: list[list[str]] = []
        self._free: dict[str, asyncio.Event] = {}
        mill = Provider("mill", base_url="http://127.0.0.1:1", concurrency=50)
        if batch is None:

            @mill.tool("ask", effect="read")
            async def ask(asked: Asked, call: ToolCall) -> str:
                return (await self._work([asked.name]))[0]

            self.tool: Any = ask
        else:

            @mill.tool("ask_many", effect="read", batch=Batch(batch))
            async def ask_many(asked: list[Asked], call: ToolCall) -> list[str]:
                return await self._work([one.name for one in asked])

            self.tool = ask_many

    async def _work(self, names: list[str]) -> list[str]:
        self.requests.append(names)
        for name in names:
            self.beside[name] = self.at_work | set(names) - {name}
        for other in self.at_work:
            self.beside[other] |= set(names)
        self.at_work |= set(names)
        try:
            await asyncio.gather(*(self._event(name).wait() for name in names))
        finally:
            self.at_work -= set(names)
        return [name.upper() for name in names]

    def _event(self, name: str) -> asyncio.Event:
        return self._free.setdefault(name, asyncio.Event())

    def let_go(self, *names: str) -> None:
        for name in names:
            self._event(name).set()

    async def working(self, *names: str) -> None:
        async with asyncio.timeout(20):
            while self.at_work != set(names):
                await asyncio.sleep(0.001)


def call(rig: Rig, tool: Any, name: str, *, deaths: int = 0) -> CallItem:
    item = rig.item(tool, {"name": name}, row=f"leads/{name}")
    if deaths:
        claim = Claim(key=item.receipt_key, lease_id="dead", run_id="run-0", tool=item.tool, effect="read", started_at=0.0)
        rig.store.receipts[item.receipt_key] = Receipt(claim, state="released", lease_id="dead", dispatch=deaths, deaths=deaths)
    return item


NewRig = Callable[..., Rig]


@pytest.fixture
async def new_rig() -> AsyncIterator[NewRig]:
    """Makes gateways that let calls wait for as long as they want to, with what else is set."""
    made: list[Rig] = []

    def new(**settings: float) -> Rig:
        made.append(Rig(ToolGatewaySettings(hand=5.0, look_after=5.0, **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for rig in made:
        await rig.stop()


@pytest.fixture
async def patient(new_rig: NewRig) -> Rig:
    """One of them."""
    return new_rig()


async def rests() -> None:
    """Return when whatever may begin has had ample opportunity to."""
    await asyncio.sleep(0.1)


async def test_a_suspect_goes_alone_and_the_others_before_and_after_it(patient: Rig) -> None:
    shop = Workshop()
    patient.hand_in([call(patient, shop.tool, "early")])
    await shop.working("early")
    patient.hand_in([call(patient, shop.tool, "suspect", deaths=USUAL.suspected_after), call(patient, shop.tool, "beside")])
    await rests()
    beside_first = shop.at_work - {"early"}  # it may have begun before the suspect was known for one
    shop.let_go("early", *beside_first)
    await shop.working("suspect")
    late = call(patient, shop.tool, "late")
    patient.hand_in([late])
    await rests()
    assert shop.at_work == {"suspect"}
    shop.let_go("suspect")
    shop.let_go("late", "beside")
    async with asyncio.timeout(20):
        await patient.bus.outcome(late.call_id)
    assert shop.beside["suspect"] == set()
    [confirm] = [request for request in patient.bus.asked if isinstance(request, Confirm)]
    assert confirm.alone


async def test_suspects_go_one_after_the_other_and_each_call_is_made_once(patient: Rig) -> None:
    shop = Workshop()
    names = [f"n{number}" for number in range(40)]
    shop.let_go(*names)
    items = [call(patient, shop.tool, name, deaths=USUAL.suspected_after if number % 4 == 0 else 0) for number, name in enumerate(names)]
    async with asyncio.timeout(20):
        outcomes = await patient.ask(items)
    assert {outcome.outcome for outcome in outcomes} == {"completed"}
    assert Counter(name for request in shop.requests for name in request) == Counter(names)
    assert all(shop.beside[name] == set() for name in names[::4])
    assert not any(receipt.deaths for receipt in patient.store.receipts.values())


async def test_what_one_death_has_met_goes_beside_others(patient: Rig) -> None:
    shop = Workshop()
    patient.hand_in([call(patient, shop.tool, name, deaths=USUAL.suspected_after - 1) for name in "abc"])
    await shop.working(*"abc")
    shop.let_go(*"abc")


async def test_suspects_of_a_batch_tool_go_apart(patient: Rig) -> None:
    shop = Workshop(batch=8)
    names = [f"n{number}" for number in range(16)]
    shop.let_go(*names)
    suspects = {"n3", "n4", "n9"}
    items = [call(patient, shop.tool, name, deaths=USUAL.suspected_after * (name in suspects)) for name in names]
    async with asyncio.timeout(20):
        outcomes = await patient.ask(items)
    assert {outcome.outcome for outcome in outcomes} == {"completed"}
    assert sorted(name for request in shop.requests for name in request) == sorted(names)
    assert [request for request in shop.requests if suspects & set(request)] == [["n3"], ["n4"], ["n9"]]


async def test_declared_requests_go_beside_a_suspect(patient: Rig) -> None:
    shop, find = Workshop(), find_tool()
    patient.hand_in([call(patient, shop.tool, "suspect", deaths=USUAL.suspected_after)])
    await shop.working("suspect")
    dead = patient.item(find, {"domain": "a.example"})
    claim = Claim(key=dead.receipt_key, lease_id="dead", run_id="run-0", tool=dead.tool, effect="read", started_at=0.0)
    patient.store.receipts[dead.receipt_key] = Receipt(claim, state="released", lease_id="dead", dispatch=5, deaths=USUAL.suspected_after)
    async with asyncio.timeout(20):
        outcomes = await patient.ask([dead, patient.item(find, {"domain": "b.example"})])
    assert [outcome.outcome for outcome in outcomes] == ["completed"] * 2
    shop.let_go("suspect")


async def test_a_suspect_that_lasts_lets_others_in_once_the_store_was_told(new_rig: NewRig) -> None:
    rig = new_rig(suspect_patience=0.2)
    shop = Workshop()
    suspect = call(rig, shop.tool, "suspect", deaths=USUAL.suspected_after)
    rig.hand_in([suspect])
    await shop.working("suspect")
    rig.hand_in([call(rig, shop.tool, "late")])
    await shop.working("suspect", "late")
    assert [request.alone for request in rig.bus.asked if isinstance(request, Confirm)] == [True, False]
    assert not rig.store.receipts[suspect.receipt_key].alone
    shop.let_go("suspect", "late")
    assert (await rig.bus.outcome(suspect.call_id)).outcome == "completed"


async def test_a_suspect_of_whom_the_store_takes_no_word_lets_nobody_in(new_rig: NewRig) -> None:
    rig = new_rig(suspect_patience=0.2)
    shop = Workshop()
    suspect = call(rig, shop.tool, "suspect", deaths=USUAL.suspected_after)
    rig.hand_in([suspect])
    await shop.working("suspect")
    for shard in rig.store.shards.values():
        shard.ended_term, shard.term, shard.holder, shard.expires = shard.term, shard.term + 1, "another", rig.clock.now() + 100
    async with asyncio.timeout(20):
        while sum(isinstance(request, Confirm) for request in rig.bus.asked) < 2:
            await asyncio.sleep(0.002)
    await rests()
    assert rig.store.receipts[suspect.receipt_key].alone
    assert not rig.engine.dispatcher.solitude.lets(suspect=False)
    shop.let_go("suspect")


async def test_a_suspect_that_waits_for_its_turn_keeps_its_claim(new_rig: NewRig) -> None:
    rig = new_rig(claim_renewal=0.02)
    shop = Workshop()
    rig.hand_in([call(rig, shop.tool, "early")])
    await shop.working("early")
    suspect = call(rig, shop.tool, "suspect", deaths=USUAL.suspected_after)
    rig.hand_in([suspect])
    receipt = rig.store.receipts[suspect.receipt_key]
    async with asyncio.timeout(20):
        while receipt.state != "queued":
            await asyncio.sleep(0.002)
        claimed = receipt.expires
        while receipt.expires <= claimed:
            await asyncio.sleep(0.002)
    shop.let_go("early")
    await shop.working("suspect")
    shop.let_go("suspect")


async def test_a_suspect_does_not_go_as_alone_beside_a_call_that_does_not_end(new_rig: NewRig) -> None:
    rig = new_rig(suspect_patience=0.2)
    shop = Workshop()
    rig.hand_in([call(rig, shop.tool, "early")])
    await shop.working("early")
    rig.hand_in([call(rig, shop.tool, "suspect", deaths=USUAL.suspected_after)])
    await shop.working("early", "suspect")
    assert not any(request.alone for request in rig.bus.asked if isinstance(request, Confirm))
    shop.let_go("suspect", "early")


async def test_others_wait_until_a_suspects_outcome_is_stored(patient: Rig) -> None:
    shop = Workshop()
    patient.hand_in([call(patient, shop.tool, "suspect", deaths=USUAL.suspected_after)])
    await shop.working("suspect")
    patient.hand_in([call(patient, shop.tool, "late")])
    stored: list[str] = []
    answer = patient.store.answer

    def noting(request: Any) -> Any:
        if isinstance(request, Complete):
            stored.append("late" if "late" in shop.beside else "in time")
        return answer(request)

    patient.store.answer = noting  # type: ignore[method-assign]
    shop.let_go("suspect")
    await shop.working("late")
    assert stored == ["in time"]
    shop.let_go("late")
