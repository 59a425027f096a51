"""Lanes that have nothing to send though calls wait for them elsewhere: those are to come sooner than they were told to.

Appointments are given by what can be foreseen, and it comes otherwise. Runs are stopped and executors die, so that calls never come; they come twice,
and each time one is counted; a machine stands still for a moment, and its requests seem to last; another gateway made the appointments. What then
stands far in the future would wait while its lane is idle, so whoever has an idle lane says so, for as long as somebody may wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from rowmill_contracts.runs import ProviderServes
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.settling import BEFOREHAND, CORRECTED, STEPS

PATIENCE: Final = 5
"""The part of the time that a call waits in hand for which a lane has nothing to send before it says so."""
EACH_LOOK: Final = 10
"""Lanes of which it is said at one look at most; the others have their turn at the next ones. Admission looks for rows once for each."""
SCOUTS: Final = 2
"""For how many of the longest pauses between probes none has come of the calls that find out whether a provider serves, before another is called."""


class Right(Protocol):
    """Whose lanes are which, and what is in hand of them."""

    def holds(self, shard: int) -> bool: ...

    def lapsed(self, shard: int) -> bool: ...

    def may_send(self, lane: Lane) -> bool: ...

    def backlog(self, lane: Lane) -> int: ...


@dataclass(slots=True)
class _Idle:
    """``since`` when the lane has nothing to send; None: it has. ``told``: when it last said so, and ``came``: how many calls had come by then.
    ``pause``: seconds until it says so again, if none comes.
    """

    pause: float
    since: float | None = None
    told: float = -math.inf
    came: int = 0


class Idling:
    """``sooner``: told how rows are to come that wait for a lane; False: it cannot be told now. ``lanes``: every lane that had a call."""

    def __init__(
        self, lanes: Callable[[], Iterable[Lane]], right: Right, settings: ToolGatewaySettings, sooner: Callable[[ProviderServes], bool]
    ) -> None:
        self._lanes = lanes
        self._right = right
        self._settings = settings
        self._sooner = sooner
        self._idle: dict[Lane, _Idle] = {}

    def look(self, now: float) -> None:
        """Say so where it is time to: of a few lanes, those first for which somebody is known to wait, and of which it was not said for longest.
        To be called several times while a call waits in hand. ``now``: by the monotonic clock.
        """
        told = 0
        for _, lane, idle in sorted(self._due(now), key=lambda due: due[0]):
            told += self._tell(lane, idle, now)
            if told == EACH_LOOK:
                return

    def _due(self, now: float) -> Iterator[tuple[tuple[bool, float, float], Lane, _Idle]]:
        """Lanes of which it is time to say so, each with its place among them."""
        for lane in self._lanes():
            idle, waited_for = self._idle.get(lane), lane.waited_for_until > now
            if not waited_for or not self._right.holds(lane.shard):
                if waited_for and self._right.lapsed(lane.shard):
                    continue  # likely it is ours again in a moment, and nothing was forgotten
                if idle is not None:
                    del self._idle[lane]
                    self._left(lane, now)
                continue
            if idle is None:
                idle = self._idle[lane] = _Idle(self._settings.hand)
            if self._is_time(lane, idle, now):
                yield (not lane.is_waited_for(now), idle.told, now if idle.since is None else idle.since), lane, idle

    def _left(self, lane: Lane, now: float) -> None:
        """Whoever has the lane next is to hear that somebody waits for it: from one who does."""
        if lane.waited_for_until > now + self._settings.hand:
            self._sooner(self._message(lane, at_once=1, per_second=1 / self._settings.hand))
        lane.left()

    def _is_time(self, lane: Lane, idle: _Idle, now: float) -> bool:
        backlog = self._right.backlog(lane)
        if not self._right.may_send(lane) or not lane.could_send(now):
            idle.since = None
            return False
        if backlog:
            idle.since = None
            lately = self._settings.hand <= now - idle.told < 2 * self._settings.hand
            return lately and lane.unavailable_for(now) is None and backlog < self._ahead(lane) * CORRECTED
        if idle.since is None:
            idle.since = now
        patience = self._settings.hand / PATIENCE if lane.unavailable_for(now) is None else SCOUTS * self._settings.probe_limit
        pause = idle.pause if lane.came == idle.came else self._settings.hand
        return now - idle.since >= patience and now - idle.told >= pause

    def _ahead(self, lane: Lane) -> float:
        """Calls that are to be in hand ahead of their turn."""
        return lane.requests_per_second() / lane.weight * self._settings.lead

    def _tell(self, lane: Lane, idle: _Idle, now: float) -> bool:
        """Less and less often while nobody comes: perhaps nobody waits any more. False where it cannot be told now."""
        if lane.unavailable_for(now) is None:
            at_once, soon = (lane.claim_room(now, seconds) / lane.weight - self._right.backlog(lane) for seconds in (0.0, self._settings.lead))
            at_once = max(1, int(at_once), round(soon * CORRECTED))
            message = self._message(lane, at_once=at_once, per_second=lane.requests_per_second() / lane.weight)
        else:  # one finds out whether the provider serves
            message = self._message(lane, at_once=1, per_second=1 / self._settings.hand)
        if not self._sooner(message):
            idle.since = now  # be patient anew
            return False
        lane.called_sooner(now, message.seconds)
        idle.pause = self._settings.hand if lane.came != idle.came else min(2 * idle.pause, self._settings.away_wait)
        idle.told, idle.came = now, lane.came
        return True

    def _message(self, lane: Lane, *, at_once: int, per_second: float) -> ProviderServes:
        return ProviderServes(
            org=lane.org,
            provider=lane.provider,
            per_second=per_second,
            at_once=at_once,
            every=self._settings.lead / STEPS,
            seconds=BEFOREHAND * self._settings.hand,
            sooner=True,
        )
