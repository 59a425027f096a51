"""What a handler gets, and what becomes of a message whose handling fails: once, for every queue."""

from __future__ import annotations

import hashlib
import traceback
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from rowmill.errors import RowmillError
from rowmill.runtime.rest import Rest
from rowmill.said import said_by
from rowmill_contracts.envelope import Message
from rowmill_contracts.tools import ToolCalls

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""W3C trace context of the message that is being handled; what is published meanwhile carries it on."""


REPLAYED: Final = "x-rowmill-replayed"
"""Header of a message that died and was replayed by a person: what waited for it has ended, so whoever handles it brings it to its end. Its value
names the replay; a message that dies again keeps it, so that a replay knows the letters that it has made itself.
"""

MADE_ID: Final = "x-rowmill-made-id"
"""Header of a message that came without an id and moves to a queue of suspects or dead letters: its id there is made from its body, so that copies of
it have one id. Whoever handles it sees none.
"""

NAMED_ROWS: Final = 200
"""Row keys that a dead letter's header names at most; the body has them all."""


class Undecoded(Message, frozen=True, kw_only=True):
    """Stands for a message that could not be decoded (its body is in the delivery). It never travels, and so is not registered."""

    wire_type: str
    reason: str


@dataclass(frozen=True)
class Delivery:
    """A decoded message with what its sender and the broker say about it.

    ``deliveries`` counts the broker's deliveries of this message, this one included (starts again after a hop through a delay queue). ``rest``: of a
    suspect, where author code is watched.
    """

    message: Message
    body: bytes
    queue: str
    message_id: str = ""
    correlation_id: str = ""
    reply_to: str | None = None
    deliveries: int = 1
    headers: dict[str, Any] = field(default_factory=dict)
    rest: Rest | None = None


class Rejected(RowmillError):
    """The handler says that this message can never be handled: it is dead-lettered at once, with this reason."""

    code = "rejected"


def death_headers(
    error: BaseException, *, service: str, queue: str, exchange: str, key: str, attempts: int, first_failure: float, last_failure: float
) -> dict[str, Any]:
    """Why and where a message died (SPEC 6.1), as AMQP headers. Times: seconds since the epoch."""
    trace = "".join(traceback.format_exception(error))
    return {
        "x-rowmill-service": service,
        "x-rowmill-queue": queue,
        "x-rowmill-error-type": getattr(error, "code", None) or type(error).__name__,
        "x-rowmill-error": said_by(error)[:2000],
        "x-rowmill-traceback-digest": hashlib.sha256(trace.encode("utf-8", "replace")).hexdigest()[:16],
        "x-rowmill-attempts": attempts,
        "x-rowmill-first-failure-ms": int(first_failure * 1000),  # AMQP headers carry floats in single precision: minutes off
        "x-rowmill-last-failure-ms": int(last_failure * 1000),
        "x-rowmill-exchange": exchange,
        "x-rowmill-key": key,
    }


def subject_headers(message: Message) -> dict[str, Any]:
    """Run, play, dataset and row keys of a message, where it has them (calls: of the rows that asked), so that dead letters can be found by them."""
    headers: dict[str, Any] = {}
    for name in ("run_id", "play", "dataset"):
        value = getattr(message, name, None)
        if isinstance(value, str) and value:
            headers[f"x-rowmill-{name.replace('_', '-')}"] = value
    if isinstance(message, ToolCalls):
        asking = list(dict.fromkeys(call.row for call in message.calls if call.row))
        keys = [row.rpartition("/")[2] for row in asking]
        datasets = {row.rpartition("/")[0] for row in asking}
        if len(datasets) == 1:
            headers["x-rowmill-dataset"] = datasets.pop()
    else:
        rows = getattr(message, "rows", None)
        keys = [row.key for row in rows if hasattr(row, "key")] if isinstance(rows, list) else []
    if keys:
        headers["x-rowmill-row-keys"] = ",".join(keys[:NAMED_ROWS])
    return headers
