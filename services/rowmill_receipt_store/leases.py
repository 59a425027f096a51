"""What a claim, confirmation, completion or failure may do to a receipt (DESIGN.md, "Receipts"). Pure: a decision is a value.

``queued`` (claimed, nothing sent) becomes ``running`` (confirmed, under a dispatch number), then ``completed``, ``failed`` or
``outcome_unknown``; ``released`` gives it back. A live lease is never stolen. One that is over may be taken, unless it runs a tool that must not
repeat its effect: then nobody knows the outcome, and the key is blocked. Leases are ours by the caller's lease id, so a repeat is the same claim.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec

from rowmill_contracts.receipts import Claim, ClaimAnswer, ClaimReceipts
from rowmill_contracts.tools import Effect, ToolFailure
from rowmill_receipt_store.charges import UNLIMITED, Account, Former, Kind, Spend, former_charge, net_spend, taken_reason
from rowmill_receipt_store.deaths import USUAL, DeathRule
from rowmill_receipt_store.freshness import serves
from rowmill_receipt_store.shards import spending_term, term_holds

SELDOMER = 4
"""How many times as long as for another's lease a claim waits for a budget: whole windows of rows wait so, for as long as calls are under way."""

State = Literal["queued", "running", "completed", "failed", "released", "outcome_unknown"]


class Output(msgspec.Struct, frozen=True):
    """The newest stored output. ``body`` is None where it was too large to be read together with others. ``retired_at``: when pruning took it out
    of use, seconds since the epoch.
    """

    body: bytes | None
    no_result: bool
    cost: Decimal
    completed_at: float
    dispatch: int
    run_id: str
    caller: str
    retired_at: float | None = None


class Receipt(msgspec.Struct, frozen=True):
    """A receipt as it was read. ``over``: its lease, if it has one, may be taken: expired, or ended with its shard's term, or queued for a run
    that is halted. ``held``: what its live lease's dispatch is charged. ``remaining``: seconds that its lease has left. ``last_failure``: what is
    known of a dispatch of unknown outcome. ``run_term``: of the body that has the lease. ``lapsed``: the presence that the lease ends with, where its
    process did not say in time that it is there. ``deaths``: of gateways that had it in hand, as `DeathRule` counts them;
    ``alone``: its running dispatch went with nothing beside it. ``counted``: its newest dispatch, or claim, is tallied as a call of its run.
    """

    revision: int
    state: State
    dispatch: int
    lease_id: str
    run_id: str
    tool: str
    effect: Effect
    held: Spend
    took_over: bool
    over: bool
    remaining: float
    output: Output | None
    last_failure: ToolFailure | None = None
    run_term: int | None = None
    lapsed: str | None = None
    deaths: int = 0
    alone: bool = False
    counted: bool = False


class FailureOnRecord(msgspec.Struct, frozen=True):
    """A final failure under (key, run)."""

    failure: ToolFailure
    dispatch: int


class Found(msgspec.Struct, frozen=True):
    """What is stored for a key, for the run that asks and for the shard and the presence that it asks under. ``tried``: an earlier dispatch of this
    call is counted to the run.
    """

    receipt: Receipt | None = None
    failure: FailureOnRecord | None = None
    run_state: Literal["running", "halted", "stopped"] = "running"
    run_reason: str = ""
    account: Account = UNLIMITED
    tried: bool = False
    shard_term: int | None = None
    shard_held: bool = False
    present: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """A claim with the request that it came in."""

    key: bytes
    claim: Claim
    request: ClaimReceipts


class Grant(msgspec.Struct, frozen=True):
    """The lease goes to ``wanted``, if the receipt still has ``revision`` (0: there is none) when it is stored.

    ``dispatch``: the newest so far; a confirmed claim gets the next one. ``spend``: what the dispatch is charged; ``net``: what that adds to its
    run's charges. ``suspect``: ``deaths`` say that it is to be sent alone.
    """

    wanted: Wanted
    revision: int
    dispatch: int
    took_over: bool
    former: Former | None
    spend: Spend
    net: Spend
    deaths: int = 0
    suspect: bool = False

    @property
    def confirms(self) -> bool:
        """Whether the lease runs from now on, unless a budget pays for it. A suspect's does from a confirmation, right before it is sent, that says
        whether it goes alone.
        """
        return self.wanted.request.confirm and not self.suspect


