"""Sending: from the flights of one request to their outcomes, under leases and a right to spend that are looked at until the last moment.

Nothing is written to a provider unless, right before its first byte, the shard's lease is held by this process's own clock under the very term of the
claims, outcomes can be stored, and no flight's lease was found to be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import structlog

from rowmill.encoding.receipts import idempotency_key, short_digest
from rowmill.errors import AskDied, SecretMissing
from rowmill.providers import Provider
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.ends import ends_the_task
from rowmill_contracts.receipts import ConfirmAnswer, LeaseRef
from rowmill_contracts.tools import ToolFailure
from rowmill_tool_gateway.claiming import Claims
from rowmill_tool_gateway.credentials import Credentials
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.flights import Flight, Stage
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.receipts import Receipts, dead
from rowmill_tool_gateway.results import Ended
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.shards import ShardLeases
from rowmill_tool_gateway.solitude import Solitude

log = structlog.get_logger()

LEASE_RENEWALS: Final = 3
"""Times that a receipt's lease could be renewed in its life."""
CERTAIN_RENEWALS: Final = 2
"""For how many of them it lasts for certain, however long the answers took that told of it."""


class Flow(Protocol):
    """Where flights go that are not sent after all, and who of them goes alone."""

    solitude: Solitude

    def may_send(self, lane: Lane) -> bool:
        """Whether spending is allowed, and what comes of it can be stored."""

    def resume(self, flight: Flight) -> None: ...

    def unready(self, flight: Flight) -> None: ...

    def put_back(self, flight: Flight) -> None: ...


