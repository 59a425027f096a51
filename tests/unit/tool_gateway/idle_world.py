"""A lane, whoever has it, and the rows that wait for it in admission, step by step; it fails where the lane is idle for long while rows wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from rowmill.durations import Rate
from rowmill_admission.waits import turns_of
from rowmill_contracts.runs import ProviderServes
from rowmill_tool_gateway.idling import PATIENCE, SCOUTS, Idling
from rowmill_tool_gateway.lanes import Lane, ProbePolicy
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.settings import ToolGatewaySettings

SETTINGS = ToolGatewaySettings(time_scale=1.0)
HAND = SETTINGS.hand
STEP = HAND / 20
TRAVEL = 0.3
"""Seconds from admission to the gateway."""
BOUND = HAND + HAND / PATIENCE + TRAVEL + 3 * STEP
"""Seconds for which a lane may have nothing to send while somebody waits for it: it says so after a fifth of a hand, once in a hand at most."""
LASTS = 0.8


@dataclass(eq=False)
class Row:
    asked: float
    due: float = 0.0
    deadline: float = 0.0


@dataclass
class World:
    """One lane, who has it, and the rows that wait in admission; whatever is not modelled here (receipts, permits) is there at once."""

    rate: str | None
    concurrency: int
    now: float = 1000.0
    waiting: list[Row] = field(default_factory=list)
    coming: list[Row] = field(default_factory=list)
    in_hand: list[Row] = field(default_factory=list)
    open: list[tuple[float, float]] = field(default_factory=list)
    """When each request that is open began, and will end."""
    told: int = 0
    ours: bool = True
    away: bool = False
    """The receipt-store: the lease of what is ours is over."""
    deaf: bool = False
    """What is said of idle lanes cannot be told."""
    idle_since: float | None = None

    def __post_init__(self) -> None:
        self._taken()

    def _taken(self) -> None:
        pace = None if self.rate is None else Pace(Rate.parse(self.rate))
        probes = ProbePolicy(5, SETTINGS.probe_first, SETTINGS.probe_limit)
        self.lane = Lane("acme", "hunter", 3, concurrency=self.concurrency, pace=pace, probes=probes, recovery=SETTINGS.recovery)
        self.idling = Idling(lambda: [self.lane], self, SETTINGS, self._sooner)
        self.ours, self.idle_since = True, None

    # ---- what the lanes that idle look at ----

    def holds(self, shard: int) -> bool:
        return self.ours and not self.away

    def lapsed(self, shard: int) -> bool:
        return self.ours and self.away

    def may_send(self, lane: Lane) -> bool:
        return True

    def backlog(self, lane: Lane) -> int:
        return len(self.in_hand)

    def _sooner(self, message: ProviderServes) -> bool:
        if self.deaf:
            return False
        self.told += 1
        turns = turns_of(message)
        assert turns.sooner
        for turn, row in enumerate(sorted(self.waiting, key=lambda row: row.asked)[: turns.rows]):
            later = turn - turns.at_once
            row.due = min(row.due, self.now + (0 if later < 0 else (later // turns.together + 1) * turns.together / turns.per_second))
        return True

    # ---- what happens ----

    def come(self, rows: int) -> None:
        for _ in range(rows):
            self._take(Row(asked=self.now))

    def _take(self, row: Row) -> None:
        self.idle_since = None
        self.lane.called(self.now, self.now - row.asked, 1.0, HAND, SETTINGS.away_wait)
        if self.lane.expected_wait(self.now, len(self.in_hand)) > HAND:
            self._defer(row)
        else:
            row.deadline = self.now + HAND
            self.in_hand.append(row)

    def _defer(self, row: Row) -> None:
        earliest = max(SETTINGS.retry_first, self.lane.expected_wait(self.now, len(self.in_hand)) - SETTINGS.lead)
        row.due = self.now + self.lane.appoint(self.now, earliest, 1.0)
        self.waiting.append(row)

    def stand_still(self, seconds: float) -> None:
        """The machine does; requests that are open seem to last."""
        self.now += seconds
        if self.idle_since is not None:
            self.idle_since += seconds

    def copies(self, calls: int) -> None:
        """Calls are sent away whose rows have an appointment, or come to another executor's."""
        for _ in range(calls):
            self.lane.appoint(self.now, SETTINGS.retry_first, 1.0)

    def stop(self, rows: int) -> None:
        """Of a run whose rows wait."""
        del self.waiting[:rows]

    def refuse(self, seconds: float) -> None:
        self.lane.overrun(self.now, seconds)

    def kill(self) -> None:
        """Another gateway has the lane; what was in hand comes to it."""
        self.open.clear()
        self.coming += self.in_hand
        self.in_hand.clear()
        self.now += 12.0
        for row in self.coming:
            row.due = self.now
        self._taken()

    def hand_over(self) -> None:
        self.run(1.0)  # what is in hand is sent
        self.ours = False
        self.idling.look(self.now)
        self.kill()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self._step()

    def _step(self) -> None:
        self.now += STEP
        for began, _ in [one for one in self.open if one[1] <= self.now]:
            self.lane.finished(self.now - began)
            self.lane.served(self.now)
        self.open = [one for one in self.open if one[1] > self.now]
        self.coming += [row for row in self.waiting if row.due <= self.now]
        self.waiting = [row for row in self.waiting if row.due > self.now]
        for row in [row for row in self.coming if row.due + TRAVEL <= self.now]:
            self.coming.remove(row)
            self._take(row)
        for row in [row for row in self.in_hand if row.deadline <= self.now]:
            self.in_hand.remove(row)
            self._defer(row)
        while self.in_hand and self.lane.could_send(self.now):
            self.in_hand.pop(0)
            self.lane.opened(self.now)
            if self.lane.pace is not None:
                self.lane.pace.wrote(self.now)
            self.open.append((self.now, self.now + LASTS))
        self.idling.look(self.now)
        self._never_idle_for_long()

    def _never_idle_for_long(self) -> None:
        known = self.lane.came > 0
        if not known or self.in_hand or not self.waiting or not self.lane.could_send(self.now):
            self.idle_since = None
            return
        if self.idle_since is None:
            self.idle_since = self.now
        bound = BOUND if self.lane.unavailable_since is None else SCOUTS * SETTINGS.probe_limit + BOUND
        assert self.now - self.idle_since <= bound, f"{len(self.waiting)} rows wait, the next for {min(row.due for row in self.waiting) - self.now} s"