class Doubt(msgspec.Struct, frozen=True):
    """The running lease is over and its tool must not repeat its effect: the outcome is unknown from now on."""

    revision: int


class Condemned(msgspec.Struct, frozen=True):
    """The running lease is over, and too many gateways have died of the call alone: it fails for the run that asks, and for its last one."""

    revision: int
    run_id: str
    deaths: int
    failure: ToolFailure


class Again(msgspec.Struct, frozen=True):
    """The lease is the claim's already: ``answer`` holds if it can be renewed, for its holder counts a whole life from this answer on."""

    answer: ClaimAnswer


Decision = ClaimAnswer | Grant | Doubt | Condemned | Again


def first_claim(wanted: Wanted) -> Grant:
    """The grant for a key that was never claimed."""
    spend = Spend(wanted.claim.cost, calls=int(wanted.claim.counted))
    return Grant(wanted, 0, 0, False, None, spend, spend)


def decide_claim(wanted: Wanted, found: Found, *, held_poll: float, rule: DeathRule = USUAL) -> Decision:
    """What a claim is answered or what is to be stored for it; budgets are judged by the caller, over the page.

    ``held_poll``: seconds after which one that waits for another's lease asks again, at most.
    """
    claim, request = wanted.claim, wanted.request
    if found.run_state != "running":
        return ClaimAnswer(state="halted", reason=found.run_reason)
    if not term_holds(spending_term(request.shard, request.term), current=found.shard_term, held=found.shard_held):
        return ClaimAnswer(state="refused")
    if request.presence and not found.present:
        return ClaimAnswer(state="refused")
    receipt = found.receipt
    if receipt is None:
        return ClaimAnswer(state="absent") if request.only_cached else first_claim(wanted)
    output = receipt.output
    if output is not None and serves(
        completed_at=output.completed_at,
        started_at=claim.started_at,
        reusable=claim.reusable,
        force=claim.force,
        fresh_for=claim.fresh_for,
        retired_at=output.retired_at,
    ):
        return _served(output)
    if found.failure is not None:
        return ClaimAnswer(state="failed", failure=found.failure.failure, run_id=claim.run_id)
    return _decide_lease(wanted, receipt, held_poll, rule, tried=found.tried)


def _decide_lease(wanted: Wanted, receipt: Receipt, held_poll: float, rule: DeathRule, *, tried: bool) -> Decision:
    """No output and no failure answers: who may have the lease?"""
    claim, request = wanted.claim, wanted.request
    same = receipt.lease_id == claim.lease_id
    ours = same and receipt.run_id == claim.run_id  # else that run would pay
    match receipt.state:
        case "outcome_unknown":
            return ClaimAnswer(state="unknown", run_id=receipt.run_id, failure=receipt.last_failure)
        case "running" if ours:
            return Again(ClaimAnswer(state="granted", lease_id=claim.lease_id, dispatch=receipt.dispatch, took_over=receipt.took_over))
        case "queued" if ours and not request.only_cached and not receipt.over and not request.confirm:
            suspect = request.counts_deaths and rule.suspects(receipt.deaths)
            return Again(ClaimAnswer(state="granted", lease_id=claim.lease_id, took_over=receipt.took_over, alone=suspect))
        case "queued" | "running" if not receipt.over and not ours and not _is_newer_body(claim, receipt):
            return ClaimAnswer(state="held", wait_ms=_wait_ms(receipt.remaining, held_poll), run_id=receipt.run_id)
        case "running" if receipt.effect == "non_idempotent":
            return Doubt(receipt.revision)
        case "completed" | "failed" | "released" if same:
            # A copy of a claim that was served and ended before it came: its caller has another lease by now, or wants none.
            return ClaimAnswer(state="held", wait_ms=_wait_ms(held_poll, held_poll))
        case _ if request.only_cached:
            return ClaimAnswer(state="absent")
        case _:
            died = receipt.state == "running" and request.counts_deaths
            deaths = rule.counted(receipt.deaths, alone=receipt.alone) if died else receipt.deaths
            if died and rule.condemns(deaths):
                return Condemned(receipt.revision, claim.run_id, deaths, rule.failure(receipt.tool, deaths))
            former = former_charge(
                state=receipt.state,
                run_id=receipt.run_id,
                dispatch=receipt.dispatch,
                held=receipt.held,
                by_run=claim.run_id,
                counted=receipt.counted,
            )
            took_over = receipt.took_over or receipt.state == "running"
            spend = Spend(claim.cost, calls=int(claim.counted and not tried), retries=int(claim.counted and tried))
            net = net_spend(claim.run_id, spend, former)
            suspect = request.counts_deaths and rule.suspects(deaths)
            return Grant(wanted, receipt.revision, receipt.dispatch, took_over, former, spend, net, deaths, suspect)


