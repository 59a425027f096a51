"""Public messages that come without a type: clients that cannot set AMQP properties say what they mean by the routing key alone."""

from __future__ import annotations

from typing import Final

from rowmill_contracts.envelope import Message, UndecodableMessage, decode
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.runs import EventArrived, InputPage, InputSealed, RunStart, RunStop
from rowmill_contracts.topology import INPUTS, RUNS_EVENT, RUNS_RETRY, RUNS_START, RUNS_STOP

BY_KEY: Final[dict[str, tuple[type[Message], ...]]] = {
    RUNS_START: (RunStart,),
    RUNS_STOP: (RunStop,),
    RUNS_RETRY: (RunRetry,),
    RUNS_EVENT: (EventArrived,),
    INPUTS: (InputPage, InputSealed),
}
"""What a message under a public key may be. No body fits two types of one key: a page has ``page``, a seal has ``pages`` and counts its rows."""


def decode_untyped(key: str, body: bytes) -> Message:
    """The message that a body without type is, by the key that it was published under.

    Raises:
        UndecodableMessage: the key is not public, or the body fits none of its types; says why for each.

    """
    reasons: list[str] = []
    for struct in BY_KEY.get(key, ()):
        try:
            return decode(struct.message_type, body)
        except UndecodableMessage as error:
            reasons.append(str(error))
    raise UndecodableMessage("; ".join(reasons) or f"a message without type under {key!r}, which is no public key")
