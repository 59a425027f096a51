"""Shard leases, the permits of their lanes, what is known of these and who shares them, as gateways ask for all that in one request."""

from __future__ import annotations

from collections.abc import Mapping

from rowmill_contracts.shards import Drawn, LaneStanding, LeaseShard, ShardsLeased
from rowmill_receipt_store.gateway_store import GatewayStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.standing_store import StandingStore, terms_of
from rowmill_receipt_store.window_store import WindowStore
from rowmill_receipt_store.windows import report


class Leasing:
    def __init__(self, receipts: Receipts, windows: WindowStore, gateways: GatewayStore, standings: StandingStore) -> None:
        self._receipts = receipts
        self._standings = standings
        self._windows = windows
        self._gateways = gateways

    async def lease(self, request: LeaseShard) -> ShardsLeased:
        """Take, renew or give up shards, and draw permits for their lanes: before they are given up, or after they are held.

        What the asker still has open in shards that it gives up, and what it knows of their lanes, is known before another can take them, and told
        to who has taken them.
        """
        standings: list[LaneStanding] = []
        if request.release:
            met = await self._gateways.meet(request)
            drawn = await self._draw(request, {draw.shard: draw.term for draw in request.draws})
            await self._standings.tell(request)
            leases = (await self._receipts.lease_shards(request)).shards
        else:
            leases = (await self._receipts.lease_shards(request)).shards
            met = await self._gateways.meet(request)
            held = {lease.shard: lease.term for lease in leases if lease.held}
            drawn = await self._draw(request, held)
            await self._standings.tell(request)
            named = terms_of(request)
            if new := {shard: term for shard, term in held.items() if named[shard] != term}:
                standings = await self._standings.known(new)
        return ShardsLeased(shards=leases, drawn=drawn, gateways=list(met.sharing), open=list(met.open), standings=standings)

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