def _is_newer_body(claim: Claim, receipt: Receipt) -> bool:
    """Whether the lease is of an earlier term of the body that asks: that one's executor has the run no more, so its lease is over."""
    return claim.run_id == receipt.run_id and claim.run_term is not None and receipt.run_term is not None and claim.run_term > receipt.run_term


def lapsed_presence(wanted: Wanted, found: Found) -> str | None:
    """The presence that stands between the claim and a live lease, though its process is silent: to be ended, if it stays so."""
    receipt = found.receipt
    if receipt is None or receipt.over or receipt.lease_id == wanted.claim.lease_id:
        return None
    return receipt.lapsed if receipt.state in {"queued", "running"} else None


def granted(grant: Grant, dispatch: int) -> ClaimAnswer:
    """The answer to a claim whose lease was stored; ``dispatch``: its own, 0 if it is not confirmed."""
    return ClaimAnswer(
        state="granted",
        lease_id=grant.wanted.claim.lease_id,
        dispatch=dispatch if grant.confirms else 0,
        took_over=grant.took_over,
        alone=grant.suspect,
    )


def waiting(wanted: Wanted, kind: Kind, held_poll: float) -> ClaimAnswer:
    """The answer to a claim that waits for what other claims of its run become, which have its budget of ``kind`` and are under way."""
    poll = SELDOMER * held_poll
    return ClaimAnswer(state="held", wait_ms=_wait_ms(poll, poll), run_id=wanted.claim.run_id, reason=taken_reason(kind))


def under_way_beside(grant: Grant, found: Found) -> Spend:
    """What calls under way have of its run's budgets, but for the dispatch that this claim takes over, of which nobody will tell what became."""
    former, receipt = grant.former, found.receipt
    counted = former is not None and former.fate == "unknown" and former.run_id == grant.wanted.claim.run_id
    if former is None or not counted or receipt is None or receipt.remaining <= 0:
        return found.account.open
    return found.account.open - former.held


def why_unconfirmed(lease_id: str, term: int | None, found: Found) -> Literal["halted", "refused", "lost"] | None:
    """Why a lease could not be confirmed under ``term`` (None: bound to no shard); None: nothing stands against it by now, try again."""
    if found.run_state != "running" or found.account.late:
        return "halted"
    if not term_holds(term, current=found.shard_term, held=found.shard_held):
        return "refused"
    receipt = found.receipt
    if receipt is None or receipt.lease_id != lease_id or receipt.state not in {"queued", "running"}:
        return "lost"
    return None


def stored_at(lease_id: str, dispatch: int, found: Found) -> float | None:
    """When the output of this lease's dispatch was stored, if it is (still) there.

    A dispatch number is never used twice for a key, so it tells the output even after the lease has moved on to a refresh.
    """
    receipt = found.receipt
    if receipt is None or receipt.output is None or receipt.output.dispatch != dispatch:
        return None
    return None if receipt.state == "completed" and receipt.lease_id != lease_id else receipt.output.completed_at


def was_failed(lease_id: str, dispatch: int, found: Found) -> bool:
    """Whether this lease's end without an output is on record already."""
    receipt = found.receipt
    if receipt is None:
        return False
    if found.failure is not None and dispatch and found.failure.dispatch == dispatch:
        return True
    ended = receipt.state in {"failed", "released", "outcome_unknown"}
    return ended and receipt.lease_id == lease_id and dispatch in {0, receipt.dispatch}


def _served(output: Output) -> ClaimAnswer:
    if output.body is None:  # there was no room for it in this answer: it is there for the asking
        return ClaimAnswer(state="held", wait_ms=0)
    return ClaimAnswer(
        state="completed",
        output=msgspec.Raw(output.body),
        no_result=output.no_result,
        cost=output.cost,
        run_id=output.run_id,
        caller=output.caller,
        completed_at=output.completed_at,
        dispatch=output.dispatch,
    )


def _wait_ms(remaining: float, poll: float) -> int:
    return max(1, int(1000 * min(max(remaining, 0.0), poll)))
