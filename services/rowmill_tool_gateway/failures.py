"""What follows from how a request ended (SPEC 4.4). Pure and driven by two tables; the decision is a value that others apply.

An `Observation` says what was seen; `decide` says what follows for one call, given what its tool allows and how often it was tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, Literal

from rowmill.said import on_one_line, printable
from rowmill_contracts.tools import Effect, ToolFailure

Kind = Literal["answered", "not_sent", "never_opened", "no_answer", "bad_answer", "wrong_answer", "too_large", "raised", "crashed", "misdefined"]


@dataclass(frozen=True, slots=True)
class Observation:
    """How a request, or one item of it, ended without a result.

    ``answered``: the provider answered with ``status``. ``not_sent``: the right to send ended before anything was. ``never_opened``: no connection,
    so nothing was sent. ``no_answer``: sent, and the answer never came. ``bad_answer``: it came and cannot be read. ``wrong_answer``: it can be
    read and does not fit the tool. ``raised``: a tool function said so by `ToolError`. ``crashed``: a tool function raised something else.
    ``misdefined``: nothing was sent, the tool cannot work.

    ``retry_after``: seconds. ``category`` and ``code`` override what the tables say. ``says_payment``: the body speaks of quota or billing.
    """

    kind: Kind
    message: str
    status: int | None = None
    retry_after: float | None = None
    request_id: str | None = None
    code: str | None = None
    category: str | None = None
    retryable: bool = False
    says_payment: bool = False


# ---- decisions --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again in ``after`` seconds. ``charged``: this try may have cost something."""

    after: float
    failure: ToolFailure
    charged: bool


@dataclass(frozen=True, slots=True)
class Defer:
    """Not the call's fault: it waits. ``wait``: seconds, None where the provider did not say."""

    wait: float | None
    failure: ToolFailure


@dataclass(frozen=True, slots=True)
class Fail:
    failure: ToolFailure
    charged: bool


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """It may have had its effect, and the effect may not be repeated."""

    failure: ToolFailure


@dataclass(frozen=True, slots=True)
class Halt:
    """The run must wait for its owner."""

    reason: str
    failure: ToolFailure


@dataclass(frozen=True, slots=True)
class Refresh:
    """The credential was refused: resolve it anew and try once more, else fail."""

    failure: ToolFailure


Decision = Retry | Defer | Fail | OutcomeUnknown | Halt | Refresh


# ---- the tables -------------------------------------------------------------------------------------------------------------------------


class Follow(Enum):
    """What follows in principle; what the effect allows and how often it was tried decide the rest."""

    REPEAT = "repeat if the effect allows, else fail or outcome_unknown"
    REPEAT_5XX = "repeat if the tool allows, else fail or outcome_unknown"
    REOPEN = "try again, whatever the effect"
    WAIT = "wait"
    HALT = "the run waits"
    REFRESH = "refresh the credential once"
    FAIL = "fail"
    RAISED = "as the tool function says"


@dataclass(frozen=True, slots=True)
class Rule:
    follow: Follow
    category: str
    code: str
    charged: bool = True


BY_KIND: Final[Mapping[str, Rule]] = {
    "not_sent": Rule(Follow.REOPEN, "unreachable", "not_sent", charged=False),
    "never_opened": Rule(Follow.REOPEN, "unreachable", "connection_failed", charged=False),
    "no_answer": Rule(Follow.REPEAT, "no_answer", "no_answer"),
    "bad_answer": Rule(Follow.REPEAT, "bad_answer", "unreadable_answer"),
    "wrong_answer": Rule(Follow.FAIL, "bad_answer", "wrong_answer"),
    "too_large": Rule(Follow.FAIL, "too_large", "too_large"),
    "raised": Rule(Follow.RAISED, "rejected", "tool_error"),
    "crashed": Rule(Follow.FAIL, "definition", "tool_crashed"),
    "misdefined": Rule(Follow.FAIL, "definition", "tool_misdefined", charged=False),
}

BY_STATUS: Final[Mapping[int, Rule]] = {
    401: Rule(Follow.REFRESH, "auth", "http_401", charged=False),
    402: Rule(Follow.HALT, "payment", "payment", charged=False),
    403: Rule(Follow.REFRESH, "auth", "http_403", charged=False),
    408: Rule(Follow.REPEAT, "no_answer", "http_408"),
    425: Rule(Follow.WAIT, "rate_limited", "http_425", charged=False),
    429: Rule(Follow.WAIT, "rate_limited", "http_429", charged=False),
}