class Sender:
    """``settle``: told how the flights of one request ended. ``lease_ids``: makes ids that no other process makes."""

    settle: Callable[[Lane, list[Flight], list[Ended]], None]

    def __init__(
        self,
        flow: Flow,
        claims: Claims,
        hand: Hand,
        receipts: Receipts,
        shards: ShardLeases,
        credentials: Credentials,
        clock: Clock,
        settings: ToolGatewaySettings,
        lease_ids: Callable[[], str],
    ) -> None:
        self._flow = flow
        self._claims = claims
        self._hand = hand
        self._receipts = receipts
        self._shards = shards
        self._credentials = credentials
        self._clock = clock
        self._settings = settings
        self._lease_ids = lease_ids

    async def resolve(self, provider: Provider) -> None:
        """Resolve the provider's secrets before anything is confirmed; that may take a minute."""
        with contextlib.suppress(SecretMissing):  # each call is told when it is carried out
            await self._credentials.headers(provider)

    async def send(self, lane: Lane, flights: list[Flight], paces: Sequence[Pace], ended: Callable[[], None]) -> None:
        """Send the flights of one request, which the lane has counted as open and ``paces`` as begun. ``ended``: told when it is open no more."""
        tool = flights[0].tool
        try:
            flights = await self._prepared(lane, flights)
        except Exception as error:
            log.exception("request_not_prepared", tool=tool.id)
            self._give_up(flights, error)
            flights = []
        if flights and not self._flow.may_send(lane):
            for flight in flights:
                self._flow.put_back(flight)
            flights = []
        if not flights:
            lane.finished(None)
            for pace in paces:
                pace.dropped()
            ended()
            return
        inputs = [bytes(flight.input) for flight in flights]
        keys = [idempotency_key(flight.key, flight.payer_run if flight.forced else None) for flight in flights]
        timeout = min(flight.timeout for flight in flights)
        credential = self._credentials.version(tool.tool.provider)
        for flight in flights:
            flight.credential = credential

        term, written, begun = flights[0].term, not paces, False

        def may_send() -> bool:
            """Whether all of the request is still ours, as when it was claimed. The first time is when the rate counts it as written. What a function
            has begun goes on where its lane is handed over in order: cut in two, it would have to be made again.
            """
            nonlocal written, begun
            held = self._shards.term(lane.shard)
            if not self._receipts.storing or ((held is None or held != term) and not (begun and self._goes_on(lane, term, flights))):
                return False
            for flight in flights:
                if flight.lost or not flight.dispatch:
                    return False
            if not written:
                now = self._clock.monotonic()
                if not all(pace.may_write(now) for pace in paces):
                    return False
                written = True
                for pace in paces:
                    pace.wrote(now)
            begun = True
            return True

        started = self._clock.monotonic()
        endings: list[Ended] = []
        try:
            carrying = tool.carrier.carry(inputs, keys, timeout, may_send)
            endings = list(await (self._carried_alone(lane, flights[0], carrying) if flights[0].alone else carrying))
        except BaseException as error:
            if ends_the_task(error):
                raise
            log.exception("request_crashed", tool=tool.id)
            endings = [Observation("crashed", f"the gateway failed: {type(error).__name__}")] * len(flights)
        finally:
            sent = not (endings and isinstance(endings[0], Observation) and endings[0].kind == "not_sent")
            lane.finished(self._clock.monotonic() - started if sent else None)
            if not written:
                for pace in paces:
                    pace.dropped()
            ended()
        if sent:
            self.settle(lane, flights, endings)
        else:
            for flight in flights:
                self._claims.release(flight)

    def _goes_on(self, lane: Lane, term: int | None, flights: Sequence[Flight]) -> bool:
        """Whether calls that were begun are ours though their lane is not any more, and their own leases last for certain."""
        alive = self._clock.monotonic() - CERTAIN_RENEWALS * self._settings.receipt_renewal
        return self._shards.handed_over(lane.shard, term) and all(flight.leased_at > alive for flight in flights)

    async def _prepared(self, lane: Lane, flights: list[Flight]) -> list[Flight]:
        """Those whose request may be sent as one."""
        tool = flights[0].tool
        unconfirmed = [flight for flight in flights if not flight.dispatch]
        if unconfirmed:
            if not self._credentials.resolved(tool.tool.provider):
                await self.resolve(tool.tool.provider)
            alone = flights[0].alone and await self._flow.solitude.alone()
            confirmed = await self._confirm(lane, unconfirmed, alone=alone)
            flights = [flight for flight in flights if flight in confirmed or flight not in unconfirmed]
        return self._of_newest_term(flights) if len(flights) > 1 else flights

    async def _carried_alone(self, lane: Lane, flight: Flight, carrying: Coroutine[Any, Any, Sequence[Ended]]) -> Sequence[Ended]:
        """Carry a suspect out. Before others begin beside it, because it lasts, the store is told that from now on a death need not be its own; where
        it takes no word of that (the lane is another's by now), nobody begins before the end.
        """
        carried = asyncio.ensure_future(carrying)
        done, _ = await asyncio.wait([carried], timeout=self._flow.solitude.patience)
        if not done:
            lease = LeaseRef(key=flight.key, lease_id=flight.lease_id, run_id=flight.payer_run, dispatch=flight.dispatch, batch_id=self._lease_ids())
            failures = 0
            while (answers := await self._receipts.confirm(lane.shard, [lease])) is None and not carried.done():
                failures += 1
                await self._clock.sleep(backoff(failures, first=0.05, limit=self._settings.store_timeout))
            if answers is not None and isinstance(answers[0], ConfirmAnswer) and answers[0].state == "confirmed":
                self._flow.solitude.let_in()
        return await carried

    def _give_up(self, flights: list[Flight], error: Exception) -> None:
        """Nothing was sent, and it is not known why: those that nothing else became of fail, and their leases go back."""
        message = f"the gateway failed: {type(error).__name__}"
        for flight in flights:
            if flight.stage is Stage.SENT:
                self._claims.give_back(flight)
                tool = flight.tool
                self._hand.failed(
                    flight,
                    ToolFailure(tool=tool.id, provider=tool.provider, code="gateway", message=message, origin="gateway", category="definition"),
                )

    def _of_newest_term(self, flights: list[Flight]) -> list[Flight]:
        """Those whose lease is of the newest term among them: of what is older, another holder may have sent it."""
        term = max(flight.term or 0 for flight in flights)
        sent: list[Flight] = []
        for flight in flights:
            if flight.term == term and flight.dispatch and not flight.lost:
                sent.append(flight)
            else:
                self._claims.release(flight)
        return sent

    async def _confirm(self, lane: Lane, flights: list[Flight], *, alone: bool) -> list[Flight]:
        """Those whose lease is confirmed. An unanswered confirm is asked again: it may have been carried out, and then the same one answers.

        Where it does not, because the shard, the run or the lease has changed hands meanwhile, the lease goes back all the same: the store may hold
        it for running, or its outcome for unknown, though nothing was sent.
        """
        batch_id = self._lease_ids()
        leases = [LeaseRef(key=flight.key, lease_id=flight.lease_id, run_id=flight.payer_run, batch_id=batch_id) for flight in flights]
        failures, term = 0, self._shards.term(lane.shard)
        while (answers := await self._receipts.confirm(lane.shard, leases, alone=alone)) is None:
            failures += 1
            await self._clock.sleep(backoff(failures, first=0.05, limit=self._settings.store_timeout))
            term = self._shards.term(lane.shard)
        confirmed: list[Flight] = []
        for flight, answer in zip(flights, answers, strict=True):
            if isinstance(answer, AskDied):
                self._claims.give_back(flight)
                self._hand.failed(flight, dead(flight.tool.id, answer))
                continue
            match answer.state:
                case "confirmed":
                    flight.dispatch, flight.leased_at, flight.term = answer.dispatch, self._clock.monotonic(), term
                    confirmed.append(flight)
                case "halted":
                    self._claims.give_back(flight)
                    self._hand.halted(flight, answer.reason or "halted")
                case "refused":
                    self._shards.refused(lane.shard)
                    self._claims.release(flight)
                case _:
                    self._claims.release(flight)
        return confirmed

    # ---- keeping leases ---------------------------------------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Renew the leases of calls in hand that are about a third of their life old (SPEC 3.3). Unanswered claims of a whole life ago are given
        back, and what could not be given back before.
        """
        self._claims.give_up_doubts(LEASE_RENEWALS * self._settings.receipt_renewal)
        now = self._clock.monotonic()
        due = [
            flight
            for flight in self._hand.flights.values()
            if flight.lease_id
            and flight.stage in {Stage.READY, Stage.SENT, Stage.STORING}
            and now - flight.leased_at >= (self._settings.receipt_renewal if flight.dispatch else self._settings.claim_renewal)
        ]
        for start in range(0, len(due), self._settings.receipt_page):
            page = due[start : start + self._settings.receipt_page]
            leases = [LeaseRef(key=f.key, lease_id=f.lease_id, run_id=f.payer_run, dispatch=f.dispatch) for f in page]
            for flight, lease, held in zip(page, leases, await self._receipts.renew(leases) or [], strict=False):
                if held:
                    flight.leased_at = now
                elif flight.lease_id == lease.lease_id:
                    log.warning("lease_lost", tool=flight.tool.id, receipt=short_digest(flight.key), stage=flight.stage.name)
                    self._lost(flight)
        await self._receipts.release_again()

    def _lost(self, flight: Flight) -> None:
        """The lease is another's. What is not written yet must not be; a result of what was serves its row, and overwrites nothing."""
        if flight.stage is Stage.READY:
            self._flow.unready(flight)
            self._claims.release(flight)
        else:
            flight.lost = True
