"""Answers of the receipt-store that are lost between a claim and the sending: what was not sent is neither charged nor of unknown outcome."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import Rig, answering, find_tool, in_turn, lost

from rowmill import registry
from rowmill.errors import AskTimeout
from rowmill_contracts.envelope import Message
from rowmill_contracts.receipts import Claim, ClaimReceipts, Confirm, HaltRun, ReceiptsClaimed, Release
from rowmill_contracts.shards import LeaseShard
from rowmill_tool_gateway.http_port import HttpRequest, HttpResponse
from rowmill_tool_gateway.settings import ToolGatewaySettings

pytestmark = pytest.mark.leaping


class Rival:
    """Another run's claim of a call that a first run's gateway had confirmed, under an answer that was lost."""

    def __init__(self, rig: Rig, effect: str) -> None:
        self.rig = rig
        self.effect = effect
        self.item = rig.item(find_tool(effect=effect), {"domain": "a.example"})

    async def confirmed_unheard(self, silent: type[Message]) -> None:
        self.rig.bus.silent = {silent}
        self.rig.hand_in([self.item])
        while (receipt := self.rig.store.receipts.get(self.item.receipt_key)) is None or receipt.state != "running":
            await asyncio.sleep(0.001)
        self.receipt = receipt

    def claims(self, *, after: str) -> str:
        """What the rival is answered ``after`` that."""
        store, now = self.rig.store, self.rig.clock.now()
        shard = store.shards[self.receipt.shard or 0]
        match after:
            case "the shard lapsed":
                shard.ended_term, shard.term, shard.holder, shard.expires = shard.term, shard.term + 1, "another", now + 100
            case "the run was halted":
                store.answer(HaltRun(run_id="run-1", action="halt", reason="pause"))
        self.receipt.expires = 0.0
        claim = Claim(key=self.item.receipt_key, lease_id="rival", run_id="run-2", tool=self.item.tool, effect=self.effect, started_at=now)  # type: ignore[arg-type]
        answer = store.answer(ClaimReceipts(holder="another", claims=[claim], confirm=True))
        assert isinstance(answer, ReceiptsClaimed)
        return answer.answers[0].state

    async def released(self) -> None:
        self.rig.bus.silent = set()
        async with asyncio.timeout(20):
            while not any(isinstance(request, Release) for request in self.rig.bus.carried_out):
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("after", ["the shard lapsed", "the run was halted", "its lease was over"])
async def test_a_confirm_whose_answer_is_lost_blocks_and_charges_nothing_where_nothing_was_sent(rig: Rig, after: str) -> None:
    rival = Rival(rig, "non_idempotent")
    await rival.confirmed_unheard(Confirm)
    assert rival.claims(after=after) == "unknown"
    assert rig.store.runs["run-1"].charged() > 0

    await rival.released()

    if after == "its lease was over":  # nothing else stands against the call, so it is made, and paid for once
        assert (await rig.bus.outcome(rival.item.call_id)).outcome == "completed"
        assert (len(rig.port.requests), rig.store.runs["run-1"].charged()) == (1, Decimal("0.01"))
    else:
        assert rival.receipt.state == "released"
        assert (len(rig.port.requests), rig.store.runs["run-1"].charged()) == (0, Decimal(0))


@pytest.mark.parametrize("asked_again", [True, False])
async def test_a_claim_whose_answer_is_lost_charges_nothing_where_another_sent_the_call(rig: Rig, asked_again: bool) -> None:
    """The claim of such a tool is its confirmation. The row comes back, or never does."""
    rival = Rival(rig, "idempotent")
    await rival.confirmed_unheard(ClaimReceipts)
    assert rival.claims(after="its lease was over") == "granted"
    assert rig.store.runs["run-1"].charged() > 0
    await rig.bus.outcome(rival.item.call_id)
    rig.bus.silent = set()
    if asked_again:
        rig.hand_in([msgspec.structs.replace(rival.item, call_id="again")])

    await rival.released()

    assert rig.store.runs["run-1"].charged() == 0
    assert (rival.receipt.state, rival.receipt.lease_id) == ("running", "rival")
    assert rig.port.requests == []


async def test_a_lease_whose_release_nobody_heard_is_given_back_once_somebody_does(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confirmed, then refused while the connection opened, because the broker went away, which takes the release too."""
    rig.store.answer(HaltRun(run_id="run-1", action="resume", budget=Decimal(1)))
    carry_out, connected, heard = rig.store.answer, asyncio.Event(), asyncio.Event()

    def answer(request: Message) -> Message | None:
        if isinstance(request, Release) and not heard.is_set():
            raise AskTimeout("the broker is away")
        return carry_out(request)

    async def connect() -> None:
        monkeypatch.setattr(rig.store, "answer", answer)
        rig.store.answer(HaltRun(run_id="run-1", action="halt", reason="pause"))  # so that nothing is claimed again
        for shard in rig.store.shards:
            rig.engine.shards.refused(shard)
        connected.set()

    rig.port.connect = connect
    item = rig.item(find_tool(effect="non_idempotent"), {"domain": "a.example"})
    rig.hand_in([item])
    while (receipt := rig.store.receipts.get(item.receipt_key)) is None:
        await asyncio.sleep(0)
    await connected.wait()
    assert (await rig.bus.outcome(item.call_id)).outcome == "halted"
    assert receipt.state == "running"

    heard.set()

    async with asyncio.timeout(20):
        while receipt.state != "released":
            await asyncio.sleep(0.001)
    assert (rig.store.runs["run-1"].charged(), rig.port.requests) == (Decimal(0), [])