PAYMENT = BY_STATUS[402]
PAYMENT_WORDS: Final = (
    b"insufficient_quota",
    b"quota_exceeded",
    b"insufficient_credit",
    b"insufficient_funds",
    b"out_of_credits",
    b"payment_required",
    b"billing_hard_limit",
    b"billing_not_active",
)
"""What bodies say when money is the matter, in any spelling of spaces, hyphens and case."""
REASON: Final = 160
"""Letters of what a provider said that go into the reason for which a run waits."""
_SPELLING = bytes.maketrans(b" -", b"__")
_LOOKED_AT = 4096
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


def rule_for(seen: Observation) -> Rule:
    """The row of the tables that this falls under."""
    if seen.status is None:
        return BY_KIND[seen.kind]
    if seen.says_payment:
        return PAYMENT
    rule = BY_STATUS.get(seen.status)
    if rule is not None:
        return rule
    if seen.kind == "raised":
        return BY_KIND["raised"]
    code = f"http_{seen.status}"
    if seen.status >= 500:
        return Rule(Follow.REPEAT_5XX, "no_answer", code)
    if 300 <= seen.status < 400:
        return Rule(Follow.FAIL, "redirect", code)
    return Rule(Follow.FAIL, "rejected", code)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts``: tries of a call in all. Waits between them double from ``first`` to ``limit`` seconds, with jitter over the upper half."""

    attempts: int
    first: float
    limit: float

    def wait(self, attempt: int, jitter: float) -> float:
        return min(self.limit, self.first * 2.0 ** min(attempt - 1, 30)) * (0.5 + jitter / 2)


def decide(
    seen: Observation, *, tool: str, provider: str, effect: Effect, retry_5xx: bool, attempt: int, policy: RetryPolicy, jitter: float
) -> Decision:
    """What follows for a call whose try number ``attempt`` (from 1) ended like this. ``jitter``: from 0 to 1."""
    rule = rule_for(seen)
    may_repeat = {
        Follow.REPEAT: effect != "non_idempotent",
        Follow.REPEAT_5XX: retry_5xx,
        Follow.RAISED: seen.retryable,
        Follow.REOPEN: True,
        Follow.WAIT: True,
        Follow.HALT: True,
    }.get(rule.follow, False)
    failure = ToolFailure(
        tool=tool,
        provider=provider,
        code=printable(seen.code or rule.code),
        message=printable(seen.message),
        origin="tool" if seen.kind in {"raised", "crashed"} else "gateway" if seen.kind == "misdefined" else "provider",
        category=printable(seen.category or rule.category),
        retryable=may_repeat,
        status=seen.status,
        request_id=None if seen.request_id is None else printable(seen.request_id),
        retry_after=seen.retry_after,
    )
    match rule.follow:
        case Follow.WAIT:
            return Defer(seen.retry_after, failure)
        case Follow.HALT:
            return Halt(unpaid(provider, failure.message), failure)
        case Follow.REFRESH:
            return Refresh(failure)
        case Follow.REOPEN if attempt >= policy.attempts:
            return Defer(seen.retry_after, failure)
    if may_repeat and attempt < policy.attempts:
        return Retry(max(policy.wait(attempt, jitter), seen.retry_after or 0.0), failure, rule.charged)
    if effect == "non_idempotent" and not may_repeat and (rule.follow in {Follow.REPEAT, Follow.REPEAT_5XX} or seen.kind == "crashed"):
        return OutcomeUnknown(failure)
    return Fail(failure, rule.charged)


def unpaid(provider: str, message: str) -> str:
    """Why a run waits whose provider wants to be paid: which one, and what it said. Short, as each row that waits carries it."""
    said = on_one_line(message, REASON)
    told = said.removeprefix("the provider ")
    return f"payment: provider {provider}{': ' if told == said else ' '}{told}"


def speaks_of_payment(status: int, body: bytes, retry_after: float | None) -> bool:
    """Whether a refusal is about money rather than about this call. A 429 that says when to come back is about speed."""
    if not 400 <= status < 500 or (status == 429 and retry_after is not None):
        return False
    text = body[:_LOOKED_AT].lower().translate(_SPELLING)
    return any(word in text for word in PAYMENT_WORDS)


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """What a ``Retry-After`` header says, in seconds from ``now`` (seconds since the epoch): a number or an HTTP date. None: nothing usable."""
    if value is None:
        return None
    text = value.strip()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    try:
        date = parsedate_to_datetime(text)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None
