"""What makes two calls the same, and what their providers are told about that."""

from __future__ import annotations

import itertools
from typing import Any

from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import idempotency_key, receipt_key, scope_of, short_digest

FACTS: dict[str, Any] = {
    "org": "acme",
    "scope": "",
    "tool_id": "hunter.find",
    "tool_version": "1",
    "canonical_input": canonical({"domain": "a.example", "deep": True}),
    "credential_scope": "HUNTER_KEY",
}


def test_a_key_is_made_of_all_that_makes_two_calls_the_same() -> None:
    others = {
        "org": "other",
        "scope": "play:leads",
        "tool_id": "hunter.match",
        "tool_version": "2",
        "canonical_input": canonical({"domain": "b.example", "deep": True}),
        "credential_scope": "OTHER_KEY",
    }
    keys = {receipt_key(**FACTS), *(receipt_key(**FACTS | {name: value}) for name, value in others.items())}
    assert len(keys) == 1 + len(others)
    assert receipt_key(**FACTS) == receipt_key(**FACTS | {"canonical_input": canonical({"deep": True, "domain": "a.example"})})


def test_no_fact_can_pass_for_part_of_another() -> None:
    keys = [receipt_key(**FACTS | {"org": org, "scope": scope, "tool_id": tool}) for org, scope, tool in itertools.permutations(["a", "ab", "b"])]
    assert len(set(keys)) == len(keys)
    assert receipt_key(**FACTS | {"org": "a", "scope": "bc"}) != receipt_key(**FACTS | {"org": "ab", "scope": "c"})


def test_scopes_of_two_kinds_are_never_one() -> None:
    named: dict[str, Any] = {"play": "x", "run_id": "x", "caller": "x", "call": "x"}
    assert len({scope_of(cache, **named) for cache in ("org", "play", "run", "none")}) == 4


def test_a_providers_key_is_the_calls_own_and_a_forced_calls_is_its_runs() -> None:
    key, other = receipt_key(**FACTS), receipt_key(**FACTS | {"org": "other"})
    told = [idempotency_key(key), idempotency_key(other), idempotency_key(key, "run-1"), idempotency_key(key, "run-2")]
    assert len(set(told)) == 4
    assert told[0] == idempotency_key(key)
    assert told[2] == idempotency_key(key, "run-1")
    assert key not in told, "a receipt's key is told to nobody"


def test_people_are_shown_too_little_of_a_key_to_use_it() -> None:
    key = receipt_key(**FACTS)
    assert key.startswith(short_digest(key))
    assert len(short_digest(key)) == 12
