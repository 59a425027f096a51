"""Whether a consumer consumes: judged from what the broker says of its queue and what arrived here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

IDLE_LOOKS: Final = 3
"""Looks in a row at which messages were ready, we could have taken some, and none arrived, after which the consumer counts as dead."""


@dataclass
class ConsumerWatch:
    """One attached consumer. ``single_active``: the queue serves one of its consumers only, so that ours may rightly get nothing."""

    queue: str
    prefetch: int
    single_active: bool = False
    delivered: int = 0
    in_hand: int = 0
    _seen: int = field(default=0, repr=False)
    _idle: int = field(default=0, repr=False)

    def began(self) -> None:
        self.delivered += 1
        self.in_hand += 1

    def ended(self) -> None:
        self.in_hand -= 1

    def look(self, *, ready: int, consumers: int) -> str | None:
        """What is wrong with this consumer, if anything. ``ready``, ``consumers``: what the broker counts at the queue."""
        arrived, self._seen = self.delivered != self._seen, self.delivered
        if consumers == 0:
            return f"nobody consumes {self.queue}, and we should"
        owed = ready > 0 and not arrived and self.in_hand < self.prefetch and (consumers == 1 or not self.single_active)
        self._idle = self._idle + 1 if owed else 0
        if self._idle >= IDLE_LOOKS:
            return f"{self.queue} has {ready} messages ready and delivers none"
        return None
