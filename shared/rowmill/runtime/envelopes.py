"""The AMQP properties that every message of ours carries (DESIGN.md, "Contracts")."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from typing import Any, Final

import aio_pika

from rowmill.runtime.deliveries import traceparent

SHORT_STRING: Final = 255
"""Bytes of a property or a routing key at most. An id of so many characters may have four times as many."""


def envelope_of(
    body: bytes,
    message_type: str | None,
    *,
    at: float,
    message_id: str,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    headers: dict[str, Any] | None = None,
) -> aio_pika.Message:
    """A persistent JSON message. ``at``: seconds since the epoch. It carries on the trace of the message being handled, or begins one.
    An id that is too long for a property goes by its digest, the same each time; the body says it whole.
    """
    trace = traceparent.get() or f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    return aio_pika.Message(
        body,
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        type=message_type,
        message_id=_fitting(message_id),
        correlation_id=None if correlation_id is None else _fitting(correlation_id),
        reply_to=reply_to,
        timestamp=datetime.fromtimestamp(at, UTC),
        headers={"traceparent": trace, **(headers or {})},
    )


def _fitting(identity: str) -> str:
    text = identity.encode()
    return identity if len(text) <= SHORT_STRING else hashlib.sha256(text).hexdigest()
