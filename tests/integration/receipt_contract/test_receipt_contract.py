"""What the gateway relies on in a receipt-store, asked by messages: of the service on a real broker and database, and of the one in memory."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.budgets import Limits
from rowmill_contracts.envelope import Message
from rowmill_contracts.presences import KeepPresence, PresenceKept
from rowmill_contracts.receipts import (
    Claim,
    ClaimAnswer,
    ClaimReceipts,
    Complete,
    Completed,
    Completion,
    Confirm,
    ConfirmAnswer,
    Confirmed,
    Fail,
    FailedCall,
    HaltRun,
    LeaseRef,
    ReceiptsClaimed,
    Release,
    Released,
    Renew,
    Renewed,
    RunHalted,
    StoreAnswer,
)
from rowmill_contracts.shards import Draw, Drawn, LeaseShard, OpenRequests, Sent, ShardLease, ShardsLeased
from rowmill_contracts.tools import ToolFailure
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE
from rowmill_receipt_store.app import App
from rowmill_receipt_store.settings import ReceiptStoreSettings

pytestmark = pytest.mark.servers

ReplyT = TypeVar("ReplyT", bound=Message)
FAILURE = ToolFailure(tool="hunter.find", code="http_400", message="no")
_shards = itertools.count()


class Asker:
    """Asks either store. Names are new for each test, so that tests share a database."""

    def __init__(self, bus: Bus | None, memory: MemoryReceipts | None) -> None:
        self._bus = bus
        self._memory = memory
        self.run = f"run-{secrets.token_hex(4)}"
        self.now = SystemClock().now()

    async def ask(self, message: Message, answer: type[ReplyT]) -> ReplyT:
        if self._memory is not None:
            reply = self._memory.answer(message)
            assert isinstance(reply, answer)
            return reply
        assert self._bus is not None
        return await self._bus.ask(message, RECEIPTS_CLAIMS if isinstance(message, ClaimReceipts) else RECEIPTS_SETTLE, answer)

    async def claim(self, key: str, lease: str = "lease-1", **facts: Any) -> ClaimAnswer:
        request = {name: facts.pop(name) for name in ("shard", "term", "confirm", "only_cached", "presence", "counts_deaths") if name in facts}
        given: dict[str, Any] = {"run_id": self.run, "tool": "hunter.find", "effect": "read", "started_at": self.now, "caller": "leads/1"} | facts
        claims = [Claim(key=key, lease_id=lease, **given)]
        return (await self.ask(ClaimReceipts(holder="gateway", claims=claims, **request), ReceiptsClaimed)).answers[0]

    async def confirm(self, key: str, lease: str = "lease-1", **facts: Any) -> ConfirmAnswer:
        leases = [LeaseRef(key=key, lease_id=lease, run_id=self.run)]
        return (await self.ask(Confirm(leases=leases, batch_id="batch", **facts), Confirmed)).answers[0]

    async def complete(self, key: str, dispatch: int, lease: str = "lease-1", cost: str = "0") -> StoreAnswer:
        completion = Completion(key=key, lease_id=lease, dispatch=dispatch, output=msgspec.Raw(b'{"raw":1}'), run_id=self.run, cost=Decimal(cost))
        return (await self.ask(Complete(completions=[completion]), Completed)).answers[0]

    async def fail(self, key: str, dispatch: int, lease: str = "lease-1", **facts: Any) -> StoreAnswer:
        failed = FailedCall(key=key, lease_id=lease, dispatch=dispatch, run_id=self.run, failure=FAILURE, **facts)
        return (await self.ask(Fail(failures=[failed]), Completed)).answers[0]

    async def release(self, key: str, dispatch: int, lease: str = "lease-1") -> int:
        leases = [LeaseRef(key=key, lease_id=lease, run_id=self.run, dispatch=dispatch)]
        return (await self.ask(Release(leases=leases), Released)).released

    async def shard(self, shard: int, holder: str, *, release: bool = False) -> ShardLease:
        return (await self.ask(LeaseShard(holder=holder, shards=[shard], release=release), ShardsLeased)).shards[0]

    async def draw(self, holder: str, draw: Draw, *, release: bool = False) -> Drawn:
        request = LeaseShard(holder=holder, shards=[draw.shard], release=release, draws=[draw])
        return (await self.ask(request, ShardsLeased)).drawn[0]

    async def halt(self, action: Any, budget: str | None = None) -> str:
        request = HaltRun(run_id=self.run, action=action, budget=None if budget is None else Decimal(budget))
        return (await self.ask(request, RunHalted)).state


@pytest.fixture(params=["memory", "service"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Asker]:
    if request.param == "memory":
        yield Asker(None, MemoryReceipts(SystemClock().now))
        return
    urls = {"broker_url": request.getfixturevalue("broker_url"), "database_url": request.getfixturevalue("database_url")}
    app = App(ReceiptStoreSettings(**urls))
    await app.start()
    async with Bus(ServiceSettings(**urls), service="asker") as bus:
        yield Asker(bus, None)
    await app.stop()


@pytest.fixture
def key() -> str:
    return secrets.token_hex(32)


async def test_a_claim_that_is_confirmed_at_once_runs_under_a_dispatch_and_its_result_serves_others(store: Asker, key: str) -> None:
    granted = await store.claim(key, confirm=True, cost=Decimal("0.01"))
    assert (granted.state, granted.dispatch) == ("granted", 1)
    assert (await store.claim(key, confirm=True)).dispatch == 1
    held = await store.claim(key, "lease-2")
    assert held.state == "held"
    assert held.wait_ms > 0
    assert (await store.complete(key, 1, cost="0.01")).state == "stored"
    served = await store.claim(key, "lease-3", run_id=f"{store.run}-other", started_at=store.now - 5)
    assert (served.state, bytes(served.output), served.run_id, served.caller, served.cost) == (
        "completed",
        b'{"raw":1}',
        store.run,
        "leads/1",
        Decimal("0.01"),
    )


async def test_a_repeated_completion_is_stored_once(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    first = await store.complete(key, 1)
    again = await store.complete(key, 1)
    assert (first.state, again.state, again.completed_at) == ("stored", "stored", first.completed_at)


async def test_a_claim_without_confirm_is_confirmed_right_before_dispatch(store: Asker, key: str) -> None:
    queued = await store.claim(key, effect="non_idempotent")
    assert (queued.state, queued.dispatch) == ("granted", 0)
    first, again = await store.confirm(key), await store.confirm(key)
    assert (first.state, first.dispatch) == (again.state, again.dispatch) == ("confirmed", 1)
    assert (await store.confirm(key, "lease-2")).state == "lost"


@pytest.mark.parametrize("confirm", [True, False])
async def test_an_unsent_claim_is_given_back_and_another_gets_it(store: Asker, key: str, confirm: bool) -> None:
    granted = await store.claim(key, confirm=confirm)
    assert await store.release(key, granted.dispatch) == 1
    assert (await store.claim(key, "lease-2", confirm=True)).state == "granted"
    assert (await store.claim(key, "lease-1")).state == "held"


async def test_a_dispatch_that_is_not_final_goes_back_and_the_next_claim_dispatches_anew(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    assert (await store.fail(key, 1, final=False, charged=False)).state == "stored"
    again = await store.claim(key, "lease-2", confirm=True)
    assert (again.state, again.dispatch) == ("granted", 2)
    assert (await store.complete(key, 1)).state == "superseded"


async def test_a_failure_is_kept_for_its_run_alone(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    await store.fail(key, 1)
    failed = await store.claim(key, "lease-2", confirm=True)
    assert (failed.state, failed.failure) == ("failed", FAILURE)
    assert (await store.claim(key, "lease-3", run_id=f"{store.run}-other")).state == "granted"


async def test_a_call_that_was_given_up_unclaimed_has_failed_for_its_run_alone(store: Asker, key: str) -> None:
    claim = Claim(key=key, lease_id="", run_id=store.run, tool="hunter.find", effect="read", started_at=store.now)
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    failed = await store.claim(key, "lease-2", confirm=True)
    assert (failed.state, failed.failure) == ("failed", FAILURE)
    granted = await store.claim(key, "lease-3", run_id=f"{store.run}-other", confirm=True)
    assert (granted.state, granted.dispatch, granted.took_over) == ("granted", 1, False)
    await store.release(key, 1, "lease-3")
    await store.ask(HaltRun(run_id=store.run, action="resume", decision=2, retry=True), RunHalted)
    assert (await store.claim(key, "lease-4", confirm=True)).state == "granted"
    await store.release(key, 2, "lease-4")
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.claim(key, "lease-5", confirm=True)).state == "failed"


async def test_giving_a_call_up_touches_no_lease_and_no_output_of_another(store: Asker, key: str) -> None:
    assert (await store.claim(key, confirm=True)).dispatch == 1
    claim = Claim(key=key, lease_id="", run_id=store.run, tool="hunter.find", effect="read", started_at=store.now)
    assert (await store.fail(key, 0, "", given_up=claim)).state == "stored"
    assert (await store.complete(key, 1)).state == "stored"
    assert (await store.claim(key, "lease-2")).state == "completed"


async def test_deaths_of_holders_count_against_a_call_and_condemn_it_only_where_it_was_alone(store: Asker, key: str) -> None:
    states, alone = [], False
    for number in range(20):
        holder = {"lease": f"lease-{number}", "presence": f"{store.run}-{number}"}
        await store.ask(KeepPresence(presence=holder["presence"]), PresenceKept)
        answer = await store.claim(key, confirm=True, counts_deaths=True, **holder)
        states.append("suspect" if answer.alone else answer.state)
        if answer.state == "failed":
            break
        assert bool(answer.dispatch) is not answer.alone
        if answer.alone:
            alone = number > 8
            assert (await store.confirm(key, holder["lease"], alone=alone)).state == "confirmed"
        await store.ask(KeepPresence(presence=holder["presence"], leave=True), PresenceKept)
    assert states == ["granted"] * 2 + ["suspect"] * 10 + ["failed"]
    assert answer.failure is not None
    assert answer.failure.code == "poison"
    assert (await store.claim(key, "later", confirm=True, run_id=f"{store.run}-other", counts_deaths=True)).alone


async def test_an_unknown_outcome_blocks_every_run_until_its_own_dispatch_completes(store: Asker, key: str) -> None:
    await store.claim(key, effect="non_idempotent")
    dispatch = (await store.confirm(key)).dispatch
    await store.fail(key, dispatch, outcome_unknown=True)
    assert (await store.claim(key, "lease-2", run_id=f"{store.run}-other", effect="non_idempotent")).state == "unknown"
    assert (await store.complete(key, dispatch)).state == "stored"
    assert (await store.claim(key, "lease-3", effect="non_idempotent")).state == "completed"


async def test_old_outputs_serve_only_where_they_may(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    await store.complete(key, 1)
    later = {"run_id": f"{store.run}-other", "started_at": store.now + 100}
    assert (await store.claim(key, "lease-2", only_cached=True, **later)).state == "completed"
    assert (await store.claim(key, "lease-2", only_cached=True, fresh_for=200.0, **later)).state == "completed"
    for rule_out in ({"force": True}, {"reusable": False}, {"fresh_for": 10.0}):
        assert (await store.claim(key, "lease-2", only_cached=True, **rule_out, **later)).state == "absent"


async def test_looking_claims_nothing(store: Asker, key: str) -> None:
    assert (await store.claim(key, only_cached=True)).state == "absent"
    assert (await store.claim(key, "lease-2")).state == "granted"


async def test_a_renewed_lease_is_held_and_one_that_moved_is_not(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True)
    renewed = await store.ask(
        Renew(leases=[LeaseRef(key=key, lease_id=lease, run_id=store.run, dispatch=1) for lease in ("lease-1", "lease-2")]), Renewed
    )
    assert renewed.held == [True, False]


async def test_a_shards_term_rises_with_its_holder_and_older_terms_are_refused(store: Asker, key: str) -> None:
    shard = next(_shards)
    first = await store.shard(shard, "gateway-1")
    assert first.held
    assert first.seconds > 0
    assert not (await store.shard(shard, "gateway-2")).held
    assert (await store.shard(shard, "gateway-1")).term == first.term
    queued = await store.claim(key, shard=shard, term=first.term)
    assert queued.state == "granted"
    await store.shard(shard, "gateway-1", release=True)
    second = await store.shard(shard, "gateway-2")
    assert second.held
    assert second.term > first.term
    assert (await store.confirm(key, shard=shard, term=first.term)).state == "refused"
    assert (await store.claim(secrets.token_hex(32), shard=shard, term=first.term)).state == "refused"
    assert (await store.claim(secrets.token_hex(32), shard=shard, term=second.term)).state == "granted"


async def test_a_stopped_run_neither_claims_nor_confirms_and_stays_stopped(store: Asker, key: str) -> None:
    await store.claim(key)
    assert await store.halt("stop") == "stopped"
    assert (await store.confirm(key)).state == "halted"
    assert (await store.claim(secrets.token_hex(32))).state == "halted"
    assert await store.halt("resume") == "stopped"
    assert (await store.claim(key, "lease-2", run_id=f"{store.run}-other")).state == "granted"


async def test_calls_retries_and_wall_time_have_budgets_too(store: Asker, key: str) -> None:
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Limits(calls=1, retries=1), decision=1), RunHalted)
    await store.claim(key, confirm=True)
    over = await store.claim(secrets.token_hex(32))
    assert (over.state, over.reason.partition(",")[0]) == ("over_budget", "budget: calls")
    await store.fail(key, 1, final=False)
    assert (await store.claim(key, "lease-2", confirm=True)).dispatch == 2
    await store.fail(key, 2, "lease-2", final=False)
    spent = await store.claim(key, "lease-3", confirm=True)
    assert (spent.state, spent.reason.partition(",")[0]) == ("over_budget", "budget: retries")
    assert key[:12] in spent.reason
    late = Limits(wall_time=1)
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=late, deadline=store.now - 1, decision=2), RunHalted)
    over = await store.claim(key, "lease-3", confirm=True)
    assert (over.state, over.reason.partition(",")[0]) == ("over_budget", "budget: wall time")
    await store.ask(HaltRun(run_id=store.run, action="resume", decision=3), RunHalted)
    assert (await store.claim(key, "lease-3", confirm=True)).state == "granted"


async def test_a_halted_run_is_told_why(store: Asker, key: str) -> None:
    await store.claim(key)
    await store.ask(HaltRun(run_id=store.run, action="halt", reason="budget: calls", decision=1), RunHalted)
    assert (await store.claim(secrets.token_hex(32))).reason == "budget: calls"
    assert (await store.confirm(key)).reason == "budget: calls"


async def test_a_cost_above_its_reservation_is_booked_and_halts_the_run_once(store: Asker, key: str) -> None:
    await store.halt("resume", budget="1")
    other = secrets.token_hex(32)
    for each in (key, other):
        await store.claim(each, confirm=True, cost=Decimal("0.01"))
    await store.complete(key, 1, cost="0.07")
    halted = await store.claim(secrets.token_hex(32))
    assert (halted.state, halted.reason) == ("halted", f"budget: money, receipt {key[:12]} cost 0.07, more than the 0.01 reserved for it")
    await store.halt("resume")
    await store.complete(other, 1, cost="0.02")
    assert (await store.claim(secrets.token_hex(32), cost=Decimal("0.92"))).state == "over_budget"
    assert (await store.claim(secrets.token_hex(32), cost=Decimal("0.91"))).state == "granted"


async def test_who_heard_no_dispatch_number_gives_back_what_was_confirmed(store: Asker, key: str) -> None:
    await store.halt("resume", budget="0.01")
    await store.claim(key, effect="non_idempotent", cost=Decimal("0.01"))
    await store.confirm(key)
    assert await store.release(key, 0) == 1
    assert await store.release(key, 0) == 0
    assert (await store.claim(key, "lease-2", effect="non_idempotent", cost=Decimal("0.01"))).state == "granted"


async def test_a_late_copy_of_an_older_decision_changes_nothing(store: Asker, key: str) -> None:
    await store.ask(HaltRun(run_id=store.run, action="resume", budget=Decimal(1), decision=1), RunHalted)
    await store.ask(HaltRun(run_id=store.run, action="halt", budget=Decimal(1), reason="pause", decision=2), RunHalted)
    late = await store.ask(HaltRun(run_id=store.run, action="resume", budget=Decimal(1), decision=1), RunHalted)
    assert (late.state, late.superseded, late.reason) == ("halted", True, "pause")
    assert (await store.claim(key)).state == "halted"
    newer = await store.ask(HaltRun(run_id=store.run, action="resume", decision=3), RunHalted)
    assert (newer.state, newer.superseded) == ("running", False)
    assert (await store.claim(key, cost=Decimal(5))).state == "granted"


async def test_a_budget_is_reserved_spent_and_refunded(store: Asker, key: str) -> None:
    await store.halt("resume", budget="0.02")
    keys = [secrets.token_hex(32) for _ in range(4)]
    cost = Decimal("0.01")
    assert (await store.claim(keys[0], confirm=True, cost=cost)).state == "granted"
    assert (await store.claim(keys[1], confirm=True, cost=cost)).state == "granted"
    assert (await store.claim(keys[2], confirm=True, cost=cost)).state == "over_budget"
    await store.complete(keys[0], 1, cost="0.01")
    await store.release(keys[1], 1)
    assert (await store.claim(keys[2], confirm=True, cost=cost)).state == "granted"
    await store.fail(keys[2], 1)
    assert (await store.claim(keys[3], confirm=True, cost=cost)).state == "over_budget"
    assert (await store.claim(key)).state == "granted"


async def test_who_takes_a_shard_over_is_told_what_its_predecessor_may_have_sent(store: Asker, key: str) -> None:
    shard = next(_shards)
    term = (await store.shard(shard, "gateway-1")).term
    draw = Draw(window=key, shard=shard, number=1, permits=7, seconds=2.0, span=60.0)
    assert await store.draw("gateway-1", draw) == Drawn(granted=True, sent=[]), "nothing is known of a window that nobody drew for"
    known = msgspec.structs.replace(draw, number=2, term=term, sent=[Sent(30.0, 4), Sent(1.0, 2)])
    assert await store.draw("gateway-1", known) == Drawn(granted=True), "the holder knows better"
    assert await store.draw("gateway-1", draw) == Drawn(granted=False), "an older draw comes too late"
    assert await store.draw("gateway-2", msgspec.structs.replace(draw, number=9)) == Drawn(granted=False), "another holds the shard"

    last = msgspec.structs.replace(known, number=3, permits=5, seconds=0.0, sent=[Sent(31.0, 4), Sent(59.9, 9), Sent(2.0, 2), Sent(0.5, 3)])
    assert (await store.draw("gateway-1", last, release=True)).granted
    told = (await store.draw("gateway-2", msgspec.structs.replace(draw, number=1, span=58.0))).sent
    assert told is not None
    assert [one.requests for one in told] == [4, 2, 3, 5], "oldest first, within the span, permits as late as they go"
    for one, least in zip(told, [31.0, 2.0, 0.5, 0.0], strict=True):
        assert least <= one.seconds_ago < least + 20
    assert await store.draw("gateway-1", msgspec.structs.replace(last, number=4)) == Drawn(granted=False), "its term is over"


async def test_a_report_of_a_former_term_is_not_believed(store: Asker, key: str) -> None:
    shard = next(_shards)
    first = (await store.shard(shard, "gateway-1")).term
    draw = Draw(window=key, shard=shard, number=1, permits=3, seconds=1000.0, span=60.0)
    await store.draw("gateway-1", draw)
    await store.shard(shard, "gateway-1", release=True)
    await store.shard(shard, "gateway-2")
    await store.shard(shard, "gateway-2", release=True)
    told = (await store.draw("gateway-1", msgspec.structs.replace(draw, number=2, term=first, sent=[]))).sent
    assert told is not None
    assert [one.requests for one in told] == [3]
    assert told[0].seconds_ago < 0, "its permits are still good"


async def test_who_takes_a_shard_is_told_what_its_former_holder_has_open(store: Asker) -> None:
    shard = next(_shards)
    lane = OpenRequests(f"acme/lane-{shard}", 3)
    await store.ask(LeaseShard(holder=f"first-{shard}", shards=[shard], number=1), ShardsLeased)
    given_up = LeaseShard(holder=f"first-{shard}", shards=[shard], release=True, open=[lane], number=2)
    assert lane not in (await store.ask(given_up, ShardsLeased)).open, "it knows that itself"
    taken = await store.ask(LeaseShard(holder=f"second-{shard}", shards=[shard], number=1), ShardsLeased)
    assert taken.shards[0].held
    assert lane in taken.open
    await store.ask(LeaseShard(holder=f"first-{shard}", shards=[], serving=False, number=3), ShardsLeased)
    assert lane not in (await store.ask(LeaseShard(holder=f"second-{shard}", shards=[shard], number=2), ShardsLeased)).open


async def test_a_lease_ends_with_the_presence_of_its_process(store: Asker, key: str) -> None:
    mine = f"executor-{key[:8]}"
    assert (await store.claim(key, confirm=True, presence=mine)).state == "refused", "nobody has said that it is there"
    assert (await store.ask(KeepPresence(presence=mine), PresenceKept)).held
    assert (await store.claim(key, confirm=True, presence=mine)).dispatch == 1
    assert (await store.claim(key, "lease-2", confirm=True)).state == "held"
    assert not (await store.ask(KeepPresence(presence=mine, leave=True), PresenceKept)).held
    assert not (await store.ask(KeepPresence(presence=mine), PresenceKept)).held, "it has ended for good"
    assert (await store.claim(secrets.token_hex(32), presence=mine)).state == "refused"
    assert (await store.claim(key, "lease-2", confirm=True)).dispatch == 2


async def test_a_lease_that_nobody_took_is_bound_to_another_presence(store: Asker, key: str) -> None:
    mine, again = f"executor-{key[:8]}", f"executor-{key[8:16]}"
    await store.ask(KeepPresence(presence=mine), PresenceKept)
    await store.claim(key, confirm=True, presence=mine)
    await store.ask(KeepPresence(presence=mine, leave=True), PresenceKept)
    await store.ask(KeepPresence(presence=again), PresenceKept)
    renewed = await store.ask(Renew(leases=[LeaseRef(key=key, lease_id="lease-1", run_id=store.run, dispatch=1)], presence=again), Renewed)
    assert renewed.held == [True]
    assert (await store.claim(key, "lease-2", confirm=True)).state == "held"


async def test_a_newer_body_takes_over_what_its_run_holds(store: Asker, key: str) -> None:
    await store.claim(key, confirm=True, run_term=3)
    assert (await store.claim(key, "lease-2", confirm=True, run_term=3)).state == "held"
    assert (await store.claim(key, "lease-2", confirm=True, run_term=9, run_id=f"{store.run}-other")).state == "held"
    assert (await store.claim(key, "lease-2", confirm=True, run_term=4)).dispatch == 2
    assert (await store.complete(key, 1)).state == "superseded"


async def test_failures_of_before_a_retry_answer_no_call_of_it_and_outputs_do(store: Asker, key: str) -> None:
    good, unknown = secrets.token_hex(32), secrets.token_hex(32)
    await store.claim(key, confirm=True)
    await store.fail(key, 1)
    await store.claim(good, confirm=True)
    await store.complete(good, 1)
    await store.claim(unknown, confirm=True, effect="non_idempotent")
    await store.fail(unknown, 1, outcome_unknown=True)
    assert (await store.claim(key, "lease-2")).state == "failed"
    retried = HaltRun(run_id=store.run, action="resume", decision=2, retry=True)
    await store.ask(retried, RunHalted)
    granted = await store.claim(key, "lease-3", confirm=True)
    assert (granted.state, granted.dispatch) == ("granted", 2)
    await store.fail(key, 2, "lease-3")
    await store.ask(retried, RunHalted)  # a late copy of it forgets nothing more
    assert (await store.claim(key, "lease-4")).state == "failed"
    assert (await store.claim(good, "lease-4", effect="non_idempotent")).state == "completed"
    assert (await store.claim(unknown, "lease-4", effect="non_idempotent")).state == "unknown"
