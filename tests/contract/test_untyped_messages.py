"""A client that cannot set AMQP properties is understood by the routing key that it published under."""

from __future__ import annotations

import pytest

from rowmill_contracts.envelope import Message, UndecodableMessage
from rowmill_contracts.public import decode_untyped
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.runs import EventArrived, InputPage, InputSealed, RunStart, RunStop


@pytest.mark.parametrize(
    ("key", "body", "meant"),
    [
        ("runs.start", b'{"play": "leads"}', RunStart),
        ("runs.stop", b'{"run_id": "r"}', RunStop),
        ("runs.retry", b'{"run_id": "r"}', RunRetry),
        ("runs.event", b'{"name": "reply", "key": "k"}', EventArrived),
        ("inputs", b'{"input_id": "i", "page": 0, "rows": [{}]}', InputPage),
        ("inputs", b'{"input_id": "i", "pages": 1, "rows": 1}', InputSealed),
    ],
)
def test_the_key_says_what_a_message_without_type_is(key: str, body: bytes, meant: type[Message]) -> None:
    assert isinstance(decode_untyped(key, body), meant)


def test_a_body_that_does_not_fit_its_key_is_told_why() -> None:
    with pytest.raises(UndecodableMessage, match=r"not a valid RunStart\.v1.*missing required field `play`"):
        decode_untyped("runs.start", b"{}")


def test_a_page_that_is_wrong_is_told_what_either_type_wants() -> None:
    with pytest.raises(UndecodableMessage, match=r"InputPage\.v1.*InputSealed\.v1"):
        decode_untyped("inputs", b'{"input_id": "i"}')


def test_internal_messages_must_name_their_type() -> None:
    with pytest.raises(UndecodableMessage, match="no public key"):
        decode_untyped("executor.rows.v1", b"{}")
