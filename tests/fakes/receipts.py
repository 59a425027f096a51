"""A receipt-store in memory that keeps the contract of `rowmill_contracts.receipts`, for suites that need one without a database.

It answers messages, as the service does: `MemoryReceipts.answer(request)`. Honest in what callers can see (leases, terms, freshness, failures per
run, unknown outcomes, budgets without partial pages); not durable, and not fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import msgspec
from tests.fakes.accounts import Run
from tests.fakes.shards import MemoryShards

from rowmill_contracts.budgets import Limits, limits_of
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
from rowmill_contracts.shards import LeaseShard
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.charges import taken_reason
from rowmill_receipt_store.deaths import DeathRule

OUTPUT_LIMIT = 8 * 1024 * 1024


@dataclass
class Receipt:
    """One key. ``state``: as DESIGN.md names them, and ``released`` for a lease that was given back."""

    claim: Claim
    state: str = "queued"
    dispatch: int = 0
    lease_id: str = ""
    shard: int | None = None
    term: int | None = None
    expires: float = 0.0
    presence: str = ""
    output: ClaimAnswer | None = None
    output_dispatch: int = 0
    deaths: int = 0
    alone: bool = False


@dataclass
class Presence:
    expires: float = 0.0
    ended: bool = False


class MemoryReceipts:
    """``now``: the store's clock, in seconds since the epoch. Lives of leases in seconds."""

    def __init__(self, now: Callable[[], float], *, queued: float = 10.0, running: float = 60.0, shard: float = 6.0, held_poll: float = 0.05) -> None:
        self.receipts: dict[str, Receipt] = {}
        self.failures: dict[tuple[str, str], tuple[ToolFailure, float]] = {}
        self.runs: dict[str, Run] = {}
        self.presences: dict[str, Presence] = {}
        self._now = now
        self._queued = queued
        self._running = running
        self._shard = shard
        self._leasing = MemoryShards(now, lasting=shard)
        self.shards = self._leasing.shards
        self.gateways = self._leasing.gateways
        self.standings = self._leasing.standings
        self._held_poll = held_poll
        self.budget_poll = held_poll
        self.rule = DeathRule()

    def answer(self, request: Message) -> Message:
        """Carry out one request and give its answer. The same request again gives the same answer, as far as nothing happened between."""
        match request:
            case ClaimReceipts():
                return ReceiptsClaimed(answers=[self._claim(claim, request) for claim in request.claims])
            case Confirm():
                return Confirmed(answers=[self._confirm(lease, request) for lease in request.leases])
            case Renew():
                return Renewed(held=[self._renew(lease, request.presence) for lease in request.leases])
            case Complete():
                return Completed(answers=[self._complete(completion) for completion in request.completions])
            case Fail():
                return Completed(answers=[self._fail(failed) for failed in request.failures])
            case Release():
                return Released(released=sum(self._release(lease) for lease in request.leases))
            case LeaseShard():
                return self._leasing.answer(request)
            case KeepPresence():
                return self._keep(request)
            case HaltRun():
                return self._halt(request)
            case other:
                raise AssertionError(f"{other.message_type} is not for the receipt-store")

    def _run(self, run_id: str) -> Run:
        return self.runs.setdefault(run_id, Run())

    # ---- claims -----------------------------------------------------------------------------------------------------------------------

    def _claim(self, claim: Claim, request: ClaimReceipts) -> ClaimAnswer:
        run = self._run(claim.run_id)
        if run.state != "running":
            return ClaimAnswer(state="halted", reason=run.reason)
        if request.shard is not None and request.term is not None and not self._leasing.holds(request.shard, request.term):
            return ClaimAnswer(state="refused")
        if request.presence and (request.presence not in self.presences or self.presences[request.presence].ended):
            return ClaimAnswer(state="refused")
        receipt = self.receipts.get(claim.key)
        if receipt is not None and receipt.output is not None and _serves(receipt.output, claim):
            return receipt.output
        failed = self.failures.get((claim.key, claim.run_id))
        if failed is not None and failed[1] >= claim.started_at:
            return ClaimAnswer(state="failed", failure=failed[0], run_id=claim.run_id)
        took_over = False
        if receipt is not None:
            answer = self._lease_stands(receipt, claim, request)
            if answer is not None:
                return answer
            took_over = receipt.state == "running"
        if request.only_cached:
            return ClaimAnswer(state="absent")
        if receipt is not None and request.counts_deaths and receipt.state == "running":
            receipt.deaths = self.rule.counted(receipt.deaths, alone=receipt.alone)
            if self.rule.condemns(receipt.deaths):
                failure = self.rule.failure(claim.tool, receipt.deaths)
                receipt.state = "failed"
                for run_id in (receipt.claim.run_id, claim.run_id):
                    self.failures[claim.key, run_id] = (failure, self._now())
                return ClaimAnswer(state="failed", failure=failure, run_id=claim.run_id)
        return self._grant(run, receipt, claim, request, took_over=took_over)

    def _lease_stands(self, receipt: Receipt, claim: Claim, request: ClaimReceipts) -> ClaimAnswer | None:
        """What stands against a new lease; None: nothing."""
        same = receipt.lease_id == claim.lease_id
        ours = same and receipt.claim.run_id == claim.run_id
        if receipt.state == "outcome_unknown":
            return ClaimAnswer(state="unknown", run_id=receipt.claim.run_id)
        if receipt.state == "running" and ours:
            if self._run(claim.run_id).late(self._now()):
                return ClaimAnswer(state="over_budget", reason=f"budget: wall time, spent; receipt {claim.key[:12]} is not sent")
            return ClaimAnswer(state="granted", lease_id=claim.lease_id, dispatch=receipt.dispatch)
        if receipt.state == "queued" and ours and not request.confirm and not self._over(receipt):
            suspect = request.counts_deaths and self.rule.suspects(receipt.deaths)
            return ClaimAnswer(state="granted", lease_id=claim.lease_id, alone=suspect)
        presence = self.presences.get(receipt.presence)
        if presence is not None and presence.expires <= self._now() and not ours:
            presence.ended = True  # at once: nobody comes back here
        if receipt.state in {"queued", "running"} and not ours and not self._over(receipt) and not _is_newer_body(claim, receipt.claim):
            return ClaimAnswer(
                state="held", wait_ms=max(1, int(1000 * min(self._held_poll, receipt.expires - self._now()))), run_id=receipt.claim.run_id
            )
        if receipt.state == "running" and receipt.claim.effect == "non_idempotent":
            receipt.state = "outcome_unknown"
            return ClaimAnswer(state="unknown", run_id=receipt.claim.run_id)
        if receipt.state in {"completed", "failed", "released"} and same:
            return ClaimAnswer(state="held", wait_ms=int(1000 * self._held_poll))
        return None

    def _grant(self, run: Run, receipt: Receipt | None, claim: Claim, request: ClaimReceipts, *, took_over: bool) -> ClaimAnswer:
        coming = 1 if receipt is None else receipt.dispatch + 1
        former = None if receipt is None or receipt.state != "queued" else self._run(receipt.claim.run_id)
        money, kind = (Decimal(0), None) if former is None else former.refund(claim.key, coming)
        tried = any(key == claim.key and dispatch < coming for key, dispatch in run.counted)
        unpaid = run.unpaid(claim.cost, "retries" if tried else "calls", self._now())
        if unpaid:
            if former is not None:
                former.charges[claim.key, coming] = money
                former.counted.update({} if kind is None else {(claim.key, coming): kind})
            under_way = {(key, held.dispatch + 1) for key, held in self.receipts.items() if held.state == "queued"}
            under_way |= {(key, held.dispatch) for key, held in self.receipts.items() if held.state == "running" and held.expires > self._now()}
            if run.has_some(unpaid, under_way):
                return ClaimAnswer(state="held", wait_ms=int(1000 * self.budget_poll), run_id=claim.run_id, reason=taken_reason(unpaid))
            return ClaimAnswer(state="over_budget", reason=f"budget: {unpaid.replace('_', ' ')}, spent; receipt {claim.key[:12]} is not sent")
        if receipt is None:
            receipt = self.receipts[claim.key] = Receipt(claim)
        receipt.claim, receipt.lease_id, receipt.shard, receipt.term = claim, claim.lease_id, request.shard, request.term
        receipt.presence = request.presence
        if claim.cost or run.counts:
            run.charges[claim.key, coming] = claim.cost
            run.charged_to[claim.key, coming] = claim.lease_id
        if run.counts:
            run.counted[claim.key, coming] = "retries" if tried else "calls"
        receipt.state = "queued"
        receipt.expires = self._now() + self._queued
        receipt.alone = False
        suspect = request.counts_deaths and self.rule.suspects(receipt.deaths)
        confirm = request.confirm and not suspect and not run.pays(claim)
        if confirm:
            self._to_running(receipt)
        dispatch = receipt.dispatch if confirm else 0
        return ClaimAnswer(state="granted", lease_id=claim.lease_id, dispatch=dispatch, took_over=took_over, alone=suspect)

    def _to_running(self, receipt: Receipt) -> None:
        receipt.state = "running"
        receipt.dispatch += 1
        receipt.expires = self._now() + self._running

    def _over(self, receipt: Receipt) -> bool:
        """Whether the lease may be taken: expired, ended with its shard's term, or queued for a run that is halted."""
        ended = receipt.shard is not None and receipt.term is not None and receipt.term <= self.shards[receipt.shard].ended_term
        halted = receipt.state == "queued" and self._run(receipt.claim.run_id).state != "running"
        gone = receipt.presence != "" and self.presences[receipt.presence].ended
        return receipt.expires <= self._now() or ended or halted or gone

    # ---- what follows a claim ---------------------------------------------------------------------------------------------------------

    def _confirm(self, lease: LeaseRef, request: Confirm) -> ConfirmAnswer:
        receipt = self._held(lease)
        run = self._run(lease.run_id)
        if run.state != "running":
            return ConfirmAnswer(state="halted", reason=run.reason)
        if run.deadline is not None and run.deadline <= self._now():
            return ConfirmAnswer(state="halted", reason=f"budget: wall time, spent; receipt {lease.key[:12]} is not sent")
        if request.shard is not None and request.term is not None and not self._leasing.holds(request.shard, request.term):
            return ConfirmAnswer(state="refused")
        if receipt is None:
            return ConfirmAnswer(state="lost")
        if receipt.state == "queued":
            self._to_running(receipt)
        receipt.alone = request.alone
        return ConfirmAnswer(state="confirmed", dispatch=receipt.dispatch)

    def _keep(self, request: KeepPresence) -> PresenceKept:
        presence = self.presences.setdefault(request.presence, Presence())
        presence.ended = presence.ended or request.leave
        presence.expires = self._now() + self._shard
        return PresenceKept(held=False) if presence.ended else PresenceKept(held=True, seconds=self._shard)

    def _renew(self, lease: LeaseRef, presence: str) -> bool:
        receipt = self._held(lease)
        if receipt is None:
            return False
        receipt.expires = self._now() + (self._queued if receipt.state == "queued" else self._running)
        receipt.presence = presence or receipt.presence
        return True

    def _held(self, lease: LeaseRef) -> Receipt | None:
        receipt = self.receipts.get(lease.key)
        return receipt if receipt is not None and receipt.lease_id == lease.lease_id and receipt.state in {"queued", "running"} else None

    def _release(self, lease: LeaseRef) -> bool:
        run = self._run(lease.run_id)
        for key, dispatch in list(run.charges):
            ours = dispatch == lease.dispatch or (not lease.dispatch and run.charged_to.get((key, dispatch)) == lease.lease_id)
            if key == lease.key and ours and (key, dispatch) not in run.spent:
                run.refund(key, dispatch)
        receipt = self.receipts.get(lease.key)
        if receipt is None or receipt.lease_id != lease.lease_id or receipt.state not in {"queued", "running", "outcome_unknown"}:
            return False
        if lease.dispatch and (receipt.state == "queued" or receipt.dispatch != lease.dispatch):
            return False
        receipt.state = "released"
        return True

    def _complete(self, completion: Completion) -> StoreAnswer:
        receipt = self.receipts.get(completion.key)
        if len(completion.output) > OUTPUT_LIMIT:
            return StoreAnswer(state="rejected")
        if receipt is None:
            return StoreAnswer(state="superseded")
        if receipt.output is not None and receipt.output_dispatch == completion.dispatch:
            return StoreAnswer(state="stored", completed_at=receipt.output.completed_at)
        ours = receipt.lease_id == completion.lease_id and receipt.dispatch == completion.dispatch
        if not ours or receipt.state not in {"running", "outcome_unknown"}:
            return StoreAnswer(state="superseded")
        receipt.state = "completed"
        receipt.deaths = 0
        receipt.output_dispatch = completion.dispatch
        receipt.output = ClaimAnswer(
            state="completed",
            output=msgspec.Raw(bytes(completion.output)),
            no_result=completion.no_result,
            cost=completion.cost,
            run_id=receipt.claim.run_id,
            caller=receipt.claim.caller,
            completed_at=self._now(),
            dispatch=completion.dispatch,
        )
        run = self._run(receipt.claim.run_id)
        reserved = run.charges.get((completion.key, completion.dispatch), Decimal(0))
        run.charges[completion.key, completion.dispatch] = completion.cost
        if completion.cost > reserved and run.limits.money is not None and run.state == "running":
            if not run.exceeded or run.charged() > run.limits.money:
                run.state = "halted"
                run.reason = f"budget: money, receipt {completion.key[:12]} cost {completion.cost}, more than the {reserved} reserved for it"
            run.exceeded = True
        run.spent.add((completion.key, completion.dispatch))
        return StoreAnswer(state="stored", completed_at=receipt.output.completed_at)

    def _fail(self, failed: FailedCall) -> StoreAnswer:
        if failed.given_up is not None:
            self.receipts.setdefault(failed.key, Receipt(failed.given_up, state="failed"))
            self.failures[failed.key, failed.run_id] = (failed.failure, self._now())
            return StoreAnswer(state="stored")
        receipt = self.receipts.get(failed.key)
        ours = receipt is not None and receipt.lease_id == failed.lease_id and receipt.dispatch == failed.dispatch
        if receipt is None or not ours:
            return StoreAnswer(state="superseded")
        if receipt.state in {"failed", "released"}:
            return StoreAnswer(state="stored")
        if receipt.state not in {"running", "outcome_unknown"}:
            return StoreAnswer(state="superseded")
        receipt.deaths = 0
        receipt.state = "outcome_unknown" if failed.outcome_unknown else "failed" if failed.final else "released"
        if receipt.state == "failed":
            self.failures[failed.key, failed.run_id] = (failed.failure, self._now())
        if failed.charged and not failed.outcome_unknown:
            self._run(receipt.claim.run_id).spent.add((failed.key, failed.dispatch))
        elif not failed.charged:
            self._run(receipt.claim.run_id).refund(failed.key, failed.dispatch)
        return StoreAnswer(state="stored")

    # ---- runs -----------------------------------------------------------------------------------------------------------------------

    def _halt(self, request: HaltRun) -> RunHalted:
        run = self._run(request.run_id)
        newer = request.decision > run.decision or run.decision == 0
        if run.state != "stopped" and (newer or request.action == "stop"):
            run.state = {"stop": "stopped", "halt": "halted", "resume": "running"}[request.action]
            run.reason = request.reason
        if newer and (request.budget is not None or request.decision):
            given = limits_of(request.budget)
            kinds = {kind: getattr(given, kind) for kind in Limits.__struct_fields__}
            run.limits = given if request.decision else msgspec.structs.replace(run.limits, **{k: v for k, v in kinds.items() if v is not None})
            run.counts = run.counts or given.calls is not None or given.retries is not None
        if newer and (request.deadline is not None or request.decision):
            run.deadline = request.deadline
        if newer and request.retry:
            self.failures = {key: failed for key, failed in self.failures.items() if key[1] != request.run_id}
        run.decision = max(run.decision, request.decision)
        superseded = request.decision < run.decision
        return RunHalted(state=run.state, reason=run.reason, superseded=superseded)  # type: ignore[arg-type]  # one of the three


def _is_newer_body(claim: Claim, held: Claim) -> bool:
    return claim.run_id == held.run_id and claim.run_term is not None and held.run_term is not None and claim.run_term > held.run_term


def _serves(output: ClaimAnswer, claim: Claim) -> bool:
    at = output.completed_at or 0.0
    if at >= claim.started_at:
        return True
    return claim.reusable and not claim.force and (claim.fresh_for is None or at + claim.fresh_for >= claim.started_at)
