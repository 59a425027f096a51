"""The leases of shards of lanes: the right to spend (DESIGN.md, "tool-gateway").

A shard is wanted from its first call on. Whether it is held is judged on this process's monotonic clock, counted from before the receipt-store
was asked, so that a slow answer never makes a lease look longer than it is. A second gateway stands by: it has no lease, so it sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from rowmill.errors import RowmillError
from rowmill.runtime.clock import Clock
from rowmill_contracts.shards import LeaseShard, ShardsLeased
from rowmill_contracts.topology import RECEIPTS_SETTLE
from rowmill_tool_gateway.permits import Permits
from rowmill_tool_gateway.receipts import Asks

log = structlog.get_logger()


@dataclass(slots=True)
class _Lease:
    term: int = 0
    until: float = float("-inf")
    doubted: bool = False
    elsewhere: bool = False


class ShardLeases:
    """``changed``: told a shard when it was gained or permits for it were. ``busy``: whether calls of a shard are in hand. ``permit_renewal``: how
    often permits are drawn while lanes need them.
    """

    def __init__(
        self,
        asks: Asks,
        *,
        holder: str,
        clock: Clock,
        renewal: float,
        retry: float,
        permits: Permits,
        permit_renewal: float,
        changed: Callable[[int], None],
        busy: Callable[[int], bool],
    ) -> None:
        self._asks = asks
        self._holder = holder
        self._clock = clock
        self._renewal = renewal
        self._retry = retry
        self._permits = permits
        self._permit_renewal = permit_renewal
        self._changed = changed
        self._busy = busy
        self._leases: dict[int, _Lease] = {}
        self._wake = asyncio.Event()
        self._drawing = False

    def want(self, shard: int) -> None:
        """A call of this shard came: its queue is ours, so its lease should be."""
        lease = self._leases.get(shard)
        if lease is None:
            self._leases[shard] = _Lease()
            self._wake.set()
        else:
            lease.doubted = False

    def holds(self, shard: int) -> bool:
        """Whether spending is allowed at this moment. Ask right before each request."""
        return self.term(shard) is not None

    def term(self, shard: int) -> int | None:
        lease = self._leases.get(shard)
        return lease.term if lease is not None and self._clock.monotonic() < lease.until else None

    def may_take(self, shard: int) -> bool:
        """Whether calls of this shard that only one process takes may be ours: not while another gateway has the shard, as far as we were told."""
        lease = self._leases.get(shard)
        return lease is None or not lease.elsewhere

    def refused(self, shard: int) -> None:
        """The receipt-store says that the term is over."""
        lease = self._leases.get(shard)
        if lease is not None:
            lease.until = float("-inf")
            self._permits.lost(shard)
            self._wake.set()

    def draw_soon(self) -> None:
        """A lane has work and no permits."""
        self._wake.set()

    def doubt(self) -> None:
        """The broker may have given the queues to another gateway: shards without calls in hand are let go, the others once they have none."""
        for lease in self._leases.values():
            lease.doubted = True
        if self._leases:
            self._wake.set()

    async def run(self) -> None:
        """Take and renew what is wanted, until cancelled."""
        while True:
            self._wake.clear()
            await self._let_go([shard for shard, lease in self._leases.items() if lease.doubted and not self._busy(shard)])
            answered = await self._renew()
            missing = any(not self.holds(shard) and self._busy(shard) for shard in self._leases)
            pause = self._retry if missing or not answered else self._renewal
            if self._drawing:
                pause = min(pause, self._permit_renewal)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def release(self) -> None:
        """Give every shard up, so that the next gateway need not wait for the leases' end. Not insisted on: they end by themselves."""
        await self._let_go(list(self._leases))

    async def _renew(self) -> bool:
        """Whether the receipt-store answered. Waiting for it is cut off while a second request can still save the lease."""
        shards = sorted(self._leases)
        if not shards:
            return True
        asked = self._clock.monotonic()
        drawings = self._permits.draws(shards, asked)
        self._drawing = bool(drawings)
        request = LeaseShard(holder=self._holder, shards=shards, draws=[drawing.draw for drawing in drawings])
        try:
            reply = await self._asks.ask(request, RECEIPTS_SETTLE, ShardsLeased, timeout=self._renewal)
        except RowmillError as error:
            log.warning("shards_not_leased", shards=shards, error=str(error))
            return False
        changed = {drawing.window.shard for drawing in drawings}
        for answer in reply.shards:
            lease = self._leases.get(answer.shard)
            if lease is None:
                continue
            held = self.holds(answer.shard)
            if not answer.held or answer.term != lease.term:
                self._permits.lost(answer.shard)
            lease.term = answer.term
            lease.elsewhere = not answer.held
            lease.until = asked + answer.seconds if answer.held else float("-inf")
            if held != self.holds(answer.shard):
                log.info("shard_taken" if answer.held else "shard_lost", shard=answer.shard, term=answer.term)
                if answer.held:
                    changed.add(answer.shard)
        terms = {answer.shard: answer.term for answer in reply.shards if answer.held and answer.shard in self._leases}
        self._permits.drawn(drawings, reply.drawn, terms, self._clock.monotonic())
        for shard in changed:
            self._changed(shard)
        return True

    async def _let_go(self, shards: list[int]) -> None:
        if not shards:
            return
        drawings = self._permits.last_words(shards, self._clock.monotonic())
        terms = [self._leases.pop(shard).term for shard in shards]
        for shard in shards:
            self._permits.lost(shard)
        draws = [drawing.draw for drawing in drawings]
        request = LeaseShard(holder=self._holder, shards=shards, release=True, draws=draws, terms=terms)
        try:
            await self._asks.ask(request, RECEIPTS_SETTLE, ShardsLeased, timeout=self._retry)
        except RowmillError as error:
            log.info("shards_not_released", shards=shards, error=str(error))
