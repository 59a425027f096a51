"""When the next request may be sent under a rate. Pure: the time is an argument, in seconds of one monotonic clock.

At most ``requests`` in any window of ``window_seconds``, exactly, by the times at which the last ``requests`` were written; one that is on its way
to be written holds its place meanwhile. And no faster than an even pace but for the declared ``burst`` (the generic cell rate algorithm), where a
send that came late may be made up for by a little.

A rate that several gateways share is sent under permits besides: drawn from the receipt-store, which keeps what may have been sent for whoever comes
next, and good for a short while only. Without permits nothing is sent.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowmill.durations import Rate
from rowmill_contracts.shards import Sent

CATCH_UP = 0.05
"""Seconds of lateness (timers, a busy loop) that later sends make up for; without it each late timer would cost a part of the rate. Who is later than
that was idle, and has nothing to make up for.
"""
SLACK = 0.02
"""Seconds by which the even pace takes longer than the window for all its requests (a hundredth of the window at most). A send that a timer or a busy
loop makes late moves the one a whole window after it; at exactly the rate nothing would ever bring them back, and each window would begin later.
"""
REPORTED = 50
"""Entries of a report at most. More sends than that are reported by groups, each as late as its last one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What was asked for at ``at``: ``permits`` to be sent within ``seconds``, of which ``pending`` were on their way; ``begun`` before it in all."""

    at: float
    seconds: float
    permits: int
    pending: int
    begun: int
    sent: Sequence[Sent] | None


class Pace:
    """The sends of one rate in this process. ``shared``: with other gateways, so that permits are needed."""

    def __init__(self, rate: Rate, burst: int = 1, *, shared: bool = False) -> None:
        self.rate = rate
        self.known = not shared
        """Whether what others may have sent in the present window was told."""
        self.share = 1.0
        """How much of the rate is used, where the provider bears no more."""
        self._interval = (rate.window_seconds + min(SLACK, rate.window_seconds / 100)) / rate.requests
        self._burst = burst
        self._tolerance = (burst - 1) * self._interval
        self._due = float("-inf")
        self._sent: deque[float] = deque(maxlen=rate.requests)
        self._pending = 0
        self._begun = 0
        self._permits: float = 0 if shared else math.inf
        self._until = float("-inf") if shared else math.inf

    @property
    def per_second(self) -> float:
        return self.share * self.rate.requests / self.rate.window_seconds

    # ---- sending ----------------------------------------------------------------------------------------------------------------------

    def due_at(self) -> float:
        """The earliest time of the next send, permits aside; in the past where it is due. Never known while a whole window is on its way."""
        even = self._due - self._tolerance
        over = len(self._sent) + self._pending - self.rate.requests
        if over < 0:
            return even
        if over >= len(self._sent):
            return math.inf
        return max(even, self._sent[over] + self.rate.window_seconds)

    def permitted(self, now: float) -> bool:
        """Whether a permit is left that is still good."""
        return self._permits > 0 and now < self._until

    def may_write(self, now: float) -> bool:
        """Whether what has begun may still be written: the permits that it counts among are good."""
        return now < self._until

    def begin(self, now: float) -> None:
        """A request takes its place at ``now`` and is on its way to be written."""
        self._due = (self._due if now - self._due <= CATCH_UP else now) + self._interval / self.share
        self._pending += 1
        self._begun += 1
        self._permits -= 1

    def wrote(self, now: float) -> None:
        """A request that had begun is written."""
        self._pending -= 1
        self._sent.append(now)

    def dropped(self) -> None:
        """A request that had begun is not written after all."""
        self._pending -= 1

    def wait_behind(self, start: float, sends: float) -> float:
        """Seconds from ``start`` on until the send that so many others go before, permits aside."""
        even = max(self._due, start) + sends / self.per_second - self._tolerance
        over = len(self._sent) + self._pending + math.floor(sends) - self.rate.requests
        if over < 0:
            free = start
        elif over < len(self._sent):
            free = self._sent[over] + self.rate.window_seconds
        else:  # when others are written that go before
            free = start + (1 + (over - len(self._sent)) // self.rate.requests) * self.rate.window_seconds
        return max(0.0, even - start, free - start)

    def sends_within(self, now: float, seconds: float) -> float:
        """How many sends fit from ``now`` on into so many seconds, permits aside; a fraction where the next one does not."""
        start = max(now, self.due_at())
        burst = self._tolerance / self._interval if self._due <= now else 0.0
        return burst + max(0.0, self.share * (now + seconds - start) / self._interval) + (1.0 if start <= now else 0.0)

    # ---- permits ----------------------------------------------------------------------------------------------------------------------

    def ask(self, now: float, seconds: float, in_hand: int) -> Ask:
        """What to ask for so that nothing but the rate holds the requests back that are ``in_hand``, and as many more as come at an even pace, for
        ``seconds``; and what was sent up to now. What is drawn counts as sent if we die: so of a burst no more than is there to be sent, and nothing
        of it before it is known what others sent.
        """
        even = math.ceil((seconds + CATCH_UP) / self._interval)
        permits = max(1, min(even + in_hand if self.known else even, self._most(now, seconds)))
        return Ask(now, seconds, permits + self._pending, self._pending, self._begun, self._report(now) if self.known else None)

    def _most(self, now: float, seconds: float) -> int:
        """Requests that the rate lets begin within so many seconds."""
        windows = math.ceil(seconds / self.rate.window_seconds)
        first = now + seconds - windows * self.rate.window_seconds
        begun = sum(at > first for at in self._sent) + self._pending if self.known else self._pending
        at_its_pace = (seconds + self._tolerance - max(self._due - now, -CATCH_UP)) / self._interval
        return min(windows * self.rate.requests - begun, math.floor(at_its_pace) + 1)

    def last_words(self, now: float) -> Ask:
        """A report by who sends no more."""
        return Ask(now, 0.0, 0, 0, self._begun, self._report(now) if self.known else None)

    def _report(self, now: float) -> list[Sent]:
        times = [at for at in self._sent if now - at < self.rate.window_seconds]
        size = -(-len(times) // REPORTED) or 1
        return [Sent(now - times[min(start + size, len(times)) - 1], min(size, len(times) - start)) for start in range(0, len(times), size)]

    def granted(self, ask: Ask, now: float, told: Iterable[Sent] | None) -> None:
        """The permits that were asked for are ours. ``told``: what others may have sent, by the time of an answer that came at ``now``."""
        if told is not None:
            self._sent.clear()
            for one in told:
                self._sent.extend(itertools.repeat(now - one.seconds_ago, min(one.requests, self.rate.requests)))
            self.known = True
        self._permits = ask.permits - ask.pending - (self._begun - ask.begun)
        self._until = ask.at + ask.seconds

    def forget(self) -> None:
        """Another gateway may send from now on: our permits are over, and what is sent meanwhile is not known to us."""
        self._permits = 0
        self._until = float("-inf")
        self.known = False
