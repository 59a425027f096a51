"""When something that a process needs was away: its database, the broker's taking messages, answers of a neighbour.

Messages stay in hand for as long as that lasts (DESIGN.md, "When something dies"), so that time does not count against them. Who notices it tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from rowmill.runtime.clock import Clock

RECOVERY_SECONDS: Final = 10.0
"""How long what was kept waiting may take to notice that it is over: pauses between tries are 5 s at most. Not scaled, as those are not."""

REMEMBERED: Final = 50
"""Outages that are over and remembered; those less than `RECOVERY_SECONDS` apart are one."""


class Outages:
    """Of one process. Times are seconds of the clock's monotonic time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._unless_repeated: dict[str, float] = {}
        self._over: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def noting(self, what: str) -> Callable[[bool], None]:
        """For who looks whether ``what`` is there: call it with whether that is away, whenever that is known or has changed."""

        def note(away: bool) -> None:
            if away:
                self._since.setdefault(what, self._clock.monotonic())
            else:
                self.back(what)

        return note

    def silent(self, what: str, seconds: float) -> None:
        """It was waited for in vain for so long. It counts as away until it is heard, or, if nobody asks again, for a while."""
        now = self._clock.monotonic()
        self._expire(now)
        self._since.setdefault(what, now - seconds)
        self._unless_repeated[what] = now + 2 * seconds + RECOVERY_SECONDS

    def back(self, what: str) -> None:
        """It is there."""
        if what in self._since:
            self._end(what, self._clock.monotonic())

    def away(self) -> dict[str, float]:
        """What is away now, and for how long."""
        now = self._clock.monotonic()
        self._expire(now)
        return {what: now - since for what, since in self._since.items()}

    def within(self, since: float) -> float:
        """How much of the time from then until now something was away, or only just back."""
        now = self._clock.monotonic()
        self._expire(now)
        seconds, counted_to = 0.0, since
        for begin, end in sorted([*self._over, *((begin, now) for begin in self._since.values())]):
            begins, ends = max(begin, counted_to), min(end, now)
            if ends > begins:
                seconds += ends - begins
                counted_to = ends
        return seconds

    def _expire(self, now: float) -> None:
        for what in [what for what, until in self._unless_repeated.items() if until <= now]:
            self._end(what, self._unless_repeated[what] - RECOVERY_SECONDS)

    def _end(self, what: str, now: float) -> None:
        begin, end = self._since.pop(what), now + RECOVERY_SECONDS
        self._unless_repeated.pop(what, None)
        if self._over and begin <= self._over[-1][1]:
            former_begin, former_end = self._over.pop()
            begin, end = min(begin, former_begin), max(end, former_end)
        self._over.append((begin, end))
