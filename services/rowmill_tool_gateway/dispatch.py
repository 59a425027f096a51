"""From waiting calls to requests: claim just in time, gather, pace, confirm, send.

Owns lanes and groups at work. Nothing is sent unless, right before it, the shard's lease is held by this process's own clock and outcomes can be
stored. How a request's outcome is stored is the settler's, who is answered what the hand's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from rowmill.encoding.receipts import idempotency_key
from rowmill.runtime.clock import Clock, backoff
from rowmill_contracts.digests import shard_of
from rowmill_contracts.receipts import LeaseRef
from rowmill_contracts.tools import ToolFailure
from rowmill_tool_gateway.claiming import Claims
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.flights import Call, Flight, Stage
from rowmill_tool_gateway.groups import Group
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.lanes import Lane, ProbePolicy
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.receipts import Receipts
from rowmill_tool_gateway.results import Ended
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.shards import ShardLeases
from rowmill_tool_gateway.toolbox import PreparedTool

log = structlog.get_logger()

LEAST_TIMER = 0.001
"""Seconds; a lane that is due sooner is looked at then."""


@dataclass(slots=True, eq=False)
class _Traffic:
    """A lane at work: its groups in turn, and when it is looked at next."""

    lane: Lane
    groups: deque[Group[Flight]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    dirty: bool = False


class Dispatcher:
    """``settle``: told how the flights of one request ended. ``lease_ids``: makes ids that no other process makes. ``credential``: the version of
    a tool's credential that its next request goes with.
    """

    settle: Callable[[Lane, list[Flight], list[Ended]], None]

    def __init__(
        self,
        hand: Hand,
        receipts: Receipts,
        shards: ShardLeases,
        clock: Clock,
        settings: ToolGatewaySettings,
        lease_ids: Callable[[], str],
        credential: Callable[[PreparedTool], int],
    ) -> None:
        self._hand = hand
        self._receipts = receipts
        self._shards = shards
        self._clock = clock
        self._settings = settings
        self._lease_ids = lease_ids
        self._credential = credential
        self._probes = ProbePolicy(settings.unreachable_after, settings.probe_first, settings.probe_limit)
        self._traffic: dict[tuple[str, str], _Traffic] = {}
        self._places: dict[tuple[str, str], tuple[Lane, Group[Flight], _Traffic]] = {}
        self._claims = Claims(self, hand, receipts, shards, clock, lease_ids, settings.look_after)
        self._requests: set[asyncio.Task[None]] = set()
        self.prevented = 0
        """Calls that were deferred because outcomes could not be stored (SPEC 3.9)."""

    # ---- lanes ------------------------------------------------------------------------------------------------------------------------

    def place(self, org: str, tool: PreparedTool) -> tuple[Lane, Group[Flight]]:
        """The lane and group of a tool's calls, made when first needed."""
        lane, group, _ = self._placed(org, tool)
        self._shards.want(lane.shard)
        return lane, group

    def _placed(self, org: str, tool: PreparedTool) -> tuple[Lane, Group[Flight], _Traffic]:
        key = (org, tool.id)
        placed = self._places.get(key)
        if placed is None:
            provider = tool.tool.provider
            traffic = self._traffic.get((org, tool.provider))
            if traffic is None:
                pace = None if provider.rate is None else Pace(provider.rate, provider.burst)
                lane = Lane(org, tool.provider, shard_of(org, tool.provider), concurrency=provider.concurrency, pace=pace, probes=self._probes)
                traffic = self._traffic[org, tool.provider] = _Traffic(lane)
            own_pace = None if tool.tool.rate is None else Pace(tool.tool.rate, provider.burst)
            group: Group[Flight] = Group(size=tool.size, gather=self._settings.page_gather, pace=own_pace)
            traffic.groups.append(group)
            placed = self._places[key] = (traffic.lane, group, traffic)
        return placed

    def look_again(self, shard: int | None = None) -> None:
        """Something that held lanes back may be over: those of a shard, or all."""
        for traffic in self._traffic.values():
            if shard is None or traffic.lane.shard == shard:
                self._soon(traffic)

    def _soon(self, traffic: _Traffic) -> None:
        if not traffic.dirty:
            traffic.dirty = True
            asyncio.get_running_loop().call_soon(self._pump, traffic)

    def turn_soon(self, flight: Flight) -> None:
        """Look at the flight's lane when what is ready now has run."""
        self._soon(self._traffic[flight.lane.org, flight.lane.provider])

    # ---- waiting ----------------------------------------------------------------------------------------------------------------------

    def admit(self, flight: Flight) -> None:
        """Take a flight in: into its group's queue, past a look at stored outputs where it would wait long, or deferred at once."""
        lane, waiting = flight.lane, flight.group.waiting
        run_id = flight.calls[0].page.run_id
        before = (waiting.waiting(run_id) + 1) * max(1, waiting.runs) * flight.tool.weight
        expected = lane.expected_wait(self._clock.monotonic(), before)
        if expected > self._settings.hand:
            for call in flight.calls:
                call.late = True
        if expected > self._settings.look_after and not flight.looked:
            self._claims.look(flight)
        else:
            self.resume(flight)

    def resume(self, flight: Flight) -> None:
        """Nothing is under way for this flight: those of its calls that are late are deferred, for the others it waits its turn."""
        if flight.stage is Stage.OVER:
            return
        late = [call for call in flight.calls if call.late]
        flight.stage = Stage.WAITING
        if late:
            self._defer(flight, late)
        if flight.calls:
            flight.ticket = flight.group.waiting.add(flight.calls[0].page.run_id, flight.asked, flight)
            self.turn_soon(flight)
        else:
            self._hand.forget(flight)

    def pause(self, flight: Flight, seconds: float) -> None:
        """Bring the flight back after so long."""
        flight.stage = Stage.PAUSED
        flight.timer = asyncio.get_running_loop().call_later(seconds, self.resume, flight)

    def try_again(self, flight: Flight, seconds: float) -> None:
        """A retry is a wait like any other: its calls are in hand for as long again."""
        flight.attempt += 1
        flight.forget_lease()
        for call in flight.calls:
            call.deadline = self._clock.monotonic() + seconds + self._settings.hand
            call.late = False
        self.pause(flight, seconds)

    def expire(self, call: Call, flight: Flight) -> None:
        """The call must not wait longer in hand, unless its request was sent."""
        call.late = True
        match flight.stage:
            case Stage.WAITING:
                flight.group.waiting.withdraw(flight.ticket)
                if flight.looked or not self._receipts.storing:
                    self.resume(flight)
                else:
                    self._claims.look(flight)
            case Stage.PAUSED:
                if flight.timer is not None:
                    flight.timer.cancel()
                self._hand.defer(flight, [call], self._settings.hand, reason="held elsewhere")
                if flight.calls:
                    self.pause(flight, self._settings.retry_first)
            case Stage.READY:
                self._unready(flight)
                self._claims.release(flight)
            case _:
                pass  # on its way; whoever ends that step sees that the call is late

    def give_back(self, run_id: str) -> None:
        """The run is said to have stopped: give back what is claimed for it and not sent. Claiming anew tells whether it has."""
        for flight in list(self._hand.flights.values()):
            if flight.payer_run == run_id and flight.stage is Stage.READY:
                self._unready(flight)
                self._claims.release(flight)

    def _unready(self, flight: Flight) -> None:
        flight.group.remove(flight)
        flight.lane.claimed -= flight.tool.weight

    def _defer(self, flight: Flight, calls: list[Call]) -> None:
        if not self._receipts.storing:
            self.prevented += len(calls)
            self._hand.defer(flight, calls, self._settings.store_timeout, reason="outcomes cannot be stored")
        elif not self._shards.holds(flight.lane.shard):
            self._hand.defer(flight, calls, self._settings.hand, reason="another gateway holds the lane")
        else:
            wait = flight.lane.appoint(self._clock.monotonic(), self._settings.retry_first, flight.tool.weight)
            failure = ToolFailure(
                tool=flight.tool.id, provider=flight.tool.provider, code="paced", message="no turn at the provider in time", origin="gateway"
            )
            self._hand.defer(flight, calls, wait, reason=f"provider {flight.tool.provider}", failure=failure)

    # ---- sending ----------------------------------------------------------------------------------------------------------------------

    def _may_send(self, lane: Lane) -> bool:
        return self._shards.holds(lane.shard) and self._receipts.storing

    def _pump(self, traffic: _Traffic) -> None:
        """Do all that this lane may do now, and note when to look again."""
        traffic.dirty = False
        if traffic.timer is not None:
            traffic.timer.cancel()
            traffic.timer = None
        lane, now = traffic.lane, self._clock.monotonic()
        if not self._may_send(lane):
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
            task = asyncio.ensure_future(self._send(traffic, flights))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        wake = self._wake_at(traffic, now)
        if wake is not None:
            loop = asyncio.get_running_loop()
            traffic.timer = loop.call_later(max(LEAST_TIMER, wake - now), self._pump, traffic)

    def _claim_what_fits(self, traffic: _Traffic, now: float) -> None:
        """Claim what can be sent soon: a request's worth per group in turn, as far as the lane and each tool's own rate allow."""
        ahead = self._settings.claim_ahead
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
                self._claims.claim(flight)

    def _due(self, traffic: _Traffic, now: float) -> Group[Flight] | None:
        """The next group, in turn, whose request may go now."""
        for _ in range(len(traffic.groups)):
            group = traffic.groups[0]
            traffic.groups.rotate(-1)
            due = group.due_at(now)
            if due is not None and due <= now:
                return group
        return None

    def _wake_at(self, traffic: _Traffic, now: float) -> float | None:
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
                times.append(max(lane.closed_until, max(group.claimable_at(now), lane.ready_at()) - self._settings.claim_ahead))
        later = [time for time in times if time > now]
        if len(later) == len(times):
            return min(later, default=None)
        return min([*later, now + self._settings.claim_ahead])

    async def _send(self, traffic: _Traffic, flights: list[Flight]) -> None:
        lane, tool = traffic.lane, flights[0].tool
        if not tool.confirmed_by_claim:
            flights = await self._confirm(lane, flights)
        else:
            flights = self._still_ours(lane, flights)
        if not flights:
            lane.finished(None)
            self._soon(traffic)
            return
        inputs = [bytes(flight.input) for flight in flights]
        keys = [idempotency_key(flight.key, flight.payer_run if flight.forced else None) for flight in flights]
        timeout = min(flight.timeout for flight in flights)
        credential = self._credential(tool)
        for flight in flights:
            flight.credential = credential
        started = self._clock.monotonic()
        ended: list[Ended]
        try:
            ended = list(await tool.carrier.carry(inputs, keys, timeout))
        except Exception as error:
            log.exception("request_crashed", tool=tool.id)
            ended = [Observation("crashed", f"the gateway failed: {type(error).__name__}")] * len(flights)
        finally:
            lane.finished(self._clock.monotonic() - started)
            self._soon(traffic)
        self.settle(lane, flights, ended)

    def _still_ours(self, lane: Lane, flights: list[Flight]) -> list[Flight]:
        """Those that may be sent on the claim's own confirmation: under the term of their claim, since another holder may have sent what is older."""
        term = self._shards.term(lane.shard) if self._receipts.storing else None
        sent: list[Flight] = []
        for flight in flights:
            if term is not None and flight.term == term:
                sent.append(flight)
            else:
                self._claims.release(flight)
        return sent

    async def _confirm(self, lane: Lane, flights: list[Flight]) -> list[Flight]:
        """Those whose lease is confirmed. An unanswered confirm is asked again: it may have been carried out, and then the same one answers."""
        leases = [LeaseRef(key=flight.key, lease_id=flight.lease_id, run_id=flight.payer_run) for flight in flights]
        batch_id = self._lease_ids()
        failures = 0
        while (answers := await self._receipts.confirm(lane.shard, leases, batch_id)) is None:
            failures += 1
            await self._clock.sleep(backoff(failures, first=0.05, limit=self._settings.store_timeout))
        confirmed: list[Flight] = []
        for flight, answer in zip(flights, answers, strict=True):
            match answer.state:
                case "confirmed":
                    flight.dispatch, flight.leased_at = answer.dispatch, self._clock.monotonic()
                    confirmed.append(flight)
                case "halted":
                    self._hand.halted(flight, "halted")
                case "refused":
                    self._shards.refused(lane.shard)
                    self._claims.release(flight)
                case _:
                    flight.forget_lease()
                    self.resume(flight)
        if confirmed and not self._may_send(lane):
            for flight in confirmed:
                self._claims.release(flight)
            return []
        return confirmed

    # ---- keeping leases ---------------------------------------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Renew the leases of calls in hand that are a third of their life old (SPEC 3.3)."""
        now = self._clock.monotonic()
        due = [
            flight
            for flight in self._hand.flights.values()
            if flight.lease_id
            and flight.stage in {Stage.READY, Stage.SENT, Stage.STORING}
            and now - flight.leased_at >= self._settings.receipt_renewal
        ]
        for start in range(0, len(due), self._settings.receipt_page):
            page = due[start : start + self._settings.receipt_page]
            leases = [LeaseRef(key=f.key, lease_id=f.lease_id, run_id=f.payer_run, dispatch=f.dispatch) for f in page]
            for flight, lease, held in zip(page, leases, await self._receipts.renew(leases) or [], strict=False):
                if held:
                    flight.leased_at = now
                elif flight.lease_id == lease.lease_id:
                    log.warning("lease_lost", tool=flight.tool.id, stage=flight.stage.name)
                    if flight.stage is Stage.READY:
                        self._unready(flight)
                        flight.forget_lease()
                        self.resume(flight)

    async def finish(self, timeout: float) -> None:
        """Wait for the requests that are under way."""
        if self._requests:
            await asyncio.wait(set(self._requests), timeout=timeout)
