"""What goes with each request for leases of shards, and comes with its answer: permits that are drawn, what lanes have learned, requests that are
open elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmill_contracts.shards import LeaseShard, ShardsLeased
from rowmill_tool_gateway.open_requests import OpenElsewhere
from rowmill_tool_gateway.permits import Drawing, Permits
from rowmill_tool_gateway.standings import Standings, Telling


@dataclass(frozen=True, slots=True)
class Report:
    """A request, and what is to be remembered of it until its answer comes. ``ended``: shards in which fewer requests of ours are open than others
    were told before; they are to hear of it, whatever becomes of this one.
    """

    request: LeaseShard
    drawings: Sequence[Drawing]
    tellings: Sequence[Telling]
    ended: list[int]

    @property
    def drawn_for(self) -> set[int]:
        """Shards for which permits are drawn."""
        return {drawing.window.shard for drawing in self.drawings}


class Reports:
    """``holder``: this process."""

    def __init__(self, holder: str, permits: Permits, standings: Standings, open_elsewhere: OpenElsewhere) -> None:
        self._holder = holder
        self._permits = permits
        self._standings = standings
        self._open = open_elsewhere
        self._numbers = itertools.count(1)

    def renewal(self, terms: Mapping[int, int], drawing_for: Sequence[int], now: float, *, serving: bool) -> Report:
        """To take or renew shards. ``terms``: of each the one that we know. ``drawing_for``: those of them in which more may be sent."""
        drawings = self._permits.draws(drawing_for, now)
        return self._report(terms, drawings, self._standings.tell(terms, now), now, serving=serving)

    def last_words(self, terms: Mapping[int, int], now: float, *, serving: bool, last: bool) -> Report:
        """To give shards up, which count as held no more. ``last``: the process ends, so that nothing is open any more."""
        drawings = self._permits.last_words(list(terms), now)
        tellings = self._standings.tell(terms, now)
        for shard in terms:
            self.lost(shard)
        return self._report(terms, drawings, tellings, now, serving=serving, release=True, last=last)

    def _report(
        self,
        terms: Mapping[int, int],
        drawings: Sequence[Drawing],
        tellings: Sequence[Telling],
        now: float,
        *,
        serving: bool,
        release: bool = False,
        last: bool = False,
    ) -> Report:
        request = LeaseShard(
            holder=self._holder,
            shards=list(terms),
            release=release,
            draws=[drawing.draw for drawing in drawings],
            terms=list(terms.values()),
            serving=serving,
            open=self._open.ours(now, last=last),
            number=next(self._numbers),
            standings=[telling.word for telling in tellings],
        )
        return Report(request, drawings, tellings, self._open.said(request.open))

    def lost(self, shard: int) -> None:
        """The shard is another's, or will be."""
        self._permits.lost(shard)
        self._standings.lost(shard)

    def heard(self, report: Report, reply: ShardsLeased, terms: Mapping[int, int], now: float) -> None:
        """The answer to a renewal came. ``terms``: of the shards that are held by it."""
        known = dict(zip(report.request.shards, report.request.terms, strict=True))
        self._permits.drawn(report.drawings, reply.drawn, terms, now)
        self._standings.told(report.tellings, [shard for shard, term in terms.items() if term == known[shard]])
        self._standings.heard(reply.standings, [shard for shard, term in terms.items() if term != known[shard]], now)
