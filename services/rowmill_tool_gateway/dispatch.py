"""From waiting calls to requests: claim just in time, gather, pace, and hand each request to the sender when its turn is there.

Owns whose turn it is. Which lanes and groups there are is for `Places`, how a request is sent the sender's, how its outcome is stored the
settler's, who is answered what the hand's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rowmill.providers import Provider
from rowmill.runtime.clock import Clock
from rowmill_contracts.tools import ToolFailure
from rowmill_tool_gateway.claiming import Claims
from rowmill_tool_gateway.credentials import Credentials
from rowmill_tool_gateway.flights import Call, Flight, Stage
from rowmill_tool_gateway.groups import Group
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.permits import Permits
from rowmill_tool_gateway.places import Places, Traffic
from rowmill_tool_gateway.receipts import Receipts
from rowmill_tool_gateway.sending import Sender
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.shards import ShardLeases
from rowmill_tool_gateway.solitude import Solitude
from rowmill_tool_gateway.toolbox import PreparedTool
from rowmill_tool_gateway.unpaid import Unpaid

log = structlog.get_logger()

LEAST_TIMER = 0.001
"""Seconds; a lane that is due sooner is looked at then."""


class Dispatcher:
    """``sender``: given the flights of each request whose turn it is. ``lease_ids``: makes ids that no other process makes."""

    sender: Sender

    def __init__(
        self,
        hand: Hand,
        receipts: Receipts,
        shards: ShardLeases,
        clock: Clock,
        settings: ToolGatewaySettings,
        lease_ids: Callable[[], str],
        credentials: Credentials,
        permits: Permits,
    ) -> None:
        self._hand = hand
        self._receipts = receipts
        self._shards = shards
        self._clock = clock
        self._settings = settings
        self._lease_ids = lease_ids
        self._credentials = credentials
        self._places = Places(shards, permits, settings, self._opened_up, self._pump)
        self.claims = Claims(self, hand, receipts, shards, clock, lease_ids, settings.look_after)
        self.unpaid = Unpaid(self.resume, settings.hand)
        self.solitude = Solitude(settings.suspect_patience, self.look_again)
        self._requests: set[asyncio.Task[None]] = set()
        self.prevented = 0
        """Calls that were deferred because outcomes could not be stored (SPEC 3.9)."""

    # ---- lanes ------------------------------------------------------------------------------------------------------------------------

    def place(self, org: str, tool: PreparedTool) -> tuple[Lane, Group[Flight]]:
        """The lane and group of a tool's calls, made when first needed."""
        lane, group = self._places.of(org, tool)
        self._shards.want(lane.shard)
        return lane, group

    def _opened_up(self, traffic: Traffic, provider: Provider) -> None:
        """A lane has its first call."""
        if not self._credentials.resolved(provider):
            traffic.resolving = True
            self._begin(self._resolve_first(traffic, provider))

    async def _resolve_first(self, traffic: Traffic, provider: Provider) -> None:
        """Resolve the secrets before anything is claimed: a claim may be the confirmation, and resolving may take a minute."""
        try:
            await self.sender.resolve(provider)
        finally:
            traffic.resolving = False
            traffic.again()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    @property
    def lanes(self) -> list[Lane]:
        """Every lane that had a call."""
        return self._places.lanes

    def look_again(self, shard: int | None = None) -> None:
        """Something that held lanes back may be over: those of a shard, or all."""
        self._places.look_again(shard)

    def turn_soon(self, flight: Flight) -> None:
        """Look at the flight's lane when what is ready now has run."""
        self._places.traffic(flight.lane).again()

    # ---- waiting ----------------------------------------------------------------------------------------------------------------------

    def admit(self, flight: Flight) -> None:
        """Take a flight in: into its group's queue, past a look at stored outputs where it would wait long, or deferred at once."""
        waiting = flight.group.waiting
        if not flight.ticket:
            flight.ticket = waiting.ticket()
            waited = self._clock.now() - flight.asked
            flight.lane.called(self._clock.monotonic(), waited, flight.tool.weight, self._settings.hand, self._settings.away_wait)
        expected = self._wait_behind(flight, waiting.before(flight.calls[0].page.run_id, flight.asked, flight.ticket) + flight.group.looking)
        away = self._shards.sends_away(flight.lane.shard)
        if away or expected > self._settings.hand:
            for call in flight.calls:
                call.late = True
        if expected > self._settings.look_after and not flight.looked and not away:
            self.claims.look(flight)
        else:
            self.resume(flight)

    def _expected_wait(self, flight: Flight) -> float:
        """Seconds until a flight that joins its queue now would be sent: behind those of its run that were asked for earlier or came before it, and
        others in turn.
        """
        return self._wait_behind(flight, flight.group.waiting.before(flight.calls[0].page.run_id, flight.asked, flight.ticket))

    def _wait_behind(self, flight: Flight, before: int) -> float:
        """Seconds until a flight is sent that so many go before, and those of its group that are claimed."""
        before += flight.group.coming + flight.group.ready
        return flight.lane.expected_wait(self._clock.monotonic(), before * flight.tool.weight)

    def backlog(self, lane: Lane) -> int:
        """Calls of the lane that are in hand and not sent."""
        groups = self._places.traffic(lane).groups
        return sum(group.waiting.length + group.coming + group.ready for group in groups)

    def resume(self, flight: Flight) -> None:
        """Nothing is under way for this flight: those of its calls that are late are deferred, for the others it waits its turn."""
        if flight.stage is Stage.OVER:
            return
        if flight.paused_for:
            self.unpaid.leave(flight)
            flight.paused_for = ""
        if flight.timer is not None:
            flight.timer.cancel()
        late = [call for call in flight.calls if call.late]
        flight.stage = Stage.WAITING
        if late:
            self._defer(flight, late)
        if flight.calls:
            flight.ticket = flight.group.waiting.add(flight.calls[0].page.run_id, flight.asked, flight, flight.ticket or None)
            self.turn_soon(flight)
        else:
            self._hand.forget(flight)

    def pause(self, flight: Flight, seconds: float, reason: str = "") -> None:
        """Bring the flight back after so long; its late calls wait elsewhere. ``reason``: for what, of its run's budget; empty: for another's lease,
        or a retry.
        """
        flight.stage, flight.paused_for = Stage.PAUSED, reason
        if reason and (late := [call for call in flight.calls if call.late]):
            self._hand.defer(flight, late, self.unpaid.away(), reason=reason)
        if flight.calls:
            if reason:
                self.unpaid.wait(flight)
            flight.timer = asyncio.get_running_loop().call_later(seconds, self.resume, flight)

    def try_again(self, flight: Flight, seconds: float) -> None:
        """A retry is a wait like any other: its calls are in hand for as long again."""
        flight.forget_lease()
        for call in flight.calls:
            call.deadline = self._clock.monotonic() + seconds + self._settings.hand
            call.late = False
        self.pause(flight, seconds)

    def stays(self, call: Call, flight: Flight) -> bool:
        """Whether a call whose time in hand is over stays, once: its provider serves, and its turn is so near that it would be asked for again at
        once. Sent away it would only lose its turn to younger calls.
        """
        if flight.stage not in {Stage.WAITING, Stage.CLAIMING, Stage.READY} or call.deadline > call.page.arrived + self._settings.hand:
            return False
        if flight.lane.unavailable_for(self._clock.monotonic()) is not None or not self.may_send(flight.lane):
            return False
        if flight.stage is Stage.WAITING and self._wait_behind(flight, flight.group.waiting.ahead(flight.ticket)) > self._settings.lead:
            return False
        call.deadline += self._settings.lead
        return True

    def expire(self, call: Call, flight: Flight) -> None:
        """The call must not wait longer in hand, unless its request was sent."""
        call.late = True
        match flight.stage:
            case Stage.WAITING:
                flight.group.waiting.withdraw(flight.ticket)
                if flight.looked or not self._receipts.storing or self._shards.sends_away(flight.lane.shard):
                    self.resume(flight)
                else:
                    self.claims.look(flight)
            case Stage.PAUSED:
                if flight.timer is not None:
                    flight.timer.cancel()
                wait = self.unpaid.away() if flight.paused_for else self._settings.hand
                self._hand.defer(flight, [call], wait, reason=flight.paused_for or "held elsewhere")
                if flight.calls:
                    self.pause(flight, self._settings.retry_first, flight.paused_for)
            case Stage.READY:
                self.unready(flight)
                self.claims.release(flight)
            case _:
                pass  # on its way; whoever ends that step sees that the call is late

    def give_up(self, call: Call, flight: Flight, failure: ToolFailure, stored: Callable[[], None]) -> None:
        """Keep it that a call with nothing claimed for it has failed for its run. ``stored``: told once it is."""
        self._receipts.fail(self.claims.given_up(call, flight, failure), flight, lambda _flight, _answer: stored())

    def give_back(self, run_id: str, *, confirmed: bool) -> None:
        """The run is said to have stopped, or to be halted: give back what is claimed for it and not sent. Claiming anew tells whether it is. Not
        what was ``confirmed`` with its claim where a budget is spent: that paid for it, and would have it left over.
        """
        for flight in list(self._hand.flights.values()):
            if flight.payer_run == run_id and flight.stage is Stage.READY and (confirmed or not flight.dispatch):
                self.unready(flight)
                self.claims.release(flight)

    def unready(self, flight: Flight) -> None:
        flight.group.remove(flight)
        flight.lane.claimed -= flight.tool.weight

    def put_back(self, flight: Flight) -> None:
        """The lane was lost while the flight was confirmed. What a budget pays for keeps its part of it, and goes once the lane is back under the
        same term. Everything else goes back, and so does that where another has the lane, or is to have it: an equal call would find it there under
        way.
        """
        ours = self._shards.may_take(flight.lane.shard) and not self._shards.sends_away(flight.lane.shard)
        if not ours or not flight.budgeted or any(call.late for call in flight.calls):
            self.claims.release(flight)
            return
        flight.stage = Stage.READY
        flight.lane.claimed += flight.tool.weight
        flight.group.add(flight.leased_at, flight)

    def elsewhere(self, shard: int) -> None:
        """Another gateway has the shard: what is confirmed here and not sent goes back before an equal call finds it under way."""
        for flight in list(self._hand.flights.values()):
            if flight.lane.shard == shard and flight.stage is Stage.READY and flight.dispatch:
                self.unready(flight)
                self.claims.release(flight)

    def _defer(self, flight: Flight, calls: list[Call]) -> None:
        if not self._receipts.storing:
            self.prevented += len(calls)
            self._hand.defer(flight, calls, self._settings.store_timeout, reason="outcomes cannot be stored")
        elif self._shards.sends_away(flight.lane.shard):
            self._hand.defer(flight, calls, self._shards.again_in(flight.lane.shard), reason="another gateway takes the lane")
        elif not self._shards.holds(flight.lane.shard):  # for how long is not known, so nobody is given an appointment that may be far too late
            self._hand.defer(flight, calls, self._settings.hand, reason="another gateway holds the lane")
        else:
            now = self._clock.monotonic()
            if flight.appointed <= now:
                earliest = max(self._settings.retry_first, self._expected_wait(flight) - self._settings.lead)
                flight.appointed = now + flight.lane.appoint(now, earliest, flight.tool.weight)
            wait = flight.appointed - now
            why = f"; it does not serve ({flight.lane.why})" if flight.lane.why else ""
            failure = ToolFailure(
                tool=flight.tool.id, provider=flight.tool.provider, code="paced", message=f"no turn at the provider in time{why}", origin="gateway"
            )
            self._hand.defer(flight, calls, wait, reason=f"provider {flight.tool.provider}", failure=failure)

    # ---- sending ----------------------------------------------------------------------------------------------------------------------

    def may_send(self, lane: Lane) -> bool:
        """Whether spending is allowed, and what comes of it can be stored."""
        return self._shards.holds(lane.shard) and self._receipts.storing

    def _pump(self, traffic: Traffic) -> None:
        """Do all that this lane may do now, and note when to look again."""
        traffic.dirty = False
        if traffic.timer is not None:
            traffic.timer.cancel()
            traffic.timer = None
        lane, now = traffic.lane, self._clock.monotonic()
        if traffic.resolving or not self.may_send(lane):
            return  # the shard gained, or the latch opened, pumps again; meanwhile the hand's sweep defers
        self._claim_what_fits(traffic, now)
        while lane.may_send(now):
            group = self._due(traffic, now)
            if group is None:
                break
            flights = group.take(now)
            lane.claimed -= sum(flight.tool.weight for flight in flights)
            lane.opened(now)
            for flight in flights:
                flight.stage = Stage.SENT
            self._begin(self.sender.send(lane, flights, group.paces, self._entered(traffic, flights[0])))
        if any(window.in_hand() and not window.pace.permitted(now) for window in traffic.windows):
            self._shards.draw_soon()
        wake = self._wake_at(traffic, now)
        if wake is not None:
            loop = asyncio.get_running_loop()
            traffic.timer = loop.call_later(max(LEAST_TIMER, wake - now), self._pump, traffic)

    @property
    def _ahead(self) -> float:
        """How long before their turn calls are claimed: longer where claims take long, else the receipt-store's answers would set the pace."""
        settings = self._settings
        return max(settings.claim_ahead, min(2 * self.claims.round_trip, settings.hand / 5))

    def _claim_what_fits(self, traffic: Traffic, now: float) -> None:
        """Claim what can be sent soon: a request's worth per group in turn, as far as the lane and each tool's own rate allow."""
        ahead = self._ahead
        room = traffic.lane.claim_room(now, ahead)
        idle = 0
        while room > 0 and idle < len(traffic.groups):
            group = traffic.groups[0]
            traffic.groups.rotate(-1)
            idle += 1
            for _ in range(min(group.size, group.claim_room(now, ahead), group.waiting.length)):
                flight = group.waiting.take()
                if flight is None:
                    break
                room -= flight.tool.weight
                idle = 0
                self.claims.claim(flight, now)

    def _due(self, traffic: Traffic, now: float) -> Group[Flight] | None:
        """The next group, in turn, whose request may go now."""
        for _ in range(len(traffic.groups)):
            group = traffic.groups[0]
            traffic.groups.rotate(-1)
            due = group.due_at(now)
            if due is not None and due <= now and self._lets(group.head):
                return group
        return None

    def _lets(self, flight: Flight | None) -> bool:
        """Whether a call may begin beside what is under way in this process."""
        return flight is None or not flight.tool.runs_author_code or self.solitude.lets(suspect=flight.alone)

    def _entered(self, traffic: Traffic, flight: Flight) -> Callable[[], None]:
        """A request begins that this flight is the first of; to be told when it has ended."""
        if not flight.tool.runs_author_code:
            return traffic.again
        self.solitude.begun(suspect=flight.alone)
        if flight.alone:
            flight.after_alone = lambda: self.solitude.ended(suspect=True)
            return traffic.again

        def ended() -> None:
            self.solitude.ended(suspect=False)
            traffic.again()

        return ended

    def _wake_at(self, traffic: Traffic, now: float) -> float | None:
        """When the passing of time alone lets this lane do more; None where an event must come first (a request's end, a claim's answer)."""
        lane = traffic.lane
        if lane.slots <= 0:
            return None
        times: list[float] = []
        for group in traffic.groups:
            due = group.due_at(now)
            if due is not None:
                times.append(max(due, lane.ready_at()))
            if group.waiting.length:
                times.append(max(lane.closed_until, max(group.claimable_at(now), lane.ready_at()) - self._ahead))
        times = [time for time in times if time < math.inf]  # else a request that is on its way must be written first
        later = [time for time in times if time > now]
        if len(later) == len(times):
            return min(later, default=None)
        return min([*later, now + self._settings.claim_ahead])
