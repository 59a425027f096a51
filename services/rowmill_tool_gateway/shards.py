"""The leases of shards of lanes: the right to spend (DESIGN.md, "tool-gateway"), and handing them over to the gateways whose share they are.

A shard is wanted from its first call on. Whether it is held is judged on this process's monotonic clock, counted from before the receipt-store
was asked, so that a slow answer never makes a lease look longer than it is. A gateway without the lease sends nothing.

A shard that is another's (`sharing`) is handed over so that its lanes hardly stand still. First this gateway steps back at the shard's queue, so that
the other gathers what comes, while what is in hand here goes on being sent. Then nothing more of it is claimed or sent; what was not sent is given
back; requests that are open are waited for a moment; and the lease is given up, with the last words of its windows and lanes and the number of
requests that are still open, and all gateways are told. When the process is to end, all shards are, without the first part.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

import structlog

from rowmill.errors import RowmillError
from rowmill.runtime.asking import AskBus
from rowmill.runtime.clock import Clock
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.shards import ShardLease, ShardsLeased
from rowmill_contracts.topology import RECEIPTS_SETTLE
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.lease_reports import Reports
from rowmill_tool_gateway.open_requests import OpenElsewhere
from rowmill_tool_gateway.others import Others
from rowmill_tool_gateway.permits import Permits
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.shard_lease import Lease
from rowmill_tool_gateway.sharing import Sharing
from rowmill_tool_gateway.standings import Standings

log = structlog.get_logger()

LOOKS = 20
"""How finely, in parts of what is waited for, it is looked whether the requests of a shard that is handed over have ended."""

SOON = 5
"""The part of that for which calls wait that were not sent by then: most shards are given up within it, and without it the next holder may have
nothing to send.
"""


class Work(Protocol):
    """What the gateway has in hand."""

    def busy(self, shard: int) -> bool:
        """Whether calls of the shard are in hand."""

    def put_down(self, shards: Collection[int]) -> None:
        """Give back what is not sent of these shards, and let its calls come again."""

    def elsewhere(self, shard: int) -> None:
        """Another gateway has the shard."""

    def changed(self, shard: int) -> None:
        """The shard was gained, permits for it were, or requests ended that others had open."""

    def lanes(self) -> Iterable[Lane]:
        """Every lane that had a call."""


class ShardLeases:
    """``holder``: this process. ``step_back``: waits at a shard's queue behind all others from then on. ``tell_freed``: a hint to all gateways that
    who waits for these shards may ask for them.
    """

    def __init__(
        self,
        asks: AskBus,
        *,
        holder: str,
        clock: Clock,
        settings: ToolGatewaySettings,
        permits: Permits,
        work: Work,
        step_back: Callable[[int], Awaitable[None]],
        tell_freed: Callable[[list[int]], Awaitable[None]],
    ) -> None:
        self._asks = asks
        self._clock = clock
        self._settings = settings
        self._permits = permits
        self._work = work
        self._others = Others(step_back, tell_freed, settings.shard_retry)
        self._open = OpenElsewhere(work.lanes, self.holds)
        self._standings = Standings(work.lanes)
        self._reports = Reports(holder, permits, self._standings, self._open)
        self._sharing = Sharing(holder, patience=settings.shard_retry, again=settings.shard_again)
        self._leases: dict[int, Lease] = {}
        self._wake = asyncio.Event()
        self._drawing = False
        self._serving = True
        self._said_to_leave = asyncio.Event()
        self._handed_over: dict[int, int] = {}
        """The newest term of each shard that was given up while it was held for certain: what was sent under it stays ours."""
        self._unheard: dict[tuple[int, int], float] = {}
        """When a shard was first given up under a term without an answer. That may be carried out yet, so for a while nothing is spent under it."""

    # ---- rights -----------------------------------------------------------------------------------------------------------------------

    def want(self, shard: int) -> None:
        """A call of this shard came: its queue is ours, so its lease should be, unless the shard is another's."""
        now = self._clock.monotonic()
        if self._sharing.called(shard, now):
            self._wake.set()
        if not self._serving or not self._sharing.wanted(shard, now):
            return
        lease = self._leases.get(shard)
        if lease is None:
            self._leases[shard] = Lease()
            self._wake.set()
        else:
            lease.doubted = False

    def holds(self, shard: int) -> bool:
        """Whether spending is allowed at this moment. Ask right before each request."""
        return self.term(shard) is not None

    def term(self, shard: int) -> int | None:
        lease = self._leases.get(shard)
        return lease.term if lease is not None and lease.holds(self._clock.monotonic()) else None

    def lapsed(self, shard: int) -> bool:
        """Whether the shard is not ours only as its lease could not be renewed in time: it may be ours again as it was, under the same term."""
        lease = self._leases.get(shard)
        return lease is not None and lease.parting is None and lease.leaving is None and not lease.elsewhere and not self.holds(shard)

    def handed_over(self, shard: int, term: int | None) -> bool:
        """Whether the shard was ours under that term until it was, or is being, given up. Nobody took it from us, so the leases of calls that were
        sent under that term do not end with it.
        """
        lease = self._leases.get(shard)
        if lease is not None and lease.term == term and lease.leaving is not None and self._clock.monotonic() < lease.until:
            return True
        return term is not None and self._handed_over.get(shard) == term

    def sends_away(self, shard: int) -> bool:
        """Whether calls of the shard should not wait here: another gateway takes them as soon as they come again."""
        lease = self._leases.get(shard)
        if lease is not None and lease.parting is not None:
            return lease.leaving is not None
        return not self._serving or self._sharing.sends_away(shard, self._clock.monotonic())

    def again_in(self, shard: int) -> float:
        """Seconds after which calls that are sent away are to come again: soon where another gateway has gathered the shard's calls for a while."""
        lease = self._leases.get(shard)
        handed_over = self._serving and lease is not None and lease.leaving is not None
        return self._settings.shard_drain / SOON if handed_over else self._settings.shard_retry

    def may_take(self, shard: int) -> bool:
        """Whether calls of this shard that only one process takes may be ours: not while another gateway has the shard, as far as we were told."""
        lease = self._leases.get(shard)
        return self._serving and self._sharing.ours(shard) and (lease is None or not lease.elsewhere)

    def opened_up(self, lane: Lane) -> None:
        """A lane has its first call: let it know what gateways that do not have its shard (any more) have open there, and have learned."""
        self._open.opened_up(lane, self._clock.monotonic())
        self._standings.opened_up(lane)

    def closed(self, lane: Lane) -> None:
        """An answer closed the lane: for long, and nobody knows it but we? Then it is told at once."""
        if not self.holds(lane.shard):
            self._open.closed(lane)
        elif self._standings.urgent(lane, self._clock.monotonic(), self._settings.shard_renewal):
            self._wake.set()

    def refused(self, shard: int) -> None:
        """The receipt-store says that the term is over."""
        lease = self._leases.get(shard)
        if lease is not None and lease.leaving is None:
            lease.until = float("-inf")
            self._permits.lost(shard)
            self._wake.set()

    def freed(self, shards: Collection[int]) -> None:
        """Another gateway says that these are given up, or that requests ended that it had open there."""
        if any(shard in self._leases for shard in shards):
            self._wake.set()

    def draw_soon(self) -> None:
        """A lane has work and no permits."""
        self._wake.set()

    def doubt(self) -> None:
        """The broker may have given the queues to another gateway: shards without calls in hand are let go, the others once they have none. Those
        that are known to be ours stay: who gets their calls steps back.
        """
        for shard, lease in self._leases.items():
            lease.doubted = not self._sharing.assigned(shard)
        self._wake.set()

    async def leave(self) -> None:
        """Hand every shard over, for good: the process is to end. Returns once the others can know, so that who gets our calls next does not take
        them for ours.
        """
        if not self._serving:
            return
        self._serving = False
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.shard_retry):
                await self._said_to_leave.wait()

    @property
    def given_up(self) -> bool:
        """No shard is ours, nor about to be."""
        return not self._leases

    # ---- turns ------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take and renew what is wanted, and hand over what is another's, until cancelled."""
        while True:
            self._wake.clear()
            self._begin_to_leave()
            if going := self._ready_to_go():
                await self._give_up(going)
            answered = await self._renew()
            await self._rest(self._pause(answered=answered))

    def _pause(self, *, answered: bool) -> float:
        """Seconds from one turn to the next, if nothing happens."""
        settings = self._settings
        missing = any(not self.holds(shard) and self._work.busy(shard) for shard in self._leases)
        pause = settings.shard_retry if missing or self._open.waited_for or not answered else settings.shard_renewal
        return min(pause, settings.permit_renewal) if self._drawing else pause

    async def _rest(self, seconds: float) -> None:
        """Wait for so long, or until something happens, a shard is done with, or what we say of open requests is no more true."""
        end = self._clock.monotonic() + seconds
        while not self._wake.is_set() and (left := end - self._clock.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._look(), left)):
                    await self._wake.wait()
            if self._done_with() or self._ready_to_go() or self._open.news:
                return

    def _look(self) -> float:
        """Seconds after which it is looked whether it is time for a turn."""
        if any(lease.parting is not None for lease in self._leases.values()):
            return self._settings.shard_drain / LOOKS
        return self._settings.shard_retry / LOOKS if self._open.told else math.inf

    async def release(self) -> None:
        """Give every shard up, so that the next gateway need not wait for the leases' end, and say that we go. Not insisted on: it is found out."""
        self._serving = False
        await self._give_up(list(self._leases), last=True)
        await self._others.told()

    def _begin_to_leave(self) -> None:
        """Step back at the queues of shards that are another's, and stop spending for those of them that are done with, or that we do not have."""
        now = self._clock.monotonic()
        due = self._sharing.due(self._leases, now) if self._serving else list(self._leases)
        for shard, lease in self._leases.items():
            if shard in due and lease.parting is None:
                lease.parting = now + (self._settings.shard_parting if self._serving else 0.0)
            elif lease.parting is not None and self._serving and self._sharing.ours(shard):
                lease.parting = lease.leaving = None
                self._work.changed(shard)
        if self._serving:
            self._step_back(due)
        leaving = self._done_with()
        for shard in leaving:
            self._leases[shard].leaving = now + self._settings.shard_drain
        leaving += [shard for shard in due if shard not in self._leases]
        if any(self._work.busy(shard) for shard in leaving):
            self._work.put_down(leaving)

    def _step_back(self, shards: Collection[int]) -> None:
        for shard in shards:
            self._sharing.stepping(shard)
        self._others.let_ahead(shards, lambda shard: self._sharing.stepped(shard, self._clock.monotonic()))

    def _done_with(self) -> list[int]:
        """Shards that are handed over and of which nothing more is to be sent."""
        now = self._clock.monotonic()
        return [shard for shard, lease in self._leases.items() if lease.done_with(now, sends=self._serving and self._work.busy(shard))]

    def _ready_to_go(self) -> list[int]:
        now = self._clock.monotonic()
        return [shard for shard, lease in self._leases.items() if lease.ready_to_go(now, busy=self._work.busy(shard))]

    async def _give_up(self, shards: list[int], *, last: bool = False) -> None:
        """Give shards up, with all that whoever takes them must know. ``last``: and the process ends, so that nothing is open any more."""
        now = self._clock.monotonic()
        handed_over = [shard for shard in shards if self._leases[shard].parting is not None]
        terms = {shard: self._leases[shard].term for shard in shards}
        for shard in shards:
            self._leases[shard].leaving = now
        report = self._reports.last_words(terms, now, serving=self._serving, last=last)
        try:
            await self._asks.ask(report.request, RECEIPTS_SETTLE, ShardsLeased, timeout=self._settings.shard_retry)
        except RowmillError as error:
            log.info("shards_not_released", shards=shards, error=str(error))
            self._unheard = dict.fromkeys(terms.items(), now) | self._unheard
        else:
            self._unheard = {under: since for under, since in self._unheard.items() if under[0] not in shards}
            now = self._clock.monotonic()
            held = {shard: lease.term for shard in shards if (lease := self._leases.get(shard)) is not None and now < lease.until}
            self._handed_over |= held
            self._others.tell(shards)
        for shard in shards:
            self._leases.pop(shard, None)
            if shard in handed_over:
                self._sharing.stepped(shard, self._clock.monotonic())  # it is the other's turn to ask for it
            if self._work.busy(shard):
                self.want(shard)  # calls came meanwhile

    async def _renew(self) -> bool:
        """Whether the receipt-store answered. Waiting for it is cut off while a second request can still save the lease."""
        asked = self._clock.monotonic()
        terms = {shard: lease.term for shard, lease in sorted(self._leases.items())}
        report = self._reports.renewal(terms, [shard for shard in terms if self._leases[shard].leaving is None], asked, serving=self._serving)
        self._drawing = bool(report.drawings)
        try:
            reply = await self._asks.ask(report.request, RECEIPTS_SETTLE, ShardsLeased, timeout=self._settings.shard_renewal)
        except RowmillError as error:
            log.warning("shards_not_leased", shards=list(terms), error=str(error))
            return False
        if not report.request.serving:
            self._said_to_leave.set()
        self._others.tell(report.ended)
        changed = report.drawn_for | self._open.heard(reply.open, self._clock.monotonic())
        changed.update(answer.shard for answer in reply.shards if self._taken(answer, asked))
        held = {answer.shard: answer.term for answer in reply.shards if answer.held and answer.shard in self._leases}
        self._reports.heard(report, reply, held, self._clock.monotonic())
        for shard in changed:
            self._work.changed(shard)
        self._told_who_shares(reply)
        return True

    def _taken(self, answer: ShardLease, asked: float) -> bool:
        """What was said of one shard stands from now on. Whether it is ours now and was not before."""
        lease = self._leases.get(answer.shard)
        if lease is None:
            return False
        held, same = self.holds(answer.shard), answer.term == lease.term
        if not answer.held or not same:
            self._reports.lost(answer.shard)
        lease.term = answer.term
        if not answer.held and not lease.elsewhere:
            self._work.elsewhere(answer.shard)
        lease.elsewhere = not answer.held
        lease.until = asked + answer.seconds if answer.held else float("-inf")
        if answer.held and asked - self._unheard.get((answer.shard, answer.term), -math.inf) < self._settings.shard_again:
            lease.leaving = asked
        if held == self.holds(answer.shard):
            return False
        log.info("shard_taken" if answer.held else "shard_lost", shard=answer.shard, term=answer.term)
        if answer.held and not same:
            self._taken_over(answer.shard, asked)
        return answer.held

    def _taken_over(self, shard: int, now: float) -> None:
        for lane in self._work.lanes():
            if lane.shard == shard:
                lane.taken_over(now)

    def _told_who_shares(self, reply: ShardsLeased) -> None:
        if not self._serving:
            return
        if self._sharing.told(reply.gateways):
            log.info("shards_shared", gateways=len(reply.gateways), shards=self._sharing.shards)
            for shard in range(SHARDS):
                if shard not in self._leases and self._work.busy(shard):
                    self.want(shard)  # its calls came when it was another's
        if any(shard not in self._leases or self._leases[shard].leaving is None for shard in self._sharing.due((), self._clock.monotonic())):
            self._wake.set()
