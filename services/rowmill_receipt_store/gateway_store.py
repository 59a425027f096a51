"""The table of gateways: who is there, and what they have open beside the lanes that are theirs. Every call is one commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta

import msgspec

from rowmill.runtime.db import Database
from rowmill_contracts.shards import LeaseShard, OpenRequests
from rowmill_receipt_store.store import QUERIES

_open = msgspec.json.Decoder(list[OpenRequests])


class Met(msgspec.Struct, frozen=True):
    """What a gateway is told of those that are there. ``sharing``: among whom the shards are shared, by name. ``open``: what the others have open in
    lanes of shards that they do not hold.
    """

    sharing: Sequence[str]
    open: Sequence[OpenRequests]


class GatewayStore:
    """``life``: seconds for which a gateway counts as there after it said so, and for which it must have been there before it has a share: one that
    dies again and again as soon as it is started is given nothing. ``clock_offset``: as `Store`'s.
    """

    def __init__(self, database: Database, *, life: float) -> None:
        self._database = database
        self._life = timedelta(seconds=life)
        self.clock_offset = 0.0

    async def meet(self, request: LeaseShard) -> Met:
        """Note that the asker is there and what it says of itself; answer who is."""
        rows = await self._database.fetch(
            QUERIES["meet_gateways"],
            timedelta(seconds=self.clock_offset),
            self._life,
            request.holder,
            request.number,
            request.serving,
            msgspec.json.encode(request.open),
        )
        others = [one for row in rows if row["holder"] != request.holder for one in _open.decode(row["open"])]
        return Met([row["holder"] for row in rows if row["shares"]], together(others))


def together(told: Iterable[OpenRequests]) -> list[OpenRequests]:
    """What several gateways have open in each lane, and for how long the lane is closed by any of them."""
    requests: Counter[str] = Counter()
    closed: dict[str, float] = {}
    for one in told:
        requests[one.lane] += one.requests
        closed[one.lane] = max(one.closed, closed.get(one.lane, 0.0))
    return [OpenRequests(lane, requests[lane], closed[lane]) for lane in sorted(closed)]
