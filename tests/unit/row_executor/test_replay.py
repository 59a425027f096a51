"""The record met again."""

from __future__ import annotations

import pytest

from rowmill.errors import NonDeterministicPlay
from rowmill_contracts.runs import RecordedCall
from rowmill_row_executor.replay import MetCall, Replay


def on_record(*names: str) -> list[RecordedCall]:
    return [RecordedCall(position=position, kind="call", name=name, request="r") for position, name in enumerate(names)]


def test_calls_on_record_are_found_again_by_what_they_are_called() -> None:
    replay = Replay(on_record("a", "b", "a"))
    met = [replay.meet("call", name, "r", "body") for name in ("a", "b", "a")]
    assert [call.recorded.position for call in met if call.recorded] == [0, 1, 2]
    assert replay.exhausted


def test_a_call_past_the_record_is_new_and_gets_the_next_position() -> None:
    replay = Replay(on_record("a"))
    replay.meet("call", "a", "r", "body")
    met = replay.meet("call", "b", "r", "body")
    assert met.recorded is None
    assert replay.record(met).position == 1
    assert replay.record(MetCall("call", "c", "r")).position == 2


def test_another_request_under_the_same_name_is_refused_showing_both() -> None:
    with pytest.raises(NonDeterministicPlay, match=r"recorded call 'a' \(r\), met call 'a' \(other\)"):
        Replay(on_record("a")).meet("call", "a", "other", "body")


def test_calls_of_one_branch_keep_their_order() -> None:
    replay = Replay(on_record("a", "b"))
    replay.meet("call", "b", "r", "body")
    with pytest.raises(NonDeterministicPlay, match="another order"):
        replay.meet("call", "a", "r", "body")


def test_branches_may_come_in_any_order() -> None:
    replay = Replay(on_record("a", "b", "a2", "b2"))
    for name, branch in (("b", 2), ("b2", 2), ("a", 1), ("a2", 1)):
        assert replay.meet("call", name, "r", branch).recorded is not None
    assert replay.exhausted
    assert not replay.one_branch


def test_what_was_not_met_is_named_in_the_contradiction() -> None:
    replay = Replay(on_record("a", "b"))
    replay.meet("call", "a", "r", "body")
    assert "recorded call 'b' (r), met the end" in str(replay.contradiction("the end"))
