"""Talking to the receipt-store in pages: claims per shard, outcomes over all shards, each answered to who handed it in.

Owns the persistence latch (SPEC 3.9): while an outcome cannot be stored, or the broker is away, `storing` is false and nothing new may be
dispatched. Outcomes are asked for again until they are stored, and releases until they were heard: a lease that ends by itself leaves a charge, or
an outcome that nobody knows, where nothing was sent. Claims are not asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from rowmill.encoding.receipts import short_digest
from rowmill.errors import AskDied, RowmillError
from rowmill.runtime.asking import AskBus, tries_of
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.gathering import Gatherer
from rowmill_contracts.envelope import PAGE_BYTES
from rowmill_contracts.receipts import (
    Claim,
    ClaimAnswer,
    ClaimReceipts,
    Complete,
    Completed,
    Completion,
    Confirm,
    ConfirmAnswer,
    Confirmed,
    Fail,
    FailedCall,
    LeaseRef,
    ReceiptsClaimed,
    Release,
    Released,
    Renew,
    Renewed,
    StoreAnswer,
)
from rowmill_contracts.tools import ToolFailure
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE
from rowmill_tool_gateway.flights import Flight

log = structlog.get_logger()

OutcomeT = TypeVar("OutcomeT", Completion, FailedCall)
OnClaimed = Callable[[Flight, ClaimAnswer | None], None]
"""Told the answer to a claim or look-up; None: the store did not answer, and the lease may or may not be ours."""
OnStored = Callable[[Flight, StoreAnswer], None]
OnReleased = Callable[[Flight], None]
Confirmations = Sequence[ConfirmAnswer | AskDied] | None
"""Of leases, in their order: `AskDied` for one that no store survives; None where the store did not answer."""
Confirming = tuple[list[LeaseRef], asyncio.Future[Confirmations]]
"""The leases of one request, and who waits to hear of them."""

_STORED = StoreAnswer(state="stored")

UNHEARD_RELEASES = 10_000
"""Releases without an answer that are remembered; the oldest are forgotten first."""

_NOT_STORABLE = StoreAnswer(state="rejected")


class Receipts:
    """``holder``: this process. ``term_of``: the term of a shard's lease, None where it is not held. ``connected``: whether there is a session with
    the broker. ``storing_again``: told when the latch opens.
    """

    def __init__(
        self,
        asks: AskBus,
        *,
        holder: str,
        clock: Clock,
        term_of: Callable[[int], int | None],
        connected: Callable[[], bool],
        storing_again: Callable[[], None],
        page: int,
        gather: float,
        timeout: float,
    ) -> None:
        self._asks = asks
        self._holder = holder
        self._clock = clock
        self._term_of = term_of
        self._connected = connected
        self._storing_again = storing_again
        self._page = page
        self._gather = gather
        self._timeout = timeout
        self._failing = 0
        self._reconnected = asyncio.Event()
        self._claims: dict[tuple[int, bool, bool], Gatherer[tuple[Claim, Flight, OnClaimed]]] = {}
        self._confirms: dict[int, Gatherer[Confirming]] = {}
        self._completions: Gatherer[tuple[Completion, Flight, OnStored]] = Gatherer(
            self._complete, max_items=page, max_age=gather, max_bytes=PAGE_BYTES, size=lambda item: len(item[0].output) + 200
        )
        self._failures: Gatherer[tuple[FailedCall, Flight, OnStored]] = Gatherer(self._fail, max_items=page, max_age=gather)
        self._releases: Gatherer[tuple[LeaseRef, Flight, OnReleased]] = Gatherer(self._release, max_items=page, max_age=gather)
        self._unheard: deque[LeaseRef] = deque(maxlen=UNHEARD_RELEASES)

    @property
    def storing(self) -> bool:
        """Outcomes can be stored, as far as is known."""
        return not self._failing and self._connected()

    def reconnected(self) -> None:
        """There is a new session: outcomes that wait to be asked for again go now."""
        self._reconnected.set()
        self._reconnected = asyncio.Event()

    # ---- claims -----------------------------------------------------------------------------------------------------------------------

    def claim(self, shard: int, claim: Claim, flight: Flight, answered: OnClaimed, *, confirm: bool) -> None:
        self._gatherer(shard, confirm=confirm, only_cached=False).add((claim, flight, answered))

    def look(self, shard: int, claim: Claim, flight: Flight, answered: OnClaimed) -> None:
        """Ask for what is stored, claiming nothing."""
        self._gatherer(shard, confirm=False, only_cached=True).add((claim, flight, answered))

    def _gatherer(self, shard: int, *, confirm: bool, only_cached: bool) -> Gatherer[tuple[Claim, Flight, OnClaimed]]:
        key = (shard, confirm, only_cached)
        gatherer = self._claims.get(key)
        if gatherer is None:

            async def flush(items: list[tuple[Claim, Flight, OnClaimed]]) -> None:
                answers = await self._ask_claims(shard, [item[0] for item in items], confirm=confirm, only_cached=only_cached)
                for (_, flight, answered), answer in zip(items, answers, strict=True):
                    _tell(answered, flight, answer)

            gatherer = self._claims[key] = Gatherer(
                flush, max_items=self._page, max_age=self._gather, max_bytes=PAGE_BYTES, size=lambda item: 300 + len(item[0].caller)
            )
        return gatherer

    async def _ask_claims(self, shard: int, claims: list[Claim], *, confirm: bool, only_cached: bool) -> Sequence[ClaimAnswer | None]:
        term = self._term_of(shard)
        if term is None and not only_cached:
            return [ClaimAnswer(state="refused")] * len(claims)
        request = ClaimReceipts(
            holder=self._holder,
            claims=claims,
            shard=None if only_cached else shard,
            term=term,
            confirm=confirm,
            only_cached=only_cached,
            counts_deaths=True,
        )
        try:
            reply = await self._asks.ask(request, RECEIPTS_CLAIMS, ReceiptsClaimed, timeout=self._timeout)
        except AskDied as error:
            if len(claims) > 1:  # one of them is what no store survives; the others are nobody's fault
                asked = (self._ask_claims(shard, [claim], confirm=confirm, only_cached=only_cached) for claim in claims)
                return [answer for [answer] in await asyncio.gather(*asked)]
            return [ClaimAnswer(state="failed", failure=dead(claim.tool, error)) for claim in claims]
        except RowmillError as error:
            log.warning("claims_unanswered", shard=shard, claims=len(claims), error=str(error))
            return [None] * len(claims)
        except Exception:  # whatever it is, those who wait for these claims are told
            log.exception("claims_unanswered", shard=shard, claims=len(claims))
            return [None] * len(claims)
        if len(reply.answers) != len(claims):
            log.error("claims_misaligned", claims=len(claims), answers=len(reply.answers))
            return [None] * len(claims)
        return reply.answers

    async def confirm(self, shard: int, leases: list[LeaseRef], *, alone: bool = False) -> Confirmations:
        """Confirm the leases of one request right before it is sent, together with what else is confirmed at that moment. ``alone``: nothing
        goes beside it here.
        """
        if alone:
            return await self._ask_confirmed(shard, leases, alone=True)
        gatherer = self._confirms.get(shard)
        if gatherer is None:  # an item is a request with its leases: it is these that a page is measured by
            gatherer = self._confirms[shard] = Gatherer(
                partial(self._confirm, shard), max_items=self._page, max_age=self._gather, max_bytes=self._page, size=lambda item: len(item[0])
            )
        answers: list[ConfirmAnswer | AskDied] = []
        for start in range(0, len(leases), self._page):
            told: asyncio.Future[Confirmations] = asyncio.get_running_loop().create_future()
            gatherer.add((leases[start : start + self._page], told))
            part = await told
            if part is None:
                return None
            answers += part
        return answers

    async def _confirm(self, shard: int, items: list[Confirming]) -> None:
        """Ask for several requests in one message, and tell each."""
        try:
            answers = await self._ask_confirmed(shard, [lease for leases, _ in items for lease in leases], alone=False)
        except Exception as error:  # whatever it is, each of them is told
            for _, told in items:
                if not told.done():
                    told.set_exception(error)
            return
        start = 0
        for leases, told in items:
            end = start + len(leases)
            if not told.done():
                told.set_result(None if answers is None else answers[start:end])
            start = end

    async def _ask_confirmed(self, shard: int, leases: list[LeaseRef], *, alone: bool) -> Confirmations:
        request = Confirm(leases=leases, shard=shard, term=self._term_of(shard), alone=alone)
        try:
            reply = await self._asks.ask(request, RECEIPTS_SETTLE, Confirmed, timeout=self._timeout)
        except AskDied as error:
            if len(leases) == 1:
                return [error]
            parts = await asyncio.gather(*(self._ask_confirmed(shard, [lease], alone=alone) for lease in leases))
            return None if None in parts else [answer for part in parts if part is not None for answer in part]
        except RowmillError as error:
            log.warning("confirm_unanswered", shard=shard, leases=len(leases), error=str(error))
            return None
        return reply.answers if len(reply.answers) == len(leases) else None

    async def renew(self, leases: list[LeaseRef]) -> list[bool] | None:
        """Whether each lease is still held, and renewed; None where the store did not answer."""
        try:
            reply = await self._asks.ask(Renew(leases=leases), RECEIPTS_SETTLE, Renewed, timeout=self._timeout)
        except RowmillError as error:
            log.warning("renewal_unanswered", leases=len(leases), error=str(error))
            return None
        return reply.held if len(reply.held) == len(leases) else None

    # ---- outcomes ---------------------------------------------------------------------------------------------------------------------

    def complete(self, completion: Completion, flight: Flight, stored: OnStored) -> None:
        """Store a result; ``stored`` is told once it is, however long that takes."""
        self._completions.add((completion, flight, stored))

    def fail(self, failed: FailedCall, flight: Flight, stored: OnStored) -> None:
        """Store a failure, likewise."""
        self._failures.add((failed, flight, stored))

    async def _complete(self, items: list[tuple[Completion, Flight, OnStored]]) -> None:
        await self._store(items, lambda some: Complete(completions=[item[0] for item in some]))

    async def _fail(self, items: list[tuple[FailedCall, Flight, OnStored]]) -> None:
        await self._store(items, lambda some: Fail(failures=[item[0] for item in some]))

    async def _store(self, items: list[tuple[OutcomeT, Flight, OnStored]], request: Callable[[list[Any]], Complete | Fail]) -> None:
        """Ask until they are stored, and tell. The latch is closed from the first failure on. An outcome with which asking ends in an error that
        nobody foresaw is asked for alone, and given up in the end, so that it holds up no others.
        """
        closed = False

        def failed() -> None:
            nonlocal closed
            self._failing += not closed
            closed = True

        try:
            answers = await self._answered(lambda: request(items), failed, tries=tries_of(items))
            if answers is None and len(items) > 1:
                await asyncio.gather(*(self._store([item], request) for item in items))
                return
            if answers is None:
                log.error("outcome_given_up", tool=items[0][1].tool.id, receipt=short_digest(items[0][1].key))
            elif len(answers) != len(items):
                log.error("outcomes_misaligned", outcomes=len(items), answers=len(answers))
                answers = [_STORED] * len(items)
            for (_, flight, stored), answer in zip(items, answers or [_NOT_STORABLE], strict=True):
                _tell(stored, flight, answer)
        finally:
            self._failing -= closed
            if closed and not self._failing:
                log.info("outcomes_stored_again", outcomes=len(items))
                self._storing_again()

    async def _answered(self, request: Callable[[], Complete | Fail], failed: Callable[[], None], *, tries: int) -> Sequence[StoreAnswer] | None:
        """What the store answers, however long that takes. None: ``tries`` ended in dead letters or unforeseen errors. ``failed``: told of each
        failure.
        """
        failures = unforeseen = 0
        while True:
            try:
                return (await self._asks.ask(request(), RECEIPTS_SETTLE, Completed, timeout=self._timeout)).answers
            except AskDied as error:
                log.warning("outcomes_died", failures=failures + 1, error=str(error))
                unforeseen += 1
            except RowmillError as error:
                log.warning("outcomes_not_stored", failures=failures + 1, error=str(error))
            except Exception:
                log.exception("outcomes_not_stored", failures=failures + 1)
                unforeseen += 1
            failures += 1
            failed()
            if unforeseen >= tries:
                return None
            await self._pause(backoff(failures, first=0.1, limit=self._timeout))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._reconnected.wait()

    # ---- releasing --------------------------------------------------------------------------------------------------------------------

    def release(self, lease: LeaseRef, flight: Flight, released: OnReleased) -> None:
        """Give a lease back that nothing was or will be sent for: a queued one (dispatch 0), or a confirmed one under its dispatch number.

        ``released`` is told once it is, or once it was not answered: then `release_again` goes on with it.
        """
        self._releases.add((lease, flight, released))

    async def _release(self, items: list[tuple[LeaseRef, Flight, OnReleased]]) -> None:
        leases = [item[0] for item in items]
        if not await self._heard(leases):
            self._unheard.extend(leases)
        for _, flight, released in items:
            _tell(released, flight)

    async def release_again(self) -> None:
        """Give back what could not be given back before, as far as the store answers."""
        while self._unheard:
            leases = [self._unheard.popleft() for _ in range(min(self._page, len(self._unheard)))]
            if not await self._heard(leases):
                self._unheard.extend(leases)
                return

    async def _heard(self, leases: list[LeaseRef]) -> bool:
        """Whether these releases need not be asked for again."""
        try:
            await self._asks.ask(Release(leases=leases), RECEIPTS_SETTLE, Released, timeout=self._timeout)
        except AskDied:
            if len(leases) > 1:  # one of them is what no store survives
                return all(await asyncio.gather(*(self._heard([lease]) for lease in leases)))
            log.exception("release_given_up", receipt=short_digest(leases[0].key))
        except RowmillError as error:
            log.warning("leases_not_released", leases=len(leases), error=str(error))
            return False
        except Exception:  # whatever it is, their flights go on
            log.exception("leases_not_released", leases=len(leases))
            return False
        return True

    async def drain(self) -> None:
        """Wait until everything that was handed in is answered."""
        await asyncio.gather(
            *(gatherer.drain() for gatherer in self._claims.values()), self._completions.drain(), self._failures.drain(), self._releases.drain()
        )


def dead(tool: str, error: AskDied) -> ToolFailure:
    """Nothing was sent: the call failed before it was made."""
    return ToolFailure(tool=tool, code="dead_lettered", message=str(error), origin="receipts", category="dead_lettered")


def _tell(told: Callable[..., None], *facts: object) -> None:
    """One flight's trouble is not that of its page's other flights; its callers are deferred by the hand's sweep."""
    try:
        told(*facts)
    except Exception:
        log.exception("flight_failed")
