"""What gateways, executors and admission ask of the receipt-store. Every request is bulk and index-aligned with its answer.

Requests are idempotent: the lease id is made by the caller, so a repeated claim is the same claim, and a repeated completion stores once.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

import msgspec

from rowmill_contracts.budgets import Limits
from rowmill_contracts.envelope import NULL, Message, message
from rowmill_contracts.tools import Effect, ToolFailure

MAX_ITEMS = 1000
"""Keys in one statement at most (SPEC 3.2)."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``started_at``: the run's start, against which freshness is judged. ``fresh_for``: a completed output older than this many seconds at
    the run's start does not serve (None: for ever). ``reusable``: outputs from before the run's start may serve (``read`` tools).
    ``cost``: reserved at most. ``caller``: who pays, ``<dataset>/<row key>``. ``run_term``: of the body that asks; a newer one of its run takes the
    lease over. ``counted`` false: no call of a budget of calls.
    """

    key: str
    lease_id: str
    run_id: str
    tool: str
    effect: Effect
    started_at: float
    caller: str = ""
    force: bool = False
    reusable: bool = True
    fresh_for: float | None = None
    cost: Decimal = Decimal(0)
    org: str = ""
    run_term: int | None = None
    counted: bool = True


@message()
class ClaimReceipts(Message, frozen=True, kw_only=True):
    """Claim keys for ``holder``. ``shard`` and ``term``: the right to spend; an older term is refused. ``confirm``: claim and confirm in one
    request (for calls dispatched at once), but for what a budget of its run pays for. ``only_cached``: answer what is stored, claim nothing.
    ``presence``: what the leases end with besides. ``counts_deaths``: a lease that a dead holder left running counts against its call, and
    ``holder`` knows how to send a suspect alone.
    """

    holder: str
    claims: Annotated[list[Claim], msgspec.Meta(max_length=MAX_ITEMS)]
    shard: int | None = None
    term: int | None = None
    confirm: bool = False
    only_cached: bool = False
    presence: str = ""
    counts_deaths: bool = False


ClaimState = Literal["granted", "completed", "failed", "held", "unknown", "halted", "over_budget", "refused", "absent"]


class ClaimAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``granted``: the lease is the caller's (``dispatch`` > 0 where confirmed; else it is to be before anything is sent, also where the claim was to
    confirm: a budget pays for it, and what may have been sent spends that). ``completed``: ``output`` serves. ``failed``: failed in this run.
    ``held``: another live lease, of ``run_id``, or claims of the run itself that are not sent have what is left of its budget; ask again after
    ``wait_ms``. ``unknown``: blocked until an operator decides. ``refused``: the shard's term is over, or the presence. ``absent``: nothing stored
    (``only_cached``). ``reason``: why the run is halted, which budget does not pay for which receipt, or which is taken meanwhile. ``run_id`` and
    ``caller``: who paid for the output; ``took_over``: an earlier dispatch may have had its effect (its lease expired while running).
    ``alone``: granted, and not confirmed even where that was asked for: gateways died with this call in hand, so it is to be sent alone, after a
    `Confirm` that says so.
    """

    state: ClaimState
    lease_id: str = ""
    dispatch: int = 0
    output: msgspec.Raw = NULL
    no_result: bool = False
    cost: Decimal = Decimal(0)
    run_id: str = ""
    caller: str = ""
    completed_at: float | None = None
    wait_ms: int = 0
    failure: ToolFailure | None = None
    took_over: bool = False
    reason: str = ""
    alone: bool = False


@message()
class ReceiptsClaimed(Message, frozen=True, kw_only=True):
    answers: list[ClaimAnswer]


class LeaseRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``batch_id``: to be confirmed, the request that is to carry it; empty: the one that the message names."""

    key: str
    lease_id: str
    run_id: str = ""
    dispatch: int = 0
    batch_id: str = ""


@message()
class Confirm(Message, frozen=True, kw_only=True):
    """Right before dispatch: ``queued`` leases become ``running``; ``batch_id`` names the request that carries those which name none. ``alone``:
    nothing else goes beside it in this process, so that the process's death is its own; confirmed again without, others go beside it from now on.
    """

    leases: Annotated[list[LeaseRef], msgspec.Meta(max_length=MAX_ITEMS)]
    shard: int | None = None
    term: int | None = None
    batch_id: str = ""
    alone: bool = False


class ConfirmAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``halted``: the run must not spend, for that ``reason``."""

    state: Literal["confirmed", "lost", "halted", "refused"]
    dispatch: int = 0
    reason: str = ""


