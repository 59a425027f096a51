"""Requests that gateways have open in lanes of shards that they do not have: of these they are told to each other, and counted (SPEC 4.3)."""

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
        self._said: dict[str, int] = {}

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

    def ours(self) -> list[OpenRequests]:
        """What to tell the others."""
        return [OpenRequests(lane.name, lane.in_flight) for lane in self._ours()]

    def said(self, told: Sequence[OpenRequests]) -> list[int]:
        """The others can know this of us now. The shards of lanes in which there are fewer than before: whoever has them waits for that."""
        before, self._said = self._said, {one.lane: one.requests for one in told}
        fewer = {name for name, requests in before.items() if self._said.get(name, 0) < requests}
        return sorted({lane.shard for lane in self._lanes() if lane.name in fewer})

    def heard(self, told: Sequence[OpenRequests]) -> set[int]:
        """Count what others say; the shards of lanes in which that changed."""
        self._theirs = {one.lane: one.requests for one in told}
        changed: set[int] = set()
        for lane in self._lanes():
            elsewhere = self.of(lane)
            if lane.elsewhere != elsewhere:
                lane.elsewhere = elsewhere
                changed.add(lane.shard)
        return changed

    def _ours(self) -> list[Lane]:
        return [lane for lane in self._lanes() if lane.in_flight and not self._holds(lane.shard)]
