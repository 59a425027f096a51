"""What lanes have learned of their providers: told to the receipt-store where it changed, heard from it when a shard becomes ours.

Only durations travel. Each is taken from its beginning to where it arrives, so that what it closes is closed for longer by its way, never shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rowmill_contracts.shards import LaneStanding
from rowmill_tool_gateway.lanes import Lane, Standing

MOST = 5000
"""Lanes that are told of in one request; others are with the next."""


@dataclass(frozen=True, slots=True)
class Telling:
    """What is being told of one lane."""

    shard: int
    word: LaneStanding
    standing: Standing


class Standings:
    """``lanes``: every lane that had a call."""

    def __init__(self, lanes: Callable[[], Iterable[Lane]]) -> None:
        self._lanes = lanes
        self._known: dict[int, dict[str, Standing]] = {}
        """By shard that is ours and lane: what the receipt-store knows. Of other lanes it knows nothing, as of a new one."""

    def opened_up(self, lane: Lane) -> None:
        """The lane has its first call here."""
        known = self._known.get(lane.shard, {}).get(lane.name)
        if known is not None:
            lane.learn(known)

    def urgent(self, lane: Lane, now: float, seconds: float) -> bool:
        """Whether the lane is closed for more than so many seconds, and for as much longer than the receipt-store knows."""
        return lane.shard in self._known and lane.closed_until - max(now, self._of(lane).closed_until) > seconds

    def tell(self, shards: Collection[int], now: float) -> list[Telling]:
        """What the receipt-store does not know of the lanes of these shards, as far as they are ours."""
        ours = self._known.keys() & set(shards)
        news = [(lane, lane.standing) for lane in self._lanes() if lane.shard in ours and not lane.standing.says(self._of(lane), now)]
        return [Telling(lane.shard, _word(lane, standing, now), standing) for lane, standing in news[:MOST]]

    def told(self, tellings: Sequence[Telling], shards: Collection[int]) -> None:
        """What was told of lanes of these shards is known."""
        for telling in tellings:
            if telling.shard in shards:
                self._known[telling.shard][telling.word.lane] = telling.standing

    def heard(self, words: Sequence[LaneStanding], shards: Collection[int], now: float) -> None:
        """These shards are newly ours, and this is all that is known of their lanes."""
        for shard in shards:
            self._known[shard] = {}
        for word in words:
            if word.shard in shards:
                away_since = None if word.away is None else now - word.away
                self._known[word.shard][word.lane] = Standing(now + word.closed, word.share, word.missed, away_since)
        for lane in self._lanes():
            if lane.shard in shards:
                self.opened_up(lane)

    def lost(self, shard: int) -> None:
        """The shard is another's, or will be."""
        self._known.pop(shard, None)

    def _of(self, lane: Lane) -> Standing:
        return self._known.get(lane.shard, {}).get(lane.name, Standing())


def _word(lane: Lane, standing: Standing, now: float) -> LaneStanding:
    away = None if standing.away_since is None else now - standing.away_since
    return LaneStanding(lane.name, lane.shard, max(0.0, standing.closed_until - now), standing.share, standing.missed, away)
