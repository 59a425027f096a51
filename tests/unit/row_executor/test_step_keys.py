"""What makes two steps the same, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rowmill.errors import DefinitionError, UsageError
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.step_calling import StepIds


def one() -> int:
    return 1


def key_of(fn: Callable[[], Any] = lambda: 1, **facts: Any) -> str:
    asked: dict[str, Any] = {"id": "score", "run": "run-1", "play": "leads", "org": "ours", "caller": "people/k1", "column": "a"}
    asked |= {"semantic_key": None, "stale_after": None, "blocking": False, "effect": "idempotent"} | facts
    asker = Asker(asked.pop("run"), asked.pop("org"), asked.pop("play"), 0.0)
    return StepIds("a test").prepare(asker, asked.pop("id"), fn, **asked).key


@pytest.mark.parametrize(
    "other", [{"id": "other"}, {"org": "theirs"}, {"run": "run-2"}, {"caller": "people/k2"}, {"column": "b"}, {"semantic_key": [1, {"b": 2}]}]
)
def test_a_key_is_made_of_run_place_id_and_semantic_key(other: dict[str, Any]) -> None:
    assert key_of() == key_of(play="it is the run's")
    assert key_of() != key_of(**other)


def test_with_a_cache_lifetime_the_play_shares_and_the_code_counts() -> None:
    row = {"n": 1}

    def same() -> Any:
        return row["n"]

    first = key_of(same, stale_after="1h")
    row = {"n": 2}
    assert key_of(same, stale_after="1d", run="run-2") == first
    assert key_of(same, stale_after="1h", play="other") != first
    assert key_of(lambda: row["n"] + 1, stale_after="1h") != first


def test_within_a_run_the_code_counts_too_for_a_retry_may_have_other_code() -> None:
    def scored(row: dict[str, int]) -> Callable[[], int]:
        return lambda: row["n"]

    assert key_of(scored({"n": 1})) == key_of(scored({"n": 2}))
    assert key_of(scored({"n": 1})) != key_of(lambda: 1)
    assert key_of(scored({"n": 1}), effect="non_idempotent") == key_of(lambda: 1, effect="non_idempotent"), "it must not be repeated for that"


def test_a_key_is_the_same_whichever_row_has_the_step_first() -> None:
    def scored(times: Callable[[], int], N: int) -> Callable[[], int]:  # noqa: N803 - a constant's name, which is none here
        return lambda: times() * N

    first, second = (key_of(scored(times, number)) for times, number in ((lambda: 1, 1), (lambda: 2, 1)))
    assert first != second, "code that is closed over counts"
    assert len({key_of(scored(one, number)) for number in range(3)}) == 1, "what else is closed over does not"


@pytest.mark.parametrize(
    ("id", "fn", "says"),
    [
        ("", one, "a step's id is text of 1 to 200 characters, not ''"),
        ("a\0b", one, r"step id 'a\x00b' is not allowed: it must be printable text; what tells one use from another can go into semantic_key="),
        ("\ud800", one, r"step id '\ud800' is not allowed: it must be printable text; what tells one use from another can go into semantic_key="),
        (" ", one, "step id ' ' is not allowed: it must be printable text; what tells one use from another can go into semantic_key="),
        ("score", 5, "step 'score': give it a function without arguments, such as lambda: work(row), not 'int'"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused_with_advice(id: str, fn: Any, says: str) -> None:  # noqa: A002
    with pytest.raises(DefinitionError) as refused:
        key_of(fn, id=id)
    assert str(refused.value) == says


def test_a_semantic_key_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(DefinitionError, match="step 'score': semantic_key: a value of type object"):
        key_of(semantic_key=object())


def test_the_same_id_is_free_again_once_its_step_has_ended() -> None:
    ids = StepIds("here")
    asker = Asker("run", "org", "play", 0.0)
    facts: dict[str, Any] = {"semantic_key": None, "stale_after": None, "blocking": False, "effect": "idempotent"}
    step = ids.prepare(asker, "one", one, **facts)
    with ids.in_hand("", step), pytest.raises(UsageError):
        ids.prepare(asker, "one", one, **facts)
    assert ids.prepare(asker, "one", one, **facts).key != step.key
