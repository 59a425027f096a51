"""The receipts as the other services meet them: bulk requests, answered in their order. Loads, decides by `leases`, saves.

Any request may come twice, and requests may hold a key twice: the second then sees what the first did. Keys are independent of each other: what
is granted of a request stays granted if the rest of it fails, and asking again with the same lease ids is the same claim.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import structlog

from rowmill.encoding.receipts import short_digest
from rowmill_contracts.budgets import limits_of
from rowmill_contracts.charges import AskCharges, ChargesTold
from rowmill_contracts.receipts import ClaimAnswer, ConfirmAnswer, HaltRun, RunHalted, StoreAnswer
from rowmill_contracts.shards import LeaseShard, ShardsLeased
from rowmill_receipt_store.charges import Allowances, Kind, Spend, may_come_back, spent_reason
from rowmill_receipt_store.deaths import USUAL, DeathRule
from rowmill_receipt_store.leases import (
    Again,
    Condemned,
    Decision,
    Doubt,
    Found,
    Grant,
    Wanted,
    decide_claim,
    first_claim,
    granted,
    lapsed_presence,
    stored_at,
    under_way_beside,
    waiting,
    was_failed,
    why_unconfirmed,
)
from rowmill_receipt_store.merging import rounds
from rowmill_receipt_store.outputs import rejection
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.store import Completed, DispatchCost, Failed, Lease, RunState, Sought, Store

log = structlog.get_logger()

PASSES = 4
"""How often a claim or confirmation is decided anew because others changed its receipt meanwhile, before its caller is told to ask again."""

_STATES: dict[str, RunState] = {"stop": "stopped", "halt": "halted", "resume": "running"}


class _Keyed(Protocol):
    @property
    def key(self) -> bytes: ...


ItemT = TypeVar("ItemT", bound=_Keyed)
AnswerT = TypeVar("AnswerT")


class Receipts:
    """``held_poll``: seconds after which a claim that waits for another's lease is told to ask again. ``output_limit``: bytes of the largest
    output that is stored. ``presences``: where silent ones end; without it they do not. ``rule``: when a call is suspected, or condemned, of ending
    its gateways.
    """

    def __init__(self, store: Store, *, held_poll: float, output_limit: int, presences: PresenceStore | None = None, rule: DeathRule = USUAL) -> None:
        self._store = store
        self._presences = presences
        self._rule = rule
        self._held_poll = held_poll
        self._output_limit = output_limit

    # ---- claims -----------------------------------------------------------------------------------------------------------------------

    async def claim(self, wanted: Sequence[Wanted]) -> list[ClaimAnswer]:
        """Claim, or answer from what is stored. Budgets serve the claims in their order."""
        return await _in_rounds(wanted, self._claim)

    async def _claim(self, wanted: Sequence[Wanted]) -> list[ClaimAnswer]:
        """Of distinct keys. Most keys are new, so the first pass takes them for that and reads nothing: one round trip."""
        answers: dict[bytes, ClaimAnswer] = {}
        grants = [first_claim(item) for item in wanted if not item.request.only_cached]
        for _ in range(PASSES):
            if grants:
                dispatches = await self._store.claim(grants)
                answers.update({grant.wanted.key: granted(grant, dispatches[grant.wanted.key]) for grant in grants if grant.wanted.key in dispatches})
            rest = [item for item in wanted if item.key not in answers]
            if not rest:
                break
            grants = await self._decide(rest, answers)
        return [answers.get(item.key) or ClaimAnswer(state="held", wait_ms=1) for item in wanted]

    async def _decide(self, wanted: Sequence[Wanted], answers: dict[bytes, ClaimAnswer]) -> list[Grant]:
        """Add the answers that need no lease to ``answers``; the leases to be stored are returned."""
        sought = [_sought(item) for item in wanted]
        found = await self._store.load(sought, bodies=True)
        silent = {presence for item in wanted if (presence := lapsed_presence(item, found[item.key])) is not None}
        if silent and self._presences is not None and await self._presences.contest(silent):
            found = await self._store.load(sought, bodies=True)
        judged = self._judged(wanted, found)
        if any(kind is not None for _, _, kind in judged):  # only then it matters what may come back
            found = await self._store.load(sought, bodies=True, open_charges=True)
            judged = self._judged(wanted, found)
        grants: list[Grant] = []
        doubts: dict[bytes, int] = {}
        condemned: dict[bytes, Condemned] = {}
        again: dict[bytes, ClaimAnswer] = {}
        reasons: dict[tuple[str, Kind], str] = {}
        for item, decision, kind in judged:
            match decision:
                case Grant():
                    run_id, account = item.claim.run_id, found[item.key].account
                    if kind is None:
                        grants.append(decision)
                    elif may_come_back(kind, account, decision.spend, under_way_beside(decision, found[item.key])):
                        answers[item.key] = waiting(item, kind, self._held_poll)
                    else:  # one reason for a page, which names the first receipt: rows that wait for one reason travel together
                        reason = reasons.setdefault((run_id, kind), spent_reason(kind, account, decision.spend, short_digest(item.claim.key)))
                        answers[item.key] = ClaimAnswer(state="over_budget", reason=reason)
                case Doubt():
                    doubts[item.key] = decision.revision
                case Condemned():
                    condemned[item.key] = decision
                case Again() if (account := found[item.key].account).late:  # a copy that was carried out in time is not sent after it
                    reason = spent_reason("wall_time", account, Spend(), short_digest(item.claim.key))
                    answers[item.key] = ClaimAnswer(state="over_budget", reason=reason)
                case Again():
                    again[item.key] = decision.answer
                case ClaimAnswer():
                    answers[item.key] = decision
        if again:
            held = await self._store.renew([Lease(key=key, lease_id=answer.lease_id) for key, answer in again.items()])
            answers.update({key: answer for key, answer in again.items() if key in held})
        if doubts:
            answers.update(dict.fromkeys(await self._store.doubt(doubts), ClaimAnswer(state="unknown")))
        if condemned:
            for key in await self._store.condemn(condemned):
                verdict = condemned[key]
                log.error("call_condemned", receipt=short_digest(key.hex()), tool=verdict.failure.tool, run_id=verdict.run_id, deaths=verdict.deaths)
                answers[key] = ClaimAnswer(state="failed", failure=verdict.failure, run_id=verdict.run_id)
        return grants

    def _judged(self, wanted: Sequence[Wanted], found: Mapping[bytes, Found]) -> list[tuple[Wanted, Decision, Kind | None]]:
        """What is decided on each, and the budget that does not pay for it; budgets serve them in their order."""
        allowances = Allowances()
        judged: list[tuple[Wanted, Decision, Kind | None]] = []
        for item in wanted:
            decision, kind = decide_claim(item, found[item.key], held_poll=self._held_poll, rule=self._rule), None
            if isinstance(decision, Grant):
                allowances.know(item.claim.run_id, found[item.key].account)
                kind = allowances.take(item.claim.run_id, decision.spend, decision.net)
            judged.append((item, decision, kind))
        return judged

    # ---- what follows a claim ---------------------------------------------------------------------------------------------------------

    async def confirm(self, leases: Sequence[Lease]) -> list[ConfirmAnswer]:
        """Right before dispatch: queued leases run from now on. Only what is answered ``confirmed`` may be sent."""
        return await _in_rounds(leases, self._confirm)

    async def _confirm(self, leases: Sequence[Lease]) -> list[ConfirmAnswer]:
        answers: dict[bytes, ConfirmAnswer] = {}
        rest = list(leases)
        for _ in range(PASSES):
            dispatches = await self._store.confirm(rest)
            answers.update({key: ConfirmAnswer(state="confirmed", dispatch=dispatch) for key, dispatch in dispatches.items()})
            rest = [lease for lease in rest if lease.key not in answers]
            if not rest:
                break
            found = await self._load(rest)
            for lease in rest:
                why = why_unconfirmed(lease.lease_id, lease.term, found[lease.key])
                if why is not None:
                    answers[lease.key] = ConfirmAnswer(state=why, reason=_why_halted(found[lease.key], lease) if why == "halted" else "")
            rest = [lease for lease in rest if lease.key not in answers]
            if not rest:
                break
        return [answers.get(lease.key) or ConfirmAnswer(state="lost") for lease in leases]

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Whether each lease is still held; it then lasts a whole life from now."""

        async def renew(some: Sequence[Lease]) -> list[bool]:
            held = await self._store.renew(some)
            return [lease.key in held for lease in some]

        return await _in_rounds(leases, renew)

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Give unsent claims back: whether each was given back now (a repeat gives nothing back)."""

        async def release(some: Sequence[Lease]) -> list[bool]:
            released = await self._store.release(some)
            return [lease.key in released for lease in some]

        return await _in_rounds(leases, release)

    async def complete(self, results: Sequence[Completed]) -> list[StoreAnswer]:
        """Store results. What cannot be stored becomes a charged failure of its run."""
        return await _in_rounds(results, self._complete)

    async def _complete(self, results: Sequence[Completed]) -> list[StoreAnswer]:
        answers: dict[bytes, StoreAnswer] = {}
        storable = [result for result in results if rejection(result.output, tool="", limit=self._output_limit) is None]
        if len(storable) < len(results):
            kept = {result.key for result in storable}
            answers.update(await self._reject([result for result in results if result.key not in kept]))
        if storable:
            times = await self._store.complete(storable)
            answers.update({key: StoreAnswer(state="stored", completed_at=at) for key, at in times.items()})
        rest = [result for result in storable if result.key not in answers]
        if rest:
            found = await self._load(rest)
            moved: list[Completed] = []
            for result in rest:
                at = stored_at(result.lease_id, result.dispatch, found[result.key])
                answers[result.key] = StoreAnswer(state="superseded") if at is None else StoreAnswer(state="stored", completed_at=at)
                if at is None:
                    moved.append(result)
            await self._settle(moved)
        return [answers[result.key] for result in results]

    async def _reject(self, results: Sequence[Completed]) -> dict[bytes, StoreAnswer]:
        """Results that cannot be stored: what they cost is booked, then each is a final failure of its run."""
        found = await self._load(results)
        failures = []
        for result in results:
            receipt = found[result.key].receipt
            failure = rejection(result.output, tool="" if receipt is None else receipt.tool, limit=self._output_limit)
            if failure is not None:
                failures.append(
                    Failed(
                        key=result.key,
                        lease_id=result.lease_id,
                        dispatch=result.dispatch,
                        run_id=result.run_id,
                        becomes="failed",
                        failure=failure,
                        refund=False,
                    )
                )
        await self._settle(results)
        stored = await self.fail(failures)
        return {
            item.key: StoreAnswer(state="rejected") if answer.state == "stored" else answer for item, answer in zip(failures, stored, strict=True)
        }

    async def fail(self, failures: Sequence[Failed]) -> list[StoreAnswer]:
        """Store failures; each is answered ``stored``, or ``superseded`` where the lease has moved."""
        return await _in_rounds(failures, self._fail)

    async def _fail(self, failures: Sequence[Failed]) -> list[StoreAnswer]:
        claimed = [item for item in failures if item.given_up is None]
        if len(claimed) < len(failures):
            await self._store.give_up([item for item in failures if item.given_up is not None])
        stored = await self._store.fail(claimed) if claimed else set()
        rest = [item for item in claimed if item.key not in stored]
        moved: list[Failed] = []
        if rest:
            found = await self._load(rest)
            moved = [item for item in rest if not was_failed(item.lease_id, item.dispatch, found[item.key])]
            await self._settle([item for item in moved if item.becomes != "outcome_unknown"])
        superseded = {item.key for item in moved}
        return [StoreAnswer(state="superseded" if item.key in superseded else "stored") for item in failures]

    async def _load(self, items: Sequence[Lease | Completed | Failed]) -> dict[bytes, Found]:
        sought = [Sought(item.key, item.run_id, item.shard if isinstance(item, Lease) else None) for item in items]
        return await self._store.load(sought, bodies=False)

    async def _settle(self, items: Sequence[Completed | Failed]) -> None:
        costs = [
            DispatchCost(key=item.key, run_id=item.run_id, dispatch=item.dispatch, spent=item.cost)
            if isinstance(item, Completed)
            else DispatchCost(key=item.key, run_id=item.run_id, dispatch=item.dispatch, refund=item.refund)
            for item in items
            if item.dispatch > 0
        ]
        if costs:
            await self._store.settle_charges(costs)

    async def charged(self, requests: Sequence[AskCharges]) -> list[ChargesTold]:
        """What runs were charged so far."""
        told = iter(await self._store.tallies([run_id for request in requests for run_id in request.run_ids]))
        return [ChargesTold(runs=list(islice(told, len(request.run_ids)))) for request in requests]

    # ---- shards and runs --------------------------------------------------------------------------------------------------------------

    async def lease_shards(self, request: LeaseShard) -> ShardsLeased:
        """Take, renew or give up shards."""
        if request.release:
            return ShardsLeased(shards=await self._store.release_shards(request.holder, request.shards, request.terms))
        return ShardsLeased(shards=await self._store.lease_shards(request.holder, request.shards))

    async def halt_run(self, request: HaltRun) -> RunHalted:
        """Stop, halt or resume a run, or give it a budget, unless a newer decision came first; claims and confirmations answered after it know."""
        standing = await self._store.halt_run(
            request.run_id,
            _STATES[request.action],
            reason=request.reason,
            limits=limits_of(request.budget),
            deadline=request.deadline,
            decision=request.decision,
            retry=request.retry,
        )
        return RunHalted(state=standing.state, reason=standing.reason, superseded=request.decision < standing.decision)


def _sought(wanted: Wanted) -> Sought:
    return Sought(wanted.key, wanted.claim.run_id, wanted.request.shard, wanted.request.presence)


def _why_halted(found: Found, lease: Lease) -> str:
    if found.run_state != "running":
        return found.run_reason
    return spent_reason("wall_time", found.account, Spend(), short_digest(lease.key.hex()))


async def _in_rounds(items: Sequence[ItemT], carry_out: Callable[[Sequence[ItemT]], Awaitable[list[AnswerT]]]) -> list[AnswerT]:
    """Carry out items of which some may have the same key, one after another for each key."""
    parted = rounds([item.key for item in items])
    if len(parted) == 1:
        return await carry_out(items)
    answers: dict[int, AnswerT] = {}
    for indexes in parted:
        answers.update(zip(indexes, await carry_out([items[index] for index in indexes]), strict=True))
    return [answers[index] for index in range(len(items))]
