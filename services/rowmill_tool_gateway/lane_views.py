"""Lanes as an operator sees them: what is closed until when, what is open, what waits. Pure: made from what dispatch and hand hold at this moment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Protocol

from rowmill.runtime.clock import Clock
from rowmill_contracts.events import AskLanes, LanesShown, LaneView
from rowmill_tool_gateway.flights import Flight, Stage
from rowmill_tool_gateway.lanes import Lane

MOST_OF_A_CODE: Final = 100
"""Characters of a failure's code that are shown: a tool function may have made it."""


class Rights(Protocol):
    """Which shards are held."""

    def holds(self, shard: int) -> bool: ...


class Latch(Protocol):
    """Whether outcomes can be stored."""

    @property
    def storing(self) -> bool: ...


def lanes_shown(
    question: AskLanes, gateway: str, lanes: Iterable[Lane], flights: Iterable[Flight], rights: Rights, latch: Latch, clock: Clock
) -> LanesShown:
    """The answer to an operator's question, by organisation and provider."""
    waiting: dict[tuple[str, str], list[Flight]] = {}
    for flight in flights:
        if flight.stage not in {Stage.SENT, Stage.STORING, Stage.OVER}:
            waiting.setdefault((flight.lane.org, flight.lane.provider), []).append(flight)
    wanted = [lane for lane in lanes if question.org in {None, lane.org} and question.provider in {None, lane.provider}]
    views = [
        _view(lane, waiting.get((lane.org, lane.provider), []), clock.monotonic(), held=rights.holds(lane.shard))
        for lane in sorted(wanted, key=lambda lane: (lane.org, lane.provider))
    ]
    return LanesShown(gateway=gateway, lanes=views, storing=latch.storing)


def _view(lane: Lane, waiting: list[Flight], now: float, *, held: bool) -> LaneView:
    return LaneView(
        org=lane.org,
        provider=lane.provider,
        shard=lane.shard,
        held=held,
        concurrency=lane.concurrency,
        in_flight=lane.in_flight,
        waiting=sum(len(flight.calls) for flight in waiting),
        oldest_asked=min((flight.asked for flight in waiting), default=None),
        closed_seconds=lane.closed_until - now if lane.closed_until > now else None,
        unavailable_seconds=lane.unavailable_for(now),
        probing=lane.probing,
        rate=None if lane.pace is None else lane.pace.rate.text,
        why=lane.why[:MOST_OF_A_CODE],
        permits=None if lane.pace is None else max(0, math.floor(lane.pace.sends_within(now, 1.0))),
    )