@message()
class Confirmed(Message, frozen=True, kw_only=True):
    answers: list[ConfirmAnswer]


@message()
class Renew(Message, frozen=True, kw_only=True):
    """``presence``: what the leases end with from now on; empty: as before."""

    leases: Annotated[list[LeaseRef], msgspec.Meta(max_length=MAX_ITEMS)]
    presence: str = ""


@message()
class Renewed(Message, frozen=True, kw_only=True):
    held: list[bool]


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: str
    lease_id: str
    dispatch: int
    output: msgspec.Raw
    run_id: str
    no_result: bool = False
    cost: Decimal = Decimal(0)


@message()
class Complete(Message, frozen=True, kw_only=True):
    completions: Annotated[list[Completion], msgspec.Meta(max_length=MAX_ITEMS)]


class StoreAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``stored`` (also when it was stored before); ``superseded``: the lease moved, the result serves its row alone. ``rejected``: not storable
    (too large, not decodable): it became a stored, charged failure of that call.
    """

    state: Literal["stored", "superseded", "rejected"]
    completed_at: float | None = None


@message()
class Completed(Message, frozen=True, kw_only=True):
    answers: list[StoreAnswer]


class FailedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``outcome_unknown``: sent, no answer, and the effect may not be repeated. ``charged``: the dispatch may have cost something.
    ``final`` false: the lease goes back (a retry will claim again) but the charge of this dispatch stays. ``given_up``: nothing was claimed
    for the call, which failed for its run all the same (``lease_id`` empty, ``dispatch`` 0); no lease and no charge is touched.
    """

    key: str
    lease_id: str
    dispatch: int
    run_id: str
    failure: ToolFailure
    outcome_unknown: bool = False
    charged: bool = True
    final: bool = True
    given_up: Claim | None = None


@message()
class Fail(Message, frozen=True, kw_only=True):
    failures: Annotated[list[FailedCall], msgspec.Meta(max_length=MAX_ITEMS)]


@message()
class Release(Message, frozen=True, kw_only=True):
    """Give claimed, unsent leases back; their reservation is refunded. ``dispatch`` 0: nothing was ever sent under that lease id, whether or not the
    store confirmed it meanwhile; else that one dispatch was not sent. Only the lease's holder can know, and only for an id that it sends nothing
    with afterwards.
    """

    leases: Annotated[list[LeaseRef], msgspec.Meta(max_length=MAX_ITEMS)]


@message()
class Released(Message, frozen=True, kw_only=True):
    released: int = 0


@message()
class HaltRun(Message, frozen=True, kw_only=True):
    """From this commit claims and confirms of the run answer ``halted`` (``resume`` lifts a halt, never a stop).

    ``decision`` numbers what was decided on the run: an older one than the newest that was stored changes nothing, unless it is a stop, which
    stands whatever was decided before or after. A numbered decision is whole: its ``budget`` replaces the former one. 0: not numbered, applies to
    runs of which no numbered decision is known, and leaves the budgets that it does not name as they are. ``deadline``: when the run's wall time
    is over, in seconds since the epoch by the database's clock, unless the run is halted before. ``retry``: the run's failed rows are worked again,
    so from now on failures that it met before answer none of its calls; what it completed and what is unknown stays as it is.
    """

    run_id: str
    action: Literal["stop", "halt", "resume"]
    reason: str = ""
    budget: Decimal | Limits | None = None
    deadline: float | None = None
    decision: Annotated[int, msgspec.Meta(ge=0)] = 0
    retry: bool = False


@message()
class RunHalted(Message, frozen=True, kw_only=True):
    """How the run stands now, and why. ``superseded``: a newer decision was stored before, and this one changed nothing."""

    state: Literal["running", "halted", "stopped"]
    superseded: bool = False
    reason: str = ""


# ---- operators --------------------------------------------------------------------------------------------------------------------------

