"""What the gateway has in hand: pages of calls, joined into flights, each call answered once and in time.

Owns single flight within this process and what each ending of a flight means for each of its callers. Which flight is sent when is the
dispatcher's; storing is the settler's.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from decimal import Decimal
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog

from rowmill.encoding.receipts import short_digest
from rowmill.runtime.clock import Clock
from rowmill_contracts.envelope import NULL
from rowmill_contracts.receipts import ClaimAnswer
from rowmill_contracts.tools import CallOutcome, ToolCalls, ToolFailure
from rowmill_tool_gateway.answers import Answers
from rowmill_tool_gateway.flights import Call, Flight, Page, Stage
from rowmill_tool_gateway.groups import Group
from rowmill_tool_gateway.lanes import Lane
from rowmill_tool_gateway.toolbox import PreparedTool, Toolbox
from rowmill_tool_gateway.unpaid import Unpaid

log = structlog.get_logger()

_KEY = re.compile(r"[0-9a-f]{64}\Z")
FORCES_TOOLS = frozenset({"tools", "all"})


class Dispatch(Protocol):
    """What the hand asks of the dispatcher."""

    @property
    def unpaid(self) -> Unpaid: ...

    def give_up(self, call: Call, flight: Flight, failure: ToolFailure, stored: Callable[[], None]) -> None: ...

    def place(self, org: str, tool: PreparedTool) -> tuple[Lane, Group[Flight]]: ...

    def admit(self, flight: Flight) -> None: ...

    def stays(self, call: Call, flight: Flight) -> bool: ...

    def expire(self, call: Call, flight: Flight) -> None: ...


class Hand:
    """``hold``: how long a call waits before its request is sent, or half as long again where its turn is near then. ``sent_hold``: how long its page
    is held once it was; then ``sent_again``. ``longest_wait``: how long a call is deferred at a time, at most, while nobody knows when its
    provider serves again; ``scout_after``: how long at least those are deferred that find out.
    """

    dispatch: Dispatch

    def __init__(
        self,
        toolbox: Toolbox,
        answers: Answers,
        clock: Clock,
        *,
        hold: float,
        sent_hold: float,
        sent_again: float,
        longest_wait: float,
        scout_after: float,
    ) -> None:
        self.flights: dict[str, Flight] = {}
        self._toolbox = toolbox
        self._answers = answers
        self._clock = clock
        self._hold = hold
        self._sent_hold = sent_hold
        self._sent_again = sent_again
        self._longest_wait = longest_wait
        self._scout_after = scout_after
        self._pages: dict[Page, None] = {}
        self._of_shard: Counter[int] = Counter()

    def busy(self, shard: int) -> bool:
        """Whether flights of that shard are in hand."""
        return self._of_shard[shard] > 0

    @property
    def pages(self) -> int:
        return len(self._pages)

    # ---- taking calls -----------------------------------------------------------------------------------------------------------------

    def take(self, message: ToolCalls, reply_to: str) -> Page:
        """Take a page of calls; its ``done`` is set once each of them is answered."""
        now = self._clock.monotonic()
        page = Page(
            run_id=message.run_id,
            org=message.org,
            started_at=message.started_at,
            forced=message.force in FORCES_TOOLS,
            reply_to=reply_to,
            arrived=now,
            done=asyncio.get_running_loop().create_future(),
            unsent=len(message.calls),
        )
        self._pages[page] = None
        page.done.add_done_callback(lambda _: self._over(page))
        if not message.calls:
            page.done.set_result(None)
        deadline = now + self._hold
        page.calls = [Call(page, item, deadline) for item in message.calls]
        for call in page.calls:
            try:
                self._join(call)
            except Exception as error:  # one call that nobody foresaw must not hold its page, or the others of it
                log.exception("call_not_taken", tool=call.item.tool)
                if call.flight is not None:
                    self.forget(call.flight)
                self._fail(call, "", _own_failure(call.item.tool, "", "gateway", f"the gateway failed: {type(error).__name__}", "definition"))
        return page

    def _over(self, page: Page) -> None:
        self._pages.pop(page, None)
        page.calls = []  # they know their page: together they would stay until the collector comes, which is seldom

    def _join(self, call: Call) -> None:
        item = call.item
        flight = self.flights.get(item.receipt_key)
        if flight is None:
            if _KEY.match(item.receipt_key) is None:  # the receipt-store would refuse the whole page of claims
                self._fail(call, "", _own_failure(item.tool, "", "receipt_key", f"{item.receipt_key[:80]!r} is no receipt key", "definition"))
                return
            tool = self._toolbox.find(item.tool)
            if tool is None:
                known = ", ".join(self._toolbox.known()) or "none"
                self._fail(call, item.tool, _own_failure(item.tool, "", "unknown_tool", f"unknown tool {item.tool!r}; known: {known}", "definition"))
                return
            lane, group = self.dispatch.place(call.page.org, tool)
            flight = self.flights[item.receipt_key] = Flight(item.receipt_key, tool, lane, group, item.asked or self._clock.now(), item.input)
            self._of_shard[lane.shard] += 1
            flight.calls.append(call)
            call.flight = flight
            self.dispatch.admit(flight)
        else:
            flight.calls.append(call)
            call.flight = flight

    # ---- how flights end --------------------------------------------------------------------------------------------------------------

    def completed(self, flight: Flight, output: bytes, *, no_result: bool, cost: Decimal, completed_at: float | None) -> None:
        """The flight's own request gave this, and it is stored."""
        result = msgspec.Raw(output)
        for call in flight.calls:
            live = call.is_asked_by(flight.payer_run, flight.payer_row)
            self._answer(
                call,
                "no_result" if no_result else "completed",
                flight,
                result=result,
                execution="live" if live else "in_flight",
                cost=cost if live else Decimal(0),
                completed_at=completed_at,
            )
        self.forget(flight)

    def served(self, flight: Flight, stored: ClaimAnswer) -> None:
        """A stored output serves the payer, and whoever asks on the same terms or whose run started before it was stored."""
        left: list[Call] = []
        payer = flight.calls[0]
        for call in flight.calls:
            recent = stored.completed_at is not None and stored.completed_at >= call.page.started_at
            if not (call is payer or recent or call.asks_as(payer)):
                left.append(call)
                continue
            live = call.is_asked_by(stored.run_id, stored.caller)
            self._answer(
                call,
                "no_result" if stored.no_result else "completed",
                flight,
                result=stored.output,
                execution="live" if live else "cache",
                cost=stored.cost if live else Decimal(0),
                completed_at=stored.completed_at,
            )
        self._go_on(flight, left)

    def failed(self, flight: Flight, failure: ToolFailure) -> None:
        """A failure is kept for the payer's run (SPEC 3.6); callers of other runs try for themselves."""
        for call in flight.calls:
            if call.page.run_id == flight.payer_run:
                self._fail(call, flight.key, failure)
        self._go_on(flight, [call for call in flight.calls if not call.answered])

    def halted(self, flight: Flight, reason: str, failure: ToolFailure | None = None) -> None:
        """The payer's run must not spend; a caller of another run takes over (SPEC 3.4)."""
        for call in flight.calls:
            if call.page.run_id == flight.payer_run:
                self._answer(call, "halted", flight, reason=reason, failure=failure)
        self._go_on(flight, [call for call in flight.calls if not call.answered])

    def unpaid(self, flight: Flight, reason: str) -> None:
        """The payer's run waits for its budget; a caller of another run takes over, as where it is halted."""
        ours = [call for call in flight.calls if call.page.run_id == flight.payer_run]
        self.defer(flight, ours, self.dispatch.unpaid.away(), reason=reason)
        self._go_on(flight, list(flight.calls))

    def unknown(self, flight: Flight, failure: ToolFailure | None) -> None:
        """Nobody knows whether an earlier request had its effect, so nobody repeats it."""
        for call in flight.calls:
            self._answer(call, "unknown", flight, failure=failure)
        self.forget(flight)

    def defer(self, flight: Flight, calls: Iterable[Call], wait: float, *, reason: str, failure: ToolFailure | None = None) -> None:
        """These calls wait elsewhere. ``failure``: why the provider keeps them waiting; with it, a call that waits for too long fails.

        Too long is what its tool allows in all (SPEC 4.4), or, of a provider that does not serve, what the call itself allows (a leg of a
        waterfall, SPEC 1.3). Waiting for one's turn, also at a provider that is closed for a moment, or for our own services, is no reason to give a
        leg up.

        Of a provider that has not served for long nobody knows when it will. One call is asked for again as soon as the lane opens, to find out, and
        others after it, ever more seldom; the rest wait until they are called back, and for ``longest_wait`` at most.
        """
        now, lane = self._clock.now(), flight.lane
        unserved, closed = lane.unavailable_for(self._clock.monotonic()), lane.closed_for(self._clock.monotonic())
        given_up: list[tuple[Call, ToolFailure]] = []
        for call in list(calls):
            if failure is None:
                self._answer(call, "deferred", flight, wait_ms=math.ceil(wait * 1000), reason=reason)
                continue
            waited = now - (call.item.asked or now)
            left = leg = flight.tool.tool.max_wait - waited
            if unserved is not None and call.item.max_wait is not None:
                leg = min(left, call.item.max_wait - min(waited, unserved))
            if wait > left or closed > leg:
                why = msgspec.structs.replace(failure, code="provider_unavailable", category="unavailable", retryable=False)
                given_up.append((call, why))
                continue
            wait_for = min(wait, max(leg, self._scout_after))  # its turn may come later than it would be given up
            if unserved is not None and unserved > self._hold:
                scouts = lane.takes_scout(self._clock.monotonic(), self._scout_after, min(self._longest_wait, leg))
                wait_for = min(wait + self._longest_wait, leg) if scouts is None else scouts
                lane.kept_waiting |= wait_for > self._hold
                lane.waited_for(self._clock.monotonic() + wait_for)
            away, provider = unserved is not None, flight.tool.provider
            self._answer(call, "deferred", flight, wait_ms=math.ceil(wait_for * 1000), reason=reason, provider=provider, away=away)
        self._give_up(flight, given_up)
        flight.calls = [call for call in flight.calls if call.flight is flight and not call.answered]
        if not flight.calls and flight.stage not in {Stage.SENT, Stage.STORING}:
            self.forget(flight)

    def _give_up(self, flight: Flight, given_up: list[tuple[Call, ToolFailure]]) -> None:
        """Fail calls for their runs, which is stored before they are answered: a redelivery must not call again (SPEC 3.6). Not stored where another
        of the run's calls goes on waiting for the same: that one may well be made.
        """
        for call, _ in given_up:
            call.flight = None
        patient = {call.page.run_id for call in flight.calls if call.flight is flight}
        for call, failure in given_up:
            answer = partial(self._fail, call, flight.key, failure)
            if call.page.run_id in patient:
                answer()
            else:
                self.dispatch.give_up(call, flight, failure, answer)

    def forget(self, flight: Flight) -> None:
        """The flight is over; an equal call that comes now starts another."""
        if flight.stage is not Stage.OVER:
            flight.stage = Stage.OVER
            flight.calls = []
            flight.end_alone()
            self.dispatch.unpaid.leave(flight)
            self._of_shard[flight.lane.shard] -= 1
            if self.flights.get(flight.key) is flight:
                del self.flights[flight.key]

    def _go_on(self, flight: Flight, left: list[Call]) -> None:
        if left:
            flight.start_anew(left)
            self.dispatch.admit(flight)
        else:
            self.forget(flight)

    def _fail(self, call: Call, key: str, failure: ToolFailure) -> None:
        outcome = CallOutcome(call_id=call.item.call_id, outcome="failed", failure=failure, receipt=short_digest(key))
        self._answers.answer(call, outcome)

    def _answer(self, call: Call, outcome: Any, flight: Flight, *, result: msgspec.Raw = NULL, **facts: Any) -> None:
        self._answers.answer(call, CallOutcome(call_id=call.item.call_id, outcome=outcome, result=result, receipt=flight.key[:12], **facts))

    # ---- in time ----------------------------------------------------------------------------------------------------------------------

    def sweep(self, early: float) -> None:
        """Let go of calls that would wait longer than the hand holds them. ``early``: seconds until the next sweep."""
        now = self._clock.monotonic() + early
        for page in list(self._pages):
            if page.arrived + self._hold > now:
                break  # pages stand in order of arrival
            let_go = self._carried_by_lease if page.arrived + self._sent_hold <= now else self._overdue
            for call in page.calls:
                if call.deadline <= now:
                    self._let_go(call, let_go)

    def put_down(self, shards: Container[int] | None = None) -> None:
        """Defer everything whose request was not sent: of these shards, which go to another gateway, or all, since the process ends."""
        for page in list(self._pages):
            for call in page.calls:
                if shards is None or (call.flight is not None and call.flight.lane.shard in shards):
                    self._let_go(call, self.dispatch.expire)

    def _overdue(self, call: Call, flight: Flight) -> None:
        if not self.dispatch.stays(call, flight):
            self.dispatch.expire(call, flight)

    def _let_go(self, call: Call, let_go: Callable[[Call, Flight], None]) -> None:
        """Let go of a call that is not answered. One with which that fails is asked for again, and keeps no other in hand."""
        flight = call.flight
        if call.answered or flight is None:
            return
        try:
            let_go(call, flight)
        except Exception:
            log.exception("call_not_let_go", tool=flight.tool.id, receipt=short_digest(flight.key), stage=flight.stage.name)
            self.defer(flight, [call], self._hold, reason="the gateway failed")

    def _carried_by_lease(self, call: Call, flight: Flight) -> None:
        """A page is not held for longer; the request goes on, and its outcome is stored without anyone waiting."""
        log.info("call_outlives_page", tool=flight.tool.id, receipt=short_digest(flight.key), stage=flight.stage.name)
        self.defer(flight, [call], self._sent_again, reason="in flight")


def _own_failure(tool: str, provider: str, code: str, message: str, category: str) -> ToolFailure:
    return ToolFailure(tool=tool, provider=provider, code=code, message=message, origin="gateway", category=category)