async def test_what_was_sent_is_given_back_under_no_lease_without_a_number(rig: Rig) -> None:
    """Whatever happens to calls that were sent, no release says of their leases that nothing was."""
    sent: list[str] = []

    async def script(request: HttpRequest) -> HttpResponse:
        sent.extend(receipt.lease_id for receipt in rig.store.receipts.values() if receipt.state == "running")
        return await in_turn(lost, answering({}, status=503), answering({}, status=429, Retry_After="9"))(request)

    rig.port.script = script
    for effect in ("read", "non_idempotent"):
        with registry.isolated():
            find = find_tool(effect=effect)
            rig.hand_in([rig.item(find, {"domain": f"{number}.example"}) for number in range(5)])
            async with asyncio.timeout(20):
                while len(rig.bus.outcomes) < (5 if effect == "read" else 10):
                    await asyncio.sleep(0.001)

    unsent = {lease.lease_id for request in rig.bus.asked if isinstance(request, Release) for lease in request.leases if not lease.dispatch}
    assert sent
    assert not unsent & set(sent)


async def test_a_follower_at_another_gateway_takes_over_when_its_leaders_run_is_stopped(settings: ToolGatewaySettings) -> None:
    """The leader's lease is confirmed, unheard, at the gateway that has handed its shard over; the follower meets it live at the next one."""
    first = Rig(settings)
    second = Rig(settings, first.store)
    leader = Rival(first, "non_idempotent")
    await leader.confirmed_unheard(Confirm)
    shard = leader.receipt.shard or 0
    first.store.answer(LeaseShard(holder=first.holder, shards=[shard], release=True))
    first.store.answer(LeaseShard(holder=second.holder, shards=[shard]))
    follower = msgspec.structs.replace(leader.item, call_id="follower", row="leads/9")
    second.hand_in([follower], run="run-2")
    async with asyncio.timeout(20):
        while not second.bus.claims:
            await asyncio.sleep(0.001)
    assert second.port.requests == []

    first.store.answer(HaltRun(run_id="run-1", action="stop"))
    await leader.released()

    outcome = await second.bus.outcome("follower")
    while outcome.outcome == "deferred":  # a busy machine may take longer than the hand holds it
        [outcome] = await second.ask([msgspec.structs.replace(follower, call_id=f"again-{second.bus.claims}")], run="run-2")
    assert (outcome.outcome, outcome.execution) == ("completed", "live")
    assert (await first.bus.outcome(leader.item.call_id)).outcome == "halted"
    assert (len(first.port.requests), len(second.port.requests)) == (0, 1)
    assert first.store.runs["run-1"].charged() == 0
    await first.stop()
    await second.stop()
