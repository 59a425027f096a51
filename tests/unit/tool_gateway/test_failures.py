from __future__ import annotations

import pytest

from rowmill_contracts.tools import Effect
from rowmill_tool_gateway.failures import (
    REASON,
    Decision,
    Defer,
    Fail,
    Halt,
    Observation,
    OutcomeUnknown,
    Refresh,
    Retry,
    RetryPolicy,
    decide,
    retry_after_seconds,
    speaks_of_payment,
)

POLICY = RetryPolicy(attempts=5, first=0.2, limit=5.0)


def follow(seen: Observation, *, effect: Effect = "read", retry_5xx: bool | None = None, attempt: int = 1) -> Decision:
    return decide(
        seen,
        tool="hunter.find",
        provider="hunter",
        effect=effect,
        retry_5xx=effect != "non_idempotent" if retry_5xx is None else retry_5xx,
        attempt=attempt,
        policy=POLICY,
        jitter=0.5,
    )


def answered(status: int, **facts: object) -> Observation:
    return Observation("answered", f"the provider answered {status}", status=status, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "effect", "kind", "charged"),
    [
        (Observation("never_opened", ""), "read", Retry, False),
        (Observation("never_opened", ""), "non_idempotent", Retry, False),
        (Observation("no_answer", ""), "read", Retry, True),
        (Observation("no_answer", ""), "idempotent", Retry, True),
        (Observation("bad_answer", ""), "read", Retry, True),
        (answered(408), "idempotent", Retry, True),
        (answered(500), "read", Retry, True),
        (answered(400), "read", Fail, True),
        (answered(404), "non_idempotent", Fail, True),
        (answered(301), "read", Fail, True),
        (Observation("wrong_answer", ""), "read", Fail, True),
        (Observation("too_large", ""), "non_idempotent", Fail, True),
        (Observation("crashed", ""), "read", Fail, True),
        (Observation("misdefined", ""), "non_idempotent", Fail, False),
        (Observation("raised", "", retryable=True), "non_idempotent", Retry, True),
        (Observation("raised", ""), "read", Fail, True),
    ],
)
def test_what_follows_and_whether_it_may_have_cost_something(seen: Observation, effect: Effect, kind: type, charged: bool) -> None:
    decision = follow(seen, effect=effect)
    assert isinstance(decision, Retry | Fail)
    assert type(decision) is kind
    assert decision.charged is charged


@pytest.mark.parametrize(
    "seen", [Observation("no_answer", ""), Observation("bad_answer", ""), answered(408), answered(500), answered(503), Observation("crashed", "")]
)
def test_what_may_have_had_its_effect_is_unknown_where_it_may_not_be_repeated(seen: Observation) -> None:
    assert isinstance(follow(seen, effect="non_idempotent"), OutcomeUnknown)


def test_a_tool_may_forbid_or_allow_the_repetition_of_5xx() -> None:
    assert isinstance(follow(answered(500), effect="read", retry_5xx=False), Fail)
    assert isinstance(follow(answered(500), effect="non_idempotent", retry_5xx=True), Retry)


@pytest.mark.parametrize("status", [425, 429])
def test_a_busy_provider_makes_the_call_wait(status: int) -> None:
    decision = follow(answered(status, retry_after=3.0), attempt=9)
    assert isinstance(decision, Defer)
    assert decision.wait == 3.0
    assert decision.failure.category == "rate_limited"


def test_payment_halts_whether_the_status_or_the_body_says_so() -> None:
    assert isinstance(follow(answered(402)), Halt)
    assert isinstance(follow(answered(403, says_payment=True)), Halt)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('the provider answered 402: {\n  "error": "pay"\n}', 'payment: provider hunter answered 402: { "error": "pay" }'),
        ("no credits left", "payment: provider hunter: no credits left"),
        ("x" * 2000, f"payment: provider hunter: {'x' * REASON}…"),
        ("\x1b[2Jpay\x07 now", "payment: provider hunter: [2Jpay now"),
    ],
)
def test_the_run_waits_for_a_reason_that_names_the_provider_and_what_it_said(message: str, reason: str) -> None:
    decision = follow(Observation("answered", message, status=402))
    assert isinstance(decision, Halt)
    assert decision.reason == reason


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_is_refreshed(status: int) -> None:
    assert isinstance(follow(answered(status)), Refresh)


def test_the_fifth_attempt_is_the_last_but_connections_that_never_open_only_wait() -> None:
    assert isinstance(follow(answered(500), attempt=4), Retry)
    assert isinstance(follow(answered(500), attempt=5), Fail)
    assert isinstance(follow(Observation("never_opened", ""), attempt=5), Defer)


def test_waits_double_with_jitter_up_to_their_limit_and_heed_retry_after() -> None:
    assert [POLICY.wait(attempt, 1.0) for attempt in (1, 2, 3, 9)] == [0.2, 0.4, 0.8, 5.0]
    assert POLICY.wait(1, 0.0) == 0.1
    decision = follow(answered(503, retry_after=30.0))
    assert isinstance(decision, Retry)
    assert decision.after == 30.0


def test_the_record_names_tool_provider_code_and_status() -> None:
    decision = follow(answered(422, request_id="req-1"))
    assert isinstance(decision, Fail)
    failure = decision.failure
    assert (failure.tool, failure.provider, failure.code, failure.status, failure.request_id) == ("hunter.find", "hunter", "http_422", 422, "req-1")
    assert (failure.origin, failure.category, failure.retryable) == ("provider", "rejected", False)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 1.5 ", 1.5),
        ("-3", None),
        ("1_0", None),
        ("99999999999", 99999999999.0),
        ("9" * 400, None),
        ("Thu, 01 Jan 1970 00:02:00 -0000", 20.0),
        ("Thu, 01 Jan 99999 00:00:00 GMT", None),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(header, now=100.0) == seconds


@pytest.mark.parametrize(
    ("status", "body", "retry_after", "payment"),
    [
        (403, b'{"error": {"code": "insufficient_quota"}}', None, True),
        (429, b'{"message": "Insufficient Quota"}', None, True),
        (429, b'{"message": "quota-exceeded"}', 2.0, False),
        (400, b"no such quotation", None, False),
        (500, b"billing_not_active", None, False),
    ],
)
def test_bodies_that_speak_of_money(status: int, body: bytes, retry_after: float | None, payment: bool) -> None:
    assert speaks_of_payment(status, body, retry_after) is payment
