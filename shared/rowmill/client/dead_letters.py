"""Looking at dead letters where they lie, without taking any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aio_pika

from rowmill_contracts.topology import WORK_QUEUES, dead

HEADER = "x-rowmill-"


@dataclass(frozen=True)
class DeadLetter:
    """A message that could not be handled: where it was going, why and when it died, and whom it concerns.

    ``first_failure`` and ``last_failure``: seconds since the epoch. ``body`` is untouched.
    """

    queue: str
    message_id: str
    message_type: str
    error_type: str
    error: str
    service: str = ""
    attempts: int = 0
    first_failure: float | None = None
    last_failure: float | None = None
    traceback_digest: str = ""
    exchange: str = ""
    key: str = ""
    run_id: str = ""
    play: str = ""
    dataset: str = ""
    row_keys: list[str] = field(default_factory=list)
    body: bytes = b""


async def dead_letters(broker_url: str, *, queue: str | None = None, limit: int = 1000) -> list[DeadLetter]:
    """Dead letters of one work queue or all, oldest first in each, ``limit`` at most. They go back where they lay.

    Raises what aio-pika raises where no broker answers.
    """
    names = [queue] if queue is not None else [known.name for known in WORK_QUEUES]
    found: list[DeadLetter] = []
    connection = await aio_pika.connect(broker_url, timeout=10)
    async with connection:
        channel = await connection.channel()
        for name in names:
            lying = await channel.get_queue(dead(name), ensure=False)
            while len(found) < limit:
                message = await lying.get(fail=False)
                if message is None:
                    break
                found.append(_read(name, message))
    return found  # closing the connection gives every message back


def _read(queue: str, message: aio_pika.abc.AbstractIncomingMessage) -> DeadLetter:
    headers: dict[str, Any] = dict(message.headers or {})

    def text(name: str) -> str:
        value = headers.get(HEADER + name, "")
        return value if isinstance(value, str) else str(value)

    def number(name: str) -> float | None:
        value = headers.get(HEADER + name)
        return float(value) if isinstance(value, int | float) else None

    def seconds(name: str) -> float | None:
        milliseconds = number(name)
        return None if milliseconds is None else milliseconds / 1000

    reason = headers.get("x-first-death-reason")
    return DeadLetter(
        queue=queue,
        message_id=message.message_id or "",
        message_type=message.type or "",
        error_type=text("error-type") or (f"broker:{reason}" if reason else "unknown"),
        error=text("error"),
        service=text("service"),
        attempts=int(number("attempts") or 0),
        first_failure=seconds("first-failure-ms"),
        last_failure=seconds("last-failure-ms"),
        traceback_digest=text("traceback-digest"),
        exchange=text("exchange"),
        key=text("key"),
        run_id=text("run-id"),
        play=text("play"),
        dataset=text("dataset"),
        row_keys=[key for key in text("row-keys").split(",") if key],
        body=message.body,
    )
