"""After a request: what its ending means for the lane and for each of its flights, stored before anyone is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog

from rowmill.encoding.receipts import short_digest
from rowmill.errors import SecretMissing
from rowmill.runtime.clock import Clock
from rowmill.said import printable
from rowmill.tools import Tool
from rowmill_contracts.receipts import Completion, FailedCall, StoreAnswer
from rowmill_contracts.runs import ProviderServes
from rowmill_contracts.tools import ToolFailure
from rowmill_tool_gateway.credentials import Credentials
from rowmill_tool_gateway.dispatch import Dispatcher
from rowmill_tool_gateway.failures import (
    Decision,
    Defer,
    Fail,
    Halt,
    Observation,
    OutcomeUnknown,
    Refresh,
    Retry,
    RetryPolicy,
    decide,
)
from rowmill_tool_gateway.flights import Flight, Stage
from rowmill_tool_gateway.hand import Hand
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.receipts import Receipts
from rowmill_tool_gateway.results import Ended, Result
from rowmill_tool_gateway.settings import ToolGatewaySettings

log = structlog.get_logger()

KEPT_TRIES = 100_000
"""Calls whose tries are counted. Those that were not heard of for longest are forgotten first, and begin to count anew."""


STEPS = 4
"""In how many steps those come back that are ahead of their turn. Few, since each step costs a look at every page of which a row comes."""
CORRECTED = 0.5
"""How much of what is missing ahead of a lane, or is too much, is made up for at a time: the rest may be on its way."""
SLOWEST = 0.05
"""The least of its rate at which a lane is served, however little it was seen to take."""
BEFOREHAND = 1.5
"""For how much longer rows are called back than until the next time that it is told."""

Serves = Callable[[str, str, Callable[[], ProviderServes | None]], None]
"""Told (organisation, provider, what to tell at any moment) of a provider that serves again and had kept calls waiting elsewhere."""


class Settler:
    """``random``: gives numbers from 0 to 1, for jitter. ``closed``: told of each lane that a provider's answer closes."""

    def __init__(
        self,
        hand: Hand,
        dispatcher: Dispatcher,
        receipts: Receipts,
        credentials: Credentials,
        clock: Clock,
        settings: ToolGatewaySettings,
        random: Callable[[], float],
        serves: Serves,
        closed: Callable[[Lane], None],
    ) -> None:
        self._hand = hand
        self._dispatcher = dispatcher
        self._receipts = receipts
        self._credentials = credentials
        self._clock = clock
        self._settings = settings
        self._random = random
        self._serves = serves
        self._closed = closed
        self._policy = RetryPolicy(settings.call_attempts, settings.retry_first, settings.retry_limit)
        self._refreshing: set[asyncio.Task[None]] = set()
        self._told: dict[tuple[str, str], tuple[float, int]] = {}
        """When it was last told of a lane how its rows are to come back, and how many requests it had begun by then."""
        self._tries: dict[tuple[str, str], int] = {}
        """Tries of a call (receipt key and run) that failed so far. Kept apart from its flight, which ends whenever the call must wait elsewhere."""

    def settle(self, lane: Lane, flights: list[Flight], endings: list[Ended]) -> None:
        """Store how each flight of one request ended, and act on it. An error that nobody foresaw ends the flights that it met."""
        try:
            decisions = [None if isinstance(ended, Result) else self._decide(flight, ended) for flight, ended in zip(flights, endings, strict=True)]
            for flight, decision in zip(flights, decisions, strict=True):
                self._count(flight, decision)
            self._tell_lane(lane, endings, decisions, flights[0].tool.weight)
        except Exception as error:
            for flight in flights:
                self._give_up(flight, error)
            return
        for flight, ended, decision in zip(flights, endings, decisions, strict=True):
            try:
                flight.stage = Stage.STORING
                if isinstance(ended, Result):
                    self._complete(flight, ended)
                elif decision is not None:
                    self._apply(flight, decision)
            except Exception as error:
                self._give_up(flight, error)

    def _give_up(self, flight: Flight, error: Exception) -> None:
        """Its request was sent and nobody knows what to make of the ending: it is charged, and not made again where its effect forbids that."""
        log.error("ending_not_settled", tool=flight.tool.id, receipt=short_digest(flight.key), exc_info=error)
        flight.stage = Stage.STORING
        failure = self._failure(flight, "gateway", f"the gateway failed: {type(error).__name__}", "definition")
        self._apply(flight, OutcomeUnknown(failure) if flight.tool.effect == "non_idempotent" else Fail(failure, charged=True))

    def _decide(self, flight: Flight, seen: Observation) -> Decision:
        tool = flight.tool
        message = self._credentials.redactor.text(seen.message)
        return decide(
            seen if message == seen.message else replace(seen, message=message),
            tool=tool.id,
            provider=tool.provider,
            effect=tool.effect,
            retry_5xx=tool.tool.retry_5xx,
            attempt=self._tries.get((flight.key, flight.payer_run), 0) + 1,
            policy=self._policy,
            jitter=self._random(),
        )

    def _count(self, flight: Flight, decision: Decision | None) -> None:
        if decision is None and not self._tries:
            return
        call = (flight.key, flight.payer_run)
        tries = self._tries.pop(call, 0)
        if isinstance(decision, Retry):
            if len(self._tries) >= KEPT_TRIES:
                del self._tries[next(iter(self._tries))]
            self._tries[call] = tries + 1
        elif tries and (isinstance(decision, Refresh | Halt) or (isinstance(decision, Defer) and decision.failure.status is not None)):
            self._tries[call] = tries  # the provider sent it away, which is no try, and ends no count of them

    def _tell_lane(self, lane: Lane, endings: list[Ended], decisions: list[Decision | None], weight: float) -> None:
        """What one request says about its provider holds for all calls of the lane."""
        now = self._clock.monotonic()
        kinds = {"result" if isinstance(ended, Result) else ended.kind for ended in endings}
        if kinds <= {"never_opened"}:
            lane.missed(now, self._random())
            lane.why = next((decision.failure.code for decision in decisions if decision is not None), "")
        elif kinds - {"never_opened", "misdefined", "no_answer"}:
            lane.reached()
            if all(decision is None or self._closes_for(decision) is None for decision in decisions):
                kept_waiting = lane.kept_waiting
                lane.served(now)
                if kept_waiting:
                    self._serves(lane.org, lane.provider, lambda: self.call_back(lane, weight))
        for decision in decisions:
            seconds = None if decision is None else self._closes_for(decision)
            if seconds is None or decision is None:
                continue
            lane.why = decision.failure.code
            seconds = min(max(seconds, self._settings.retry_first), self._settings.longest_closing)
            if isinstance(decision, Defer) and decision.failure.category == "rate_limited":
                lane.overrun(now, seconds)
            else:
                lane.close(now, seconds)
            self._closed(lane)

    def call_back(self, lane: Lane, weight: float) -> ProviderServes | None:
        """How the rows that wait for this provider are to come back from now on, if it serves: a little before their turn, at the lane's rate, or at
        what it was seen to take since this was last told, if it never ran dry.
        """
        if lane.unavailable_for(self._clock.monotonic()) is not None:
            return None
        now, lead, backlog = self._clock.monotonic(), self._settings.lead, self._dispatcher.backlog(lane)
        per_second = lane.requests_per_second() / weight
        told_at, begun = self._told.get((lane.org, lane.provider), (0.0, 0))
        self._told[lane.org, lane.provider] = (now, lane.begun)
        since_told_last = self._settings.hand / 2 < now - told_at < 2 * self._settings.hand
        if since_told_last and backlog >= max(1.0, per_second * lead * CORRECTED):
            per_second = min(per_second, max((lane.begun - begun) / weight / (now - told_at), per_second * SLOWEST))
        return ProviderServes(
            org=lane.org,
            provider=lane.provider,
            per_second=per_second,
            at_once=round((per_second * lead - backlog) * CORRECTED),
            every=lead / STEPS,
            seconds=BEFOREHAND * self._settings.hand,
        )

    def _closes_for(self, decision: Decision) -> float | None:
        """For how long nobody of the lane need ask; None: not at all."""
        match decision:
            case Defer(wait=wait, failure=failure) if failure.status is not None:
                return self._settings.rejected_wait if wait is None else wait
            case Halt():
                return self._settings.payment_wait
            case Retry(failure=failure) | Fail(failure=failure) | OutcomeUnknown(failure=failure) if failure.status and failure.status >= 500:
                return failure.retry_after  # a 503 that says when to come back says so to all
        return None

    # ---- results ----------------------------------------------------------------------------------------------------------------------

    def _complete(self, flight: Flight, result: Result) -> None:
        cost, payer = flight.cost if result.cost is None else result.cost, flight.payer_run
        completion = Completion(
            key=flight.key,
            lease_id=flight.lease_id,
            dispatch=flight.dispatch,
            output=msgspec.Raw(result.output),
            run_id=flight.payer_run,
            no_result=result.no_result,
            cost=cost,
        )

        def stored(flight: Flight, answer: StoreAnswer) -> None:
            if answer.state == "rejected":
                self._hand.failed(flight, self._failure(flight, "not_storable", "the result cannot be stored", "too_large"))
            else:
                self._hand.completed(flight, result.output, no_result=result.no_result, cost=cost, completed_at=answer.completed_at)
            self._dispatcher.unpaid.freed(payer)

        self._receipts.complete(completion, flight, stored)

    # ---- failures ---------------------------------------------------------------------------------------------------------------------

    def _apply(self, flight: Flight, decision: Decision) -> None:
        match decision:
            case Retry(after=after, failure=failure, charged=charged):
                self._put_back(flight, failure, charged=charged, then=lambda: self._retry(flight, after, failure))
            case Defer(wait=wait, failure=failure):
                self._put_back(flight, failure, charged=False, then=lambda: self._defer(flight, wait, failure))
            case Halt(reason=reason, failure=failure):
                self._put_back(flight, failure, charged=False, then=lambda: self._hand.halted(flight, reason, failure))
            case Refresh(failure=failure):
                task = asyncio.ensure_future(self._refresh(flight, failure))
                self._refreshing.add(task)
                task.add_done_callback(self._refreshing.discard)
            case Fail(failure=failure, charged=charged):
                self._fail(flight, failure, charged=charged)
            case OutcomeUnknown(failure=failure):
                failed = self._failed(flight, failure, charged=True, final=True, outcome_unknown=True)
                self._receipts.fail(failed, flight, lambda flight, _: self._hand.unknown(flight, failure))

    def _fail(self, flight: Flight, failure: ToolFailure, *, charged: bool) -> None:
        payer = flight.payer_run

        def stored(flight: Flight, _: StoreAnswer) -> None:
            self._hand.failed(flight, failure)
            self._dispatcher.unpaid.freed(payer)

        self._receipts.fail(self._failed(flight, failure, charged=charged, final=True), flight, stored)

    def _put_back(self, flight: Flight, failure: ToolFailure, *, charged: bool, then: Callable[[], None]) -> None:
        """Give the dispatched lease back, to be claimed again, before what follows."""
        payer = flight.payer_run

        def stored(flight: Flight, _: StoreAnswer) -> None:
            flight.forget_lease()
            then()
            self._dispatcher.unpaid.freed(payer)

        self._receipts.fail(self._failed(flight, failure, charged=charged, final=False), flight, stored)

    def _failed(self, flight: Flight, failure: ToolFailure, *, charged: bool, final: bool, outcome_unknown: bool = False) -> FailedCall:
        return FailedCall(
            key=flight.key,
            lease_id=flight.lease_id,
            dispatch=flight.dispatch,
            run_id=flight.payer_run,
            failure=failure,
            charged=charged,
            final=final,
            outcome_unknown=outcome_unknown,
        )

    def _retry(self, flight: Flight, after: float, failure: ToolFailure) -> None:
        if after > self._settings.hand:
            self._wait_elsewhere(flight, after, failure)
        else:
            self._dispatcher.try_again(flight, after)

    def _defer(self, flight: Flight, wait: float | None, failure: ToolFailure) -> None:
        earliest = self._settings.rejected_wait if wait is None else wait
        self._wait_elsewhere(flight, flight.lane.appoint(self._clock.monotonic(), earliest, flight.tool.weight), failure)

    def _wait_elsewhere(self, flight: Flight, wait: float, failure: ToolFailure) -> None:
        flight.stage = Stage.WAITING
        self._hand.defer(
            flight, list(flight.calls), wait, reason=f"provider {flight.tool.provider}: {failure.code}".replace("\x00", ""), failure=failure
        )
        self._hand.forget(flight)

    async def _refresh(self, flight: Flight, failure: ToolFailure) -> None:
        """Once per flight: with another credential the call is tried again, with the same one it fails."""
        renewed = False
        if not flight.refreshed:
            flight.refreshed = True
            try:
                renewed = await self._credentials.refresh(flight.tool.tool.provider, flight.credential)
            except SecretMissing as error:
                log.warning("credential_not_refreshed", provider=flight.tool.provider, error=self._credentials.redactor.text(str(error)))
            except Exception:  # the call was refused, and its callers wait
                log.exception("credential_not_refreshed", provider=flight.tool.provider)
        if renewed:
            self._put_back(flight, failure, charged=False, then=lambda: self._dispatcher.try_again(flight, 0.0))
        else:
            self._fail(flight, refused(failure, flight.tool.tool), charged=False)

    def _failure(self, flight: Flight, code: str, message: str, category: str) -> ToolFailure:
        return ToolFailure(tool=flight.tool.id, provider=flight.tool.provider, code=code, message=message, origin="gateway", category=category)


def refused(failure: ToolFailure, tool: Tool) -> ToolFailure:
    """The failure of a call whose credential was refused, with what was sent; what a tool function sent is its author's to say."""
    if failure.origin != "provider" or tool.kind != "http":
        return failure
    auth = tool.provider.auth
    sent = "its provider has no auth=" if auth is None else f"sent: {auth.told}"
    return msgspec.structs.replace(failure, message=printable(f"{failure.message} ({sent})"))
