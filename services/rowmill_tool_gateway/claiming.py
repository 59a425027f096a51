"""Claiming receipts for flights, and what each answer means: from a flight that waits to one that may be sent, or to an answer.

A claim is asked for shortly before the flight's turn; the answer may also be a stored output, another's live lease, or a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rowmill.errors import RowmillError
from rowmill.runtime.clock import Clock
from rowmill.said import printable, said_by
from rowmill_contracts.receipts import Claim, ClaimAnswer, FailedCall, LeaseRef
from rowmill_contracts.tools import ToolFailure
from rowmill_tool_gateway.flights import Call, Flight, Stage
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.receipts import Receipts
from rowmill_tool_gateway.shards import ShardLeases

DOUBTFUL_LEASES = 10_000
"""Unanswered claims that are remembered; such leases end by themselves within a minute."""
SHORTEST_POLL = 0.001
SMOOTHING = 0.05
"""Weight of the newest claim in the mean of how long they take."""


class Flow(Protocol):
    """Where flights go that are not claimed after all."""

    def resume(self, flight: Flight) -> None: ...

    def pause(self, flight: Flight, seconds: float, reason: str = "") -> None: ...

    def turn_soon(self, flight: Flight) -> None: ...


class Claims:
    """``lease_ids``: makes ids that no other process makes. ``longest_poll``: seconds after which another's lease is looked at again."""

    def __init__(
        self,
        flow: Flow,
        hand: Hand,
        receipts: Receipts,
        shards: ShardLeases,
        clock: Clock,
        lease_ids: Callable[[], str],
        longest_poll: float,
    ) -> None:
        self._flow = flow
        self._hand = hand
        self._receipts = receipts
        self._shards = shards
        self._clock = clock
        self._lease_ids = lease_ids
        self._longest_poll = longest_poll
        self.round_trip = 0.0
        """Seconds that claims take of late, from their turn to be claimed to the answer."""
        self._doubtful: dict[str, tuple[float, Flight, LeaseRef]] = {}

    def look(self, flight: Flight) -> None:
        flight.stage = Stage.LOOKING
        flight.group.looking += 1
        self._receipts.look(flight.lane.shard, self._claim_of(flight), flight, self._looked)

    def _looked(self, flight: Flight, answer: ClaimAnswer | None) -> None:
        flight.group.looking -= 1
        if flight.stage is Stage.OVER:
            return
        flight.looked = True
        match answer:
            case ClaimAnswer(state="completed"):
                self._hand.served(flight, answer)
            case ClaimAnswer(state="failed", failure=failure) if failure is not None:
                self._hand.failed(flight, failure)
            case ClaimAnswer(state="unknown"):
                self._hand.unknown(flight, answer.failure)
            case _:
                self._flow.resume(flight)

    def _claim_of(self, flight: Flight) -> Claim:
        call = flight.calls[0]
        page, item, tool = call.page, call.item, flight.tool
        flight.payer_run, flight.payer_row, flight.forced = page.run_id, item.row, call.forced
        flight.timeout = tool.tool.timeout if item.timeout is None else item.timeout
        return Claim(
            key=flight.key,
            lease_id=flight.lease_id,
            run_id=page.run_id,
            tool=tool.id,
            effect=tool.effect,
            started_at=page.started_at,
            caller=item.row,
            force=flight.forced,
            reusable=tool.effect == "read",
            fresh_for=item.stale_after,
            cost=flight.cost,
            org=page.org,
        )

    @staticmethod
    def given_up(call: Call, flight: Flight, failure: ToolFailure) -> FailedCall:
        """What is to be kept of a call that failed with nothing claimed for it."""
        page, tool = call.page, flight.tool
        claim = Claim(
            key=flight.key,
            lease_id="",
            run_id=page.run_id,
            tool=tool.id,
            effect=tool.effect,
            started_at=page.started_at,
            caller=call.item.row,
            org=page.org,
        )
        return FailedCall(key=flight.key, lease_id="", dispatch=0, run_id=page.run_id, failure=failure, charged=False, given_up=claim)

    def claim(self, flight: Flight, now: float) -> None:
        """Claim the flight's receipt. ``now``: by the monotonic clock."""
        try:
            flight.cost = flight.tool.cost_of(bytes(flight.input))
        except RowmillError as error:
            flight.payer_run = flight.calls[0].page.run_id
            tool = flight.tool
            self._hand.failed(
                flight,
                ToolFailure(
                    tool=tool.id, provider=tool.provider, code="cost", message=printable(said_by(error)), origin="gateway", category="definition"
                ),
            )
            return
        flight.stage, flight.leased_at = Stage.CLAIMING, now
        flight.doubt = self._doubted(flight)
        flight.lease_id = self._lease_ids() if flight.doubt is None else flight.doubt.lease_id
        flight.lane.claimed += flight.tool.weight
        flight.group.coming += 1
        flight.term = self._shards.term(flight.lane.shard)
        self._receipts.claim(flight.lane.shard, self._claim_of(flight), flight, self._claimed, confirm=flight.tool.confirmed_by_claim)

    def _claimed(self, flight: Flight, answer: ClaimAnswer | None) -> None:
        flight.lane.claimed -= flight.tool.weight
        flight.group.coming -= 1
        self._flow.turn_soon(flight)
        if answer is None:
            self._doubt(flight)
            for call in flight.calls:
                call.late = True
            self._flow.resume(flight)
            return
        doubt, flight.doubt = flight.doubt, None
        if doubt is not None and answer.state != "granted":
            self._nothing_sent(flight, doubt)
        match answer.state:
            case "granted":
                now = self._clock.monotonic()
                self.round_trip += SMOOTHING * (now - flight.leased_at - self.round_trip)
                flight.dispatch, flight.leased_at = answer.dispatch, now
                if flight.stage is Stage.OVER or any(call.late for call in flight.calls):
                    self.release(flight)
                else:
                    flight.stage = Stage.READY
                    flight.lane.claimed += flight.tool.weight
                    flight.alone = answer.alone and flight.tool.runs_author_code
                    flight.budgeted = flight.tool.confirmed_by_claim and not answer.dispatch and not answer.alone
                    flight.group.add(flight.leased_at, flight, apart=flight.alone)
            case "refused":
                self._shards.refused(flight.lane.shard)
                self._flow.resume(flight)
            case _ if flight.stage is Stage.OVER:
                pass  # its callers were answered meanwhile, and nothing is claimed
            case "completed":
                self._hand.served(flight, answer)
            case "failed" if answer.failure is not None:
                self._hand.failed(flight, answer.failure)
            case "unknown":
                self._hand.unknown(flight, answer.failure)
            case "halted":
                self._hand.halted(flight, answer.reason or "halted")
            case "over_budget":
                self._hand.halted(flight, answer.reason or "budget")
            case "held" if answer.reason and any(call.page.run_id != flight.payer_run for call in flight.calls):
                self._hand.unpaid(flight, answer.reason)
            case "held" if answer.reason:
                self._flow.pause(flight, max(answer.wait_ms / 1000, SHORTEST_POLL), answer.reason)
            case "held" if not any(call.late for call in flight.calls):
                self._flow.pause(flight, min(max(answer.wait_ms / 1000, SHORTEST_POLL), self._longest_poll))
            case _:
                self._flow.resume(flight)

    def _doubt(self, flight: Flight) -> None:
        """The lease may be ours: should the key be claimed again, the same id finds it, where another would have to wait for its end."""
        if len(self._doubtful) >= DOUBTFUL_LEASES:
            del self._doubtful[next(iter(self._doubtful))]
        self._doubtful[flight.key] = (self._clock.monotonic(), flight, flight.doubt or _forgotten(flight))
        flight.doubt = None
        flight.forget_lease()

    def _doubted(self, flight: Flight) -> LeaseRef | None:
        """The lease that may be the flight's already. One that was asked for by another run, which would pay for it, goes back; should the claim be
        carried out only after that, it goes back again in the end.
        """
        doubtful = self._doubtful.get(flight.key)
        if doubtful is None:
            return None
        if doubtful[2].run_id != flight.calls[0].page.run_id:
            self._nothing_sent(flight, doubtful[2])
            return None
        del self._doubtful[flight.key]
        return doubtful[2]

    def give_up_doubts(self, age: float) -> None:
        """Give claims back that were not answered ``age`` seconds ago, and that nobody has asked for again since."""
        limit = self._clock.monotonic() - age
        while self._doubtful and (oldest := next(iter(self._doubtful.items())))[1][0] <= limit:
            key, (_, flight, lease) = oldest
            del self._doubtful[key]
            self._nothing_sent(flight, lease)

    def _nothing_sent(self, flight: Flight, lease: LeaseRef) -> None:
        self._receipts.release(lease, flight, lambda _: None)

    def release(self, flight: Flight) -> None:
        """Give the lease back, unsent, before anyone is told to wait."""
        if flight.stage is not Stage.OVER:
            flight.stage = Stage.RELEASING
        self._receipts.release(_forgotten(flight), flight, self._flow.resume)

    def give_back(self, flight: Flight) -> None:
        """Give the lease back, unsent; what becomes of the flight does not wait for that."""
        self._nothing_sent(flight, _forgotten(flight))


def _forgotten(flight: Flight) -> LeaseRef:
    """The flight's lease, which it knows no more. Without a dispatch number nothing was sent under it: `Sender` sends under one alone."""
    lease = LeaseRef(key=flight.key, lease_id=flight.lease_id, run_id=flight.payer_run, dispatch=flight.dispatch)
    flight.forget_lease()
    return lease
