"""The table of standings: what is known of lanes' providers, for whoever holds their shards next. Every call is one commit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rowmill.runtime.db import Database
from rowmill_contracts.shards import LaneStanding, LeaseShard
from rowmill_receipt_store.store import QUERIES


class StandingStore:
    """``clock_offset``: as `Store`'s."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.clock_offset = 0.0

    @property
    def _offset(self) -> timedelta:
        return timedelta(seconds=self.clock_offset)

    async def tell(self, request: LeaseShard) -> None:
        """Keep what the asker says of lanes of shards that it holds under the term that it names, unless a newer request of it said so before."""
        terms = terms_of(request)
        told = sorted({(one.shard, one.lane): one for one in request.standings if one.shard in terms}.items())
        if not told:
            return
        words = [one for _, one in told]
        await self._database.execute(
            QUERIES["tell_standings"],
            self._offset,
            request.holder,
            request.number,
            [one.shard for one in words],
            [one.lane for one in words],
            [terms[one.shard] for one in words],
            [one.closed for one in words],
            [one.share for one in words],
            [one.missed for one in words],
            [one.away for one in words],
        )

    async def known(self, terms: Mapping[int, int]) -> list[LaneStanding]:
        """What was known of the lanes of these shards to those who had them under earlier terms."""
        rows = await self._database.fetch(QUERIES["standings"], self._offset, sorted(terms), [terms[shard] for shard in sorted(terms)])
        return [LaneStanding(row["lane"], row["shard"], row["closed"], row["share"], row["missed"], row["away"]) for row in rows]


def terms_of(request: LeaseShard) -> dict[int, int]:
    """The terms that the asker knows of; 0: none."""
    return dict(zip(request.shards, request.terms or [0] * len(request.shards), strict=True))