ReceiptState = Literal["queued", "running", "completed", "failed", "released", "outcome_unknown"]
ReceiptName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{4,64}$")]
"""What a receipt's digest begins with, in hexadecimal; it names a receipt where no other begins with it."""

PageName = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){0,32}$")]
"""Where a page of receipts begins, as the page before it said; empty: the first."""


class ReceiptView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A receipt as operators see it. ``receipt``: its short digest. ``lease_seconds``: what a live lease has left. ``reserved``: for the newest
    dispatch; ``cost``, ``completed_at``, ``output_bytes``: of the newest output, which ``output`` holds where one receipt is shown. ``failure``: of
    the newest dispatch that failed or whose outcome is unknown. ``deaths``: of gateways that had the call in hand, since an outcome was last
    reported; of one that is sent alone for that reason, those while it was.
    """

    receipt: str
    state: ReceiptState
    tool: str
    effect: Effect
    org: str
    run_id: str
    caller: str
    dispatch: int
    holder: str = ""
    batch_id: str = ""
    lease_seconds: float | None = None
    reserved: Decimal = Decimal(0)
    cost: Decimal | None = None
    completed_at: float | None = None
    output_bytes: int | None = None
    output: msgspec.Raw = NULL
    failure: ToolFailure | None = None
    deaths: int = 0


@message()
class ListReceipts(Message, frozen=True, kw_only=True):
    """Receipts in the order of their digests. ``after``: what the last page said, for the next one."""

    state: ReceiptState | None = None
    run_id: str | None = None
    tool: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    after: PageName = ""


@message()
class ReceiptsListed(Message, frozen=True, kw_only=True):
    """``after``: names the page that follows; empty: this was the last."""

    receipts: list[ReceiptView]
    after: str = ""


@message()
class GetReceipt(Message, frozen=True, kw_only=True):
    receipt: ReceiptName


@message()
class ReceiptShown(Message, frozen=True, kw_only=True):
    """``matches``: how many receipts the name fits (3: three or more); ``receipt`` is there where it is one."""

    matches: int
    receipt: ReceiptView | None = None


@message()
class SettleReceipt(Message, frozen=True, kw_only=True):
    """An operator says how a dispatch of unknown outcome ended. ``completed``: with ``output`` (the answer's body), at ``cost`` (None: what was
    reserved). ``failed``: for its run, charged at what was reserved, because of ``message``.
    """

    receipt: ReceiptName
    outcome: Literal["completed", "failed"]
    output: msgspec.Raw = NULL
    no_result: bool = False
    cost: Decimal | None = None
    message: str = ""


@message()
class ReplayReceipt(Message, frozen=True, kw_only=True):
    """An operator allows one more dispatch after one of unknown outcome, which stays charged."""

    receipt: ReceiptName


@message()
class ReceiptSettled(Message, frozen=True, kw_only=True):
    """``decided``: the decision is stored, now or before. ``not_unknown``: its outcome is not unknown (any more), and nothing changed.
    ``rejected``: the output cannot be stored. ``absent``, ``ambiguous``: the name fits no receipt, or several. ``receipt``: as it is now.
    """

    state: Literal["decided", "not_unknown", "rejected", "absent", "ambiguous"]
    receipt: ReceiptView | None = None


@message()
class PruneReceipts(Message, frozen=True, kw_only=True):
    """Prune completed outputs and failures older than ``older_than`` seconds, in the next page of receipts. ``after``: what the last page said.

    First without ``oldest_run``: outputs are retired, they serve no run that starts from then on. Then with it (when the oldest run started that is
    not over, or could be retried; where there is none, what retiring said last): forgets what no such run could need; with ``dry_run`` counts
    only. Never a lease, nor an outcome that is unknown.
    """

    older_than: Annotated[float, msgspec.Meta(ge=0)]
    after: PageName = ""
    dry_run: bool = False
    oldest_run: float | None = None


@message()
class ReceiptsPruned(Message, frozen=True, kw_only=True):
    """Of this page: how many of each were forgotten, or retired, ``at`` that time. ``after``: names the page that follows; empty: it was the last."""

    retired: int = 0
    at: float = 0
    completed: int = 0
    ended: int = 0
    failures: int = 0
    bytes: int = 0
    after: str = ""
