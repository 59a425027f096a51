"""Which messages are suspected of crashing who handles them, and what becomes of a suspect (DESIGN.md, "When something dies"). Pure.

The broker counts the deliveries that came to nothing, whatever ended them: a crash, a cut connection, a stop. A delivery that this very process got
and outlived is known not to have been a crash, and does not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rowmill.errors import RowmillError
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.envelope import Message
from rowmill_contracts.halving import halves

SUSPECTED_AFTER: Final = 2
"""Crashes after which a message is suspect: its third delivery is to the suspect queue."""

POISON_AFTER: Final = 2
"""Crashes as a suspect, alone and at work, after which what cannot be halved is poison: it dies instead of its third delivery."""

CONDEMNED_AFTER: Final = 20
"""Deaths of its consumers, alone with it, after which it is poison although it was at rest each time: author code may hide from who watches it."""

CRASHES: Final = "x-rowmill-crashes"
"""Header of a suspect: crashes counted before this queue, as the broker's own count starts again at each hop."""

REMEMBERED: Final = 10_000
"""Deliveries that a process remembers to have outlived."""


class Poisonous(RowmillError):
    """A message crashed whoever handled it, although nothing else ran beside it."""

    code = "poison"


@dataclass(frozen=True)
class Handle:
    """Handle it as any message."""


@dataclass(frozen=True)
class Halve:
    """Publish these instead, as suspects of their own."""

    parts: tuple[Message, Message]


@dataclass(frozen=True)
class Bury:
    """Dead-letter it."""

    error: Poisonous


Verdict = Handle | Halve | Bury


def judge(message: Message, *, crashes: int, earlier: int, at_rest: int = 0) -> Verdict:
    """What becomes of a suspect. ``crashes``: of its consumers, alone with it; ``earlier``: before it came to be alone.

    ``at_rest``: those of ``crashes`` that are none of its doing, as far as anybody can tell.
    """
    if crashes > 0:
        parts = halves(message)
        if parts is not None:
            return Halve(parts)
    if crashes - at_rest >= POISON_AFTER:
        return Bury(Poisonous(f"poison: crashed its consumer {crashes + earlier} times"))
    if crashes >= CONDEMNED_AFTER:
        return Bury(Poisonous(f"poison: its consumer died {crashes + earlier} times, {at_rest} times while it only seemed to wait"))
    return Handle()


def failed_deliveries(headers: Mapping[str, Any]) -> int:
    """How often the broker delivered this message before, without an acknowledgement, since it came into its queue."""
    count = headers.get("x-delivery-count", 0)
    return count if isinstance(count, int) else 0


def may_have_crashed(delivery: Delivery) -> bool:
    """Whether a former delivery of this message may have ended with the process that had it in hand."""
    return delivery.deliveries > 1 or CRASHES in delivery.headers


def earlier_crashes(headers: Mapping[str, Any]) -> int:
    count = headers.get(CRASHES, 0)
    return count if isinstance(count, int) else 0


def untouched_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """A message's headers as its sender wrote them: without the broker's count, which it would go on from nowhere."""
    return {name: value for name, value in headers.items() if name != "x-delivery-count"}


class Outlived:
    """Deliveries to this process that were not acknowledged, by queue and message id: it lives, so they were no crashes."""

    def __init__(self) -> None:
        self._deliveries: OrderedDict[tuple[str, str], int] = OrderedDict()

    def crashes(self, queue: str, message_id: str, failed: int) -> int:
        """Of ``failed`` deliveries those that may have been crashes."""
        return max(0, failed - self._deliveries.get((queue, message_id), 0)) if failed else 0

    def delivered(self, queue: str, message_id: str) -> None:
        if message_id:
            key = (queue, message_id)
            self._deliveries[key] = self._deliveries.get(key, 0) + 1
            if len(self._deliveries) > REMEMBERED:
                self._deliveries.popitem(last=False)

    def acknowledged(self, queue: str, message_id: str) -> None:
        """It will not come again."""
        self._deliveries.pop((queue, message_id), None)
