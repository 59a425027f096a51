"""Calls of tools: what executors ask gateways for, and what they are answered."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec

from rowmill_contracts.envelope import NULL, Message, message
from rowmill_contracts.runs import Force

Effect = Literal["read", "idempotent", "non_idempotent"]
ExecutionKind = Literal["live", "cache", "in_flight"]


class ToolFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The typed record of a failed call (SPEC 4.4).

    ``origin``: who says so (``provider``, ``gateway``, ``tool``, ``receipts``). ``category``: ``unreachable``, ``no_answer``, ``bad_answer``,
    ``rate_limited``, ``payment``, ``auth``, ``redirect``, ``rejected``, ``unavailable``, ``too_large``, ``definition``, ``dead_lettered``.
    ``retry_after``: seconds.
    """

    tool: str
    code: str
    message: str
    provider: str = ""
    origin: str = "provider"
    category: str = "rejected"
    retryable: bool = False
    status: int | None = None
    request_id: str | None = None
    retry_after: float | None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call. ``call_id`` is unique in the asking process and comes back in the answer; ``row``: ``<dataset>/<row key>``, who asks (and pays);
    ``asked``: when this call was first asked for, seconds since the epoch, kept over parking;
    ``max_wait``: seconds that it waits for a provider that does not serve.
    """

    call_id: str
    tool: str
    receipt_key: str
    input: msgspec.Raw
    row: str = ""
    asked: float = 0
    force: bool = False
    stale_after: float | None = None
    timeout: float | None = None
    max_wait: float | None = None


@message()
class ToolCalls(Message, frozen=True, kw_only=True):
    """Calls of one run. Answered on ``reply_to`` in any grouping and order."""

    run_id: str
    org: str
    play: str
    started_at: float
    calls: list[CallItem]
    force: Force | None = None


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``completed`` and ``no_result``: ``result`` holds ``{"raw", "data", "meta", "job_id"}``. ``failed``: ``failure``. ``deferred``: try again
    in ``wait_ms``, or as soon as the ``provider`` that keeps it waiting serves again (``away``: it does not serve now; else it is a matter of turns).
    ``halted``: the run was stopped or halted. ``unknown``: the outcome of an earlier dispatch is not known.

    ``execution`` is ``live`` for the row that paid, also when its answer is read back later; ``cost`` is what that dispatch cost.
    """

    call_id: str
    outcome: Literal["completed", "no_result", "failed", "deferred", "halted", "unknown"]
    result: msgspec.Raw = NULL
    failure: ToolFailure | None = None
    execution: ExecutionKind = "live"
    receipt: str = ""
    cost: Decimal = Decimal(0)
    completed_at: float | None = None
    wait_ms: int = 0
    reason: str = ""
    provider: str = ""
    away: bool = False


@message()
class ToolResults(Message, frozen=True, kw_only=True):
    results: list[CallOutcome]
