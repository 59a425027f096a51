"""The gateway without the broker: hand, lanes, receipts and shards put together, and the clocks that drive them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

from rowmill.runtime.asking import AskBus
from rowmill.runtime.clock import Clock
from rowmill_contracts.events import AskLanes, LanesShown
from rowmill_contracts.runs import ProviderServes
from rowmill_contracts.tools import ToolCalls
from rowmill_tool_gateway.answers import Answers, Replies
from rowmill_tool_gateway.credentials import Credentials
from rowmill_tool_gateway.dispatch import Dispatcher
from rowmill_tool_gateway.flights import Page
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.idling import Idling
from rowmill_tool_gateway.lane_views import lanes_shown
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.permits import Permits
from rowmill_tool_gateway.receipts import Receipts
from rowmill_tool_gateway.sending import Sender
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.settling import Serves, Settler
from rowmill_tool_gateway.shards import ShardLeases
from rowmill_tool_gateway.toolbox import Toolbox
from rowmill_tool_gateway.turns import turn_after_turn

SWEEPS_PER_HOLD = 20
"""How finely the hand's 5 s are kept."""


class Neighbours(AskBus, Replies, Protocol):
    """What the engine needs of the bus."""


async def _alone(shard: int) -> None:
    """Without queues there is nobody to step back behind."""


async def _untold(shards: list[int]) -> None:
    """Without queues there is nobody to tell."""


class Engine:
    """``holder``: unique to this process and start; no lease of a former start is taken for ours. ``connected``: whether there is a session with the
    broker; `reconnected` is to be called at the begin of each. ``serves``: told of providers that serve again and had kept calls waiting.
    ``step_back``: waits at a shard's queue behind all others from then on. ``tell_freed``: a hint to all gateways that they may ask for these shards.
    ``sooner``: told of lanes that have nothing to send while calls wait for them elsewhere. Never waits.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        toolbox: Toolbox,
        credentials: Credentials,
        settings: ToolGatewaySettings,
        *,
        holder: str,
        clock: Clock,
        connected: Callable[[], bool] = lambda: True,
        jitter: Callable[[], float] = random.random,
        serves: Serves = lambda _org, _provider, _message: None,
        step_back: Callable[[int], Awaitable[None]] = _alone,
        tell_freed: Callable[[list[int]], Awaitable[None]] = _untold,
        sooner: Callable[[ProviderServes], bool] = lambda _: True,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._holder = holder
        self._answers = Answers(neighbours, gather=settings.page_gather)
        # The lambdas name parts that are built further down.
        self._receipts = Receipts(
            neighbours,
            holder=holder,
            clock=clock,
            term_of=lambda shard: self.shards.term(shard),  # noqa: PLW0108
            connected=connected,
            storing_again=lambda: self.dispatcher.look_again(),  # noqa: PLW0108
            page=settings.receipt_page,
            gather=settings.page_gather,
            timeout=settings.store_timeout,
        )
        self.hand = Hand(
            toolbox,
            self._answers,
            clock,
            hold=settings.hand,
            sent_hold=settings.in_flight_hold,
            sent_again=settings.in_flight_again,
            longest_wait=settings.away_wait,
            scout_after=settings.retry_first,
        )
        permits = Permits(settings.permit_life)
        self.shards = ShardLeases(
            neighbours,
            holder=holder,
            clock=clock,
            settings=settings,
            permits=permits,
            work=_InHand(self),
            step_back=step_back,
            tell_freed=tell_freed,
        )
        numbers = itertools.count(1)

        def lease_ids() -> str:
            return f"{holder}-{next(numbers):x}"

        self.dispatcher = Dispatcher(self.hand, self._receipts, self.shards, clock, settings, lease_ids, credentials, permits)
        self.hand.dispatch = self.dispatcher
        self.sender = Sender(self.dispatcher, self.dispatcher.claims, self.hand, self._receipts, self.shards, credentials, clock, settings, lease_ids)
        self.dispatcher.sender = self.sender
        self.settler = Settler(self.hand, self.dispatcher, self._receipts, credentials, clock, settings, jitter, serves, self.shards.closed)
        self.sender.settle = self.settler.settle
        self._idling = Idling(lambda: self.dispatcher.lanes, _InHand(self), settings, sooner)
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to keep leases and time."""
        self._loops = [
            asyncio.create_task(
                turn_after_turn("shard leases", self.shards.run, self._clock, longest_pause=self._settings.shard_retry), name="shard leases"
            ),
            asyncio.create_task(turn_after_turn("sweep", self._sweep, self._clock, longest_pause=self._settings.hand), name="sweep"),
            asyncio.create_task(turn_after_turn("renewals", self._renew, self._clock, longest_pause=self._settings.hand), name="renewals"),
        ]

    def reconnected(self) -> None:
        """There is a new session: what waited for it goes on, and the queues may have gone to another gateway."""
        self.shards.doubt()
        self._receipts.reconnected()
        self.dispatcher.look_again()

    def take(self, message: ToolCalls, reply_to: str) -> Page:
        return self.hand.take(message, reply_to)

    def show(self, question: AskLanes) -> LanesShown:
        """The lanes asked for, as they are now."""
        return lanes_shown(question, self._holder, self.dispatcher.lanes, self.hand.flights.values(), self.shards, self._receipts, self._clock)

    async def stop(self, timeout: float) -> None:
        """Defer what was not sent, hand the shards over, wait for what was sent (for ``timeout`` seconds at most)."""
        await self.shards.leave()
        async with asyncio.timeout(timeout) as limit:
            try:
                while self.hand.pages or not self.shards.given_up:
                    self.hand.put_down()
                    await asyncio.sleep(self._settings.hand / SWEEPS_PER_HOLD)
            except asyncio.CancelledError:
                if not limit.expired():
                    raise
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.shards.release()

    async def _sweep(self) -> None:
        interval = self._settings.hand / SWEEPS_PER_HOLD
        await self._clock.sleep(interval)
        self.hand.sweep(interval)
        self._idling.look(self._clock.monotonic())

    async def _renew(self) -> None:
        await self._clock.sleep(min(self._settings.receipt_renewal / 4, self._settings.claim_renewal))
        await self.sender.renew()


class _InHand:
    """What the leases of shards and idle lanes look at; the engine's parts are built one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def busy(self, shard: int) -> bool:
        return self._engine.hand.busy(shard)

    def holds(self, shard: int) -> bool:
        return self._engine.shards.holds(shard)

    def lapsed(self, shard: int) -> bool:
        return self._engine.shards.lapsed(shard)

    def may_send(self, lane: Lane) -> bool:
        return self._engine.dispatcher.may_send(lane)

    def backlog(self, lane: Lane) -> int:
        return self._engine.dispatcher.backlog(lane)

    def put_down(self, shards: Collection[int]) -> None:
        self._engine.hand.put_down(shards)

    def elsewhere(self, shard: int) -> None:
        self._engine.dispatcher.elsewhere(shard)

    def changed(self, shard: int) -> None:
        self._engine.dispatcher.look_again(shard)

    def lanes(self) -> Iterable[Lane]:
        return self._engine.dispatcher.lanes
