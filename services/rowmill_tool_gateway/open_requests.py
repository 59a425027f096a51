"""Requests that gateways have open in lanes of shards that they do not have: of these they tell each other, and count them (SPEC 4.3).

And where an answer to such a request closes the lane, they tell who has it now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rowmill_contracts.shards import OpenRequests
from rowmill_tool_gateway.lanes import Lane


class OpenElsewhere:
    """``lanes``: every lane that had a call. ``holds``: whether a shard is ours to spend in."""

    def __init__(self, lanes: Callable[[], Iterable[Lane]], holds: Callable[[int], bool]) -> None:
        self._lanes = lanes
        self._holds = holds
        self._theirs: dict[str, int] = {}
        self._closed_by_them: dict[str, float] = {}
        self._said: dict[str, int] = {}
        self._closed: dict[str, float] = {}
        """Until when our answers closed lanes that others have."""

    def opened_up(self, lane: Lane, now: float) -> None:
        """The lane has its first call here."""
        lane.elsewhere = self.of(lane)
        self._close(lane, now)

    def closed(self, lane: Lane) -> None:
        """An answer closed a lane that is not ours; that is told with the end of its request."""
        self._closed[lane.name] = lane.closed_until

    def of(self, lane: Lane) -> int:
        """Requests of the lane that other gateways have open which do not have its shard (any more)."""
        return self._theirs.get(lane.name, 0)

    @property
    def waited_for(self) -> bool:
        """Whether it matters here: another's requests take places in a lane of ours, or ours in another's."""
        return any(lane.elsewhere and self._holds(lane.shard) for lane in self._lanes()) or bool(self._ours())

    @property
    def told(self) -> bool:
        """Whether others count requests of ours, as far as we said."""
        return bool(self._said)

    @property
    def news(self) -> bool:
        """Whether some of our requests that others count have ended since they were told."""
        return bool(self._said) and {lane.name: lane.in_flight for lane in self._ours()} != self._said

    def ours(self, now: float, *, last: bool = False) -> list[OpenRequests]:
        """What to tell the others. ``last``: nothing is open any more."""
        self._closed = {name: until for name, until in self._closed.items() if until > now}
        told = [
            OpenRequests(lane.name, 0 if last else lane.in_flight, max(0.0, self._closed.get(lane.name, now) - now))
            for lane in self._lanes()
            if not self._holds(lane.shard)
        ]
        return [one for one in told if one.requests or one.closed]

    def said(self, told: Sequence[OpenRequests]) -> list[int]:
        """The others can know this of us now. The shards of lanes in which there are fewer than before: whoever has them waits for that."""
        before, self._said = self._said, {one.lane: one.requests for one in told if one.requests}
        fewer = {name for name, requests in before.items() if self._said.get(name, 0) < requests}
        return sorted({lane.shard for lane in self._lanes() if lane.name in fewer})

    def heard(self, told: Sequence[OpenRequests], now: float) -> set[int]:
        """Count what others say, and close what they say is closed; the shards of lanes in which the number changed."""
        self._theirs = {one.lane: one.requests for one in told}
        self._closed_by_them = {one.lane: now + one.closed for one in told if one.closed}
        changed: set[int] = set()
        for lane in self._lanes():
            self._close(lane, now)
            elsewhere = self.of(lane)
            if lane.elsewhere != elsewhere:
                lane.elsewhere = elsewhere
                changed.add(lane.shard)
        return changed

    def _close(self, lane: Lane, now: float) -> None:
        until = self._closed_by_them.get(lane.name, now)
        if until > max(now, lane.closed_until):
            lane.close(now, until - now)

    def _ours(self) -> list[Lane]:
        return [lane for lane in self._lanes() if lane.in_flight and not self._holds(lane.shard)]
