"""When the next request may be sent under a rate. Pure: the time is an argument, in seconds of one monotonic clock.

At most ``requests`` in any window of ``window_seconds``, exactly, by the times of the last ``requests`` sends; and no faster than an even pace
but for the declared ``burst`` (the generic cell rate algorithm), where a send that came late may be made up for by a little.
"""

from __future__ import annotations

from collections import deque

from rowmill.durations import Rate

CATCH_UP = 0.02
"""Seconds of lateness (timers, a busy loop) that later sends may make up for; without it each late timer would cost a part of the rate."""


class Pace:
    """The sends of one rate in this process."""

    def __init__(self, rate: Rate, burst: int = 1) -> None:
        self.rate = rate
        self._interval = rate.window_seconds / rate.requests
        self._tolerance = (burst - 1) * self._interval
        self._due = float("-inf")
        self._sent: deque[float] = deque(maxlen=rate.requests)

    @property
    def per_second(self) -> float:
        return self.rate.requests / self.rate.window_seconds

    def ready_at(self) -> float:
        """The earliest time of the next send; in the past where it may be sent now."""
        even = self._due - self._tolerance
        if len(self._sent) < self.rate.requests:
            return even
        return max(even, self._sent[0] + self.rate.window_seconds)

    def take(self, now: float) -> None:
        """Note a send at ``now``."""
        behind = min(self._interval, CATCH_UP)
        self._due = max(self._due, now - behind) + self._interval
        self._sent.append(now)

    def sends_within(self, now: float, seconds: float) -> float:
        """How many sends fit from ``now`` on into so many seconds; a fraction where the next one does not."""
        start = max(now, self.ready_at())
        burst = self._tolerance / self._interval if self._due <= now else 0.0
        return burst + max(0.0, (now + seconds - start) / self._interval) + (1.0 if start <= now else 0.0)
