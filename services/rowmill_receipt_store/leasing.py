"""Shard leases and the permits of their lanes, as gateways ask for them in one request."""

from __future__ import annotations

from collections.abc import Mapping

from rowmill_contracts.shards import Drawn, LeaseShard, ShardsLeased
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.window_store import WindowStore
from rowmill_receipt_store.windows import report


class Leasing:
    def __init__(self, receipts: Receipts, windows: WindowStore) -> None:
        self._receipts = receipts
        self._windows = windows

    async def lease(self, request: LeaseShard) -> ShardsLeased:
        """Take, renew or give up shards, and draw permits for their lanes: before they are given up, or after they are held."""
        if request.release:
            drawn = await self._draw(request, {draw.shard: draw.term for draw in request.draws})
            return ShardsLeased(shards=(await self._receipts.lease_shards(request)).shards, drawn=drawn)
        leases = (await self._receipts.lease_shards(request)).shards
        return ShardsLeased(shards=leases, drawn=await self._draw(request, {lease.shard: lease.term for lease in leases if lease.held}))

    async def _draw(self, request: LeaseShard, terms: Mapping[int, int]) -> list[Drawn]:
        """``terms``: of the shards that the asker holds as far as we or it knows; the statement that stores knows for certain."""
        if not request.draws:
            return []
        windows = await self._windows.load([draw.window for draw in request.draws])
        reports = {
            draw.window: made
            for draw in request.draws
            if draw.shard in terms and (made := report(draw, term=terms[draw.shard], window=windows.get(draw.window))) is not None
        }
        stored = await self._windows.save(request.holder, list(reports.values())) if reports else set()
        return [
            Drawn(granted=True, sent=None if (told := reports[draw.window].told) is None else list(told))
            if draw.window in stored
            else Drawn(granted=False)
            for draw in request.draws
        ]
