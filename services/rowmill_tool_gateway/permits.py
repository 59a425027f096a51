"""Permits: what is drawn from the receipt-store for the rates of lanes at work, with each renewal of their shards' leases.

Permits are good for a short while from before they were asked for, far less than a lease lasts. So who takes a shard over from a gateway that died
or froze begins when the last permit of that one is long over, and is told what it may have sent in the present window.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rowmill_contracts.shards import Draw, Drawn
from rowmill_tool_gateway.pacing import Ask, Pace


@dataclass(slots=True, eq=False)
class Window:
    """One rate. ``name``: the same in every gateway. ``in_hand``: requests that it holds back. ``term``: under which ``pace`` knows."""

    name: str
    shard: int
    pace: Pace
    in_hand: Callable[[], int]
    term: int = 0


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is being asked for one window."""

    window: Window
    ask: Ask
    draw: Draw


class Permits:
    """``life``: seconds for which permits are good."""

    def __init__(self, life: float) -> None:
        self._life = life
        self._windows: dict[int, list[Window]] = {}
        self._numbers = itertools.count(1)

    def add(self, window: Window) -> None:
        self._windows.setdefault(window.shard, []).append(window)

    def draws(self, shards: Sequence[int], now: float) -> list[Drawing]:
        """What to ask for: the permits of all windows of these shards that hold calls back."""
        found = ((window, window.in_hand()) for shard in shards for window in self._windows.get(shard, ()))
        return [self._drawing(window, window.pace.ask(now, self._life, in_hand)) for window, in_hand in found if in_hand]

    def last_words(self, shards: Sequence[int], now: float) -> list[Drawing]:
        """What whoever takes these shards over must know."""
        found = [window for shard in shards for window in self._windows.get(shard, ()) if window.pace.known]
        return [self._drawing(window, window.pace.last_words(now)) for window in found]

    def _drawing(self, window: Window, ask: Ask) -> Drawing:
        draw = Draw(
            window=window.name,
            shard=window.shard,
            number=next(self._numbers),
            permits=ask.permits,
            seconds=ask.seconds,
            span=window.pace.rate.window_seconds,
            term=window.term,
            sent=None if ask.sent is None else list(ask.sent),
        )
        return Drawing(window, ask, draw)

    def drawn(self, drawings: Sequence[Drawing], answers: Sequence[Drawn], terms: Mapping[int, int], now: float) -> None:
        """The answers, at ``now``. ``terms``: of the shards that are held by the same answer."""
        for drawing, answer in zip(drawings, answers, strict=False):
            window = drawing.window
            term = terms.get(window.shard)
            if term is None or not answer.granted or (answer.sent is None and term != window.term):
                continue
            window.term = term
            window.pace.granted(drawing.ask, now, answer.sent)

    def lost(self, shard: int) -> None:
        """The shard is another's, or will be."""
        for window in self._windows.get(shard, ()):
            window.pace.forget()
