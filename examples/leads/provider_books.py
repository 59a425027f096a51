"""What the local provider of the leads example keeps count of, and how it is told to misbehave."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec


class Misbehaviour(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the next `count` requests to `path` (None: to any) meet instead of an answer."""

    path: str | None = None
    count: int = 1
    status: int = 500
    retry_after: int | float | str | None = None
    body: str | None = None
    effect: bool = False
    """Whether the effect happens, and is counted, all the same."""


class Drop(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The next `count` requests to `path` lose their connection, after the effect unless `effect` is false."""

    path: str | None = None
    count: int = 1
    effect: bool = True


class Control(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /_control`; what is left out stays as it is."""

    latency_ms: float | msgspec.UnsetType = msgspec.UNSET
    rate_limit: float | msgspec.UnsetType | None = msgspec.UNSET
    """Requests per second that each provider accepts in any window of one second; None: no limit."""
    fail_rate: float | msgspec.UnsetType = msgspec.UNSET
    drop_rate: float | msgspec.UnsetType = msgspec.UNSET
    honour_keys: bool | msgspec.UnsetType = msgspec.UNSET
    """True: a key that was seen before has no further effect. False: every arrival is an effect."""
    hold: bool | msgspec.UnsetType = msgspec.UNSET
    """True: effects happen and answers wait, until it is set to false again."""
    reply: Misbehaviour | None = None
    reply_429: Misbehaviour | None = None
    reply_500: Misbehaviour | None = None
    drop: Drop | None = None


class Ledger:
    """What was asked and what it brought about, by path, by idempotency key and by subject (provider and domain)."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.replies: Counter[int] = Counter()
        self.items: Counter[str] = Counter()
        self.arrivals: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        self.subjects: Counter[str] = Counter()
        self.dropped = 0
        self.in_flight: Counter[str] = Counter()
        self.in_flight_max: Counter[str] = Counter()
        self.peak_per_second: Counter[str] = Counter()

    def book(self, path: str, owner: str, domain: str, key: str | None, *, honour_keys: bool) -> None:
        """Count one item, and its effect unless its key was already seen."""
        self.items[path] += 1
        if key is not None:
            self.arrivals[key] += 1
            if honour_keys and self.arrivals[key] > 1:
                return
            self.effects[key] += 1
        self.subjects[f"{owner} {domain}"] += 1

    def snapshot(self, *, brief: bool) -> dict[str, Any]:
        """The answer of `GET /_stats`; `brief` leaves out the one entry that grows with the keys."""
        stats: dict[str, Any] = {
            "requests": dict(self.requests),
            "replies": {str(status): n for status, n in self.replies.items()},
            "items": dict(self.items),
            "dropped": self.dropped,
            "keys": len(self.arrivals),
            "repeated_keys": self.arrivals.total() - len(self.arrivals),
            "max_effects_per_key": max(self.effects.values(), default=0),
            "subjects": len(self.subjects),
            "repeated_subjects": self.subjects.total() - len(self.subjects),
            "repeated_by_provider": dict(self._repeated_by_provider()),
            "max_effects_per_subject": max(self.subjects.values(), default=0),
            "in_flight": self.in_flight.total(),
            "in_flight_max": dict(self.in_flight_max),
            "peak_per_second": dict(self.peak_per_second),
        }
        if not brief:
            stats["effects"] = dict(self.effects)
        return stats

    def _repeated_by_provider(self) -> Counter[str]:
        repeated: Counter[str] = Counter()
        for subject, times in self.subjects.items():
            if times > 1:
                repeated[subject.partition(" ")[0]] += times - 1
        return repeated


class RateWindow:
    """Times of the requests of one provider in the last second."""

    def __init__(self) -> None:
        self.arrived: deque[float] = deque()
        self.accepted: deque[float] = deque()

    def arrive(self, now: float) -> int:
        """Note an arrival; how many there were in the second that ends now."""
        self.arrived.append(now)
        while self.arrived[0] <= now - 1.0:
            self.arrived.popleft()
        return len(self.arrived)

    def refuse(self, now: float, limit: float) -> float | None:
        """Seconds until a request would be accepted, or None if this one is."""
        while self.accepted and self.accepted[0] <= now - 1.0:
            self.accepted.popleft()
        if len(self.accepted) >= limit:
            return self.accepted[0] + 1.0 - now if self.accepted else 1.0
        self.accepted.append(now)
        return None
