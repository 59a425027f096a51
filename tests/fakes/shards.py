"""The receipt-store's shards in memory: who has which, what may have been sent under them, what is known of their lanes, and who else there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rowmill_contracts.shards import Draw, Drawn, LaneStanding, LeaseShard, OpenRequests, Sent, ShardLease, ShardsLeased

OUTPUT_LIMIT = 8 * 1024 * 1024


@dataclass
class Shard:
    holder: str = ""
    term: int = 0
    expires: float = 0.0
    ended_term: int = 0


@dataclass
class Gateway:
    number: int
    joined: float
    expires: float
    serving: bool
    open: list[OpenRequests]


@dataclass
class Window:
    term: int
    number: int
    at: float
    sent: list[Sent]
    permits: int
    seconds: float

    def may_have_sent(self, now: float, span: float) -> list[Sent]:
        sent = [Sent(one.seconds_ago + now - self.at, one.requests) for one in self.sent]
        if self.permits:
            sent.append(Sent(now - self.at - self.seconds, self.permits))
        return sorted((one for one in sent if one.seconds_ago < span), key=lambda one: -one.seconds_ago)


@dataclass
class Known:
    term: int
    number: int
    at: float
    said: LaneStanding

    def standing(self, now: float) -> LaneStanding:
        passed, away = now - self.at, self.said.away
        return msgspec.structs.replace(self.said, closed=max(0.0, self.said.closed - passed), away=None if away is None else away + passed)


class MemoryShards:
    """``now``: the store's clock, in seconds since the epoch. ``lasting``: seconds that a lease lasts."""

    def __init__(self, now: Callable[[], float], *, lasting: float) -> None:
        self.shards: dict[int, Shard] = {}
        self.windows: dict[str, Window] = {}
        self.gateways: dict[str, Gateway] = {}
        self.standings: dict[tuple[int, str], Known] = {}
        self._now = now
        self._lasting = lasting

    def answer(self, request: LeaseShard) -> ShardsLeased:
        """Last words come before the shard is given up; permits are for what is held by the same request."""
        if request.release:
            drawn = [self._draw(draw, request.holder) for draw in request.draws]
            self._tell(request)
            return self._met(request, [self._lease(shard, request) for shard in request.shards], drawn)
        leases = [self._lease(shard, request) for shard in request.shards]
        self._tell(request)
        met = self._met(request, leases, [self._draw(draw, request.holder) for draw in request.draws])
        named = self._named(request)
        new = {lease.shard: lease.term for lease in leases if lease.held and lease.term != named[lease.shard]}
        known = [known for (shard, _), known in self.standings.items() if shard in new and known.term < new[shard]]
        return msgspec.structs.replace(met, standings=[one.standing(self._now()) for one in known])

    def holds(self, shard: int, term: int) -> bool:
        found = self.shards.get(shard)
        return found is not None and found.holder != "" and found.term == term

    def _lease(self, number: int, request: LeaseShard) -> ShardLease:
        shard = self.shards.setdefault(number, Shard())
        if request.release:
            if shard.holder == request.holder and self._named(request)[number] in {0, shard.term}:
                shard.holder = ""
            return ShardLease(shard=number, held=False, term=shard.term)
        if shard.holder and shard.holder != request.holder and shard.expires > self._now():
            return ShardLease(shard=number, held=False, term=shard.term, seconds=shard.expires - self._now())
        if shard.holder != request.holder:
            if shard.holder:
                shard.ended_term = shard.term
            shard.term += 1
            shard.holder = request.holder
        shard.expires = self._now() + self._lasting
        return ShardLease(shard=number, held=True, term=shard.term, seconds=self._lasting)

    def _named(self, request: LeaseShard) -> dict[int, int]:
        return dict(zip(request.shards, request.terms or [0] * len(request.shards), strict=True))

    def _tell(self, request: LeaseShard) -> None:
        named = self._named(request)
        for one in request.standings:
            term, stored = named.get(one.shard, 0), self.standings.get((one.shard, one.lane))
            shard = self.shards.get(one.shard, Shard())
            if (shard.holder, shard.term) == (request.holder, term) and (stored is None or (stored.term, stored.number) < (term, request.number)):
                self.standings[one.shard, one.lane] = Known(term, request.number, self._now(), one)

    def _met(self, request: LeaseShard, leases: list[ShardLease], drawn: list[Drawn]) -> ShardsLeased:
        now = self._now()
        asker = self.gateways.setdefault(request.holder, Gateway(request.number, now, now, request.serving, []))
        if request.number >= asker.number:
            asker.number, asker.expires, asker.open = request.number, now + self._lasting, request.open
            asker.serving = asker.serving and request.serving
        there = {name: gateway for name, gateway in self.gateways.items() if gateway is asker or gateway.expires > now}
        sharing = sorted(name for name, gateway in there.items() if gateway.serving and gateway.joined <= now - self._lasting)
        told = [one for gateway in there.values() if gateway is not asker for one in gateway.open]
        lanes: dict[str, list[OpenRequests]] = {}
        for one in told:
            lanes.setdefault(one.lane, []).append(one)
        elsewhere = [OpenRequests(lane, sum(one.requests for one in of), max(one.closed for one in of)) for lane, of in sorted(lanes.items())]
        return ShardsLeased(shards=leases, drawn=drawn, gateways=sharing, open=elsewhere)

    def _draw(self, draw: Draw, holder: str) -> Drawn:
        shard = self.shards.get(draw.shard)
        stored = self.windows.get(draw.window)
        if shard is None or shard.holder != holder or (stored is not None and (stored.term, stored.number) >= (shard.term, draw.number)):
            return Drawn(granted=False)
        told = None
        if draw.sent is None or draw.term != shard.term:
            told = [] if stored is None else stored.may_have_sent(self._now(), draw.span)
        sent = draw.sent if told is None else told
        self.windows[draw.window] = Window(shard.term, draw.number, self._now(), list(sent or []), draw.permits, draw.seconds)
        return Drawn(granted=True, sent=told)
