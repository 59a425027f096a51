"""The receipts of steps, over the bus: claims and outcomes in pages, each asked for again until it is answered.

A request may come any number of times: a claim that is asked for again is the same claim, by its lease id, and an outcome is stored once. A claim
that nobody waits for any more is given back, for its step was not begun. What no receipt-store answers is asked for alone, so that it holds up no
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import structlog

from rowmill.encoding.receipts import short_digest
from rowmill.errors import AskDied, RowmillError, UnavailableError
from rowmill.runtime.asking import GIVEN_UP_AFTER, AskBus, ReplyT, tries_of
from rowmill.runtime.clock import Clock, backoff
from rowmill.runtime.gathering import Gatherer
from rowmill_contracts.envelope import PAGE_BYTES, Message
from rowmill_contracts.receipts import (
    MAX_ITEMS,
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
    StoreAnswer,
)
from rowmill_contracts.topology import RECEIPTS_CLAIMS, RECEIPTS_SETTLE
from rowmill_row_executor.step_calling import not_begun

log = structlog.get_logger()

_ITEM_BYTES = 400
"""About what one claim or outcome takes beside its output."""

_AGAIN = 5.0
"""Seconds between two requests that were not answered, at most."""

_NOT_STORABLE = StoreAnswer(state="rejected")


class StepLeases(Protocol):
    """Keeps the leases of steps while they run, and the presence that they end with."""

    async def present(self, instead_of: str = "") -> str:
        """The name under which this process is there, known to the receipt-store; another one than ``instead_of``, which has ended."""

    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> AbstractContextManager[None]: ...


class _Item:
    """One request of a page, and who waits for its answer."""

    __slots__ = ("answer", "facts")

    def __init__(self, facts: Any) -> None:
        self.facts = facts
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class BusStepReceipts:
    """``holder``: this process. ``gather``: seconds for which a page waits for more. Drain it before its bus closes."""

    def __init__(self, asks: AskBus, leases: StepLeases, clock: Clock, *, holder: str, gather: float) -> None:
        self._asks = asks
        self._leases = leases
        self._clock = clock
        self._holder = holder
        self._presence = ""

        def pages(flush: Callable[[list[_Item]], Awaitable[None]]) -> Gatherer[_Item]:
            return Gatherer(flush, max_items=MAX_ITEMS, max_age=gather, max_bytes=PAGE_BYTES, size=_size_of)

        self._claims = {confirm: pages(self._claiming(confirm=confirm)) for confirm in (True, False)}
        self._confirms = pages(self._confirm)
        self._completions = pages(self._complete)
        self._failures = pages(self._fail)
        self._releases = pages(self._release)

    # ---- the port ---------------------------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim, *, confirm: bool) -> ClaimAnswer:
        while True:
            presence = self._presence
            if presence:
                answer: ClaimAnswer = await self._ask(self._claims[confirm], claim, self._unheard)
                if answer.state != "refused":
                    return answer
            if self._presence == presence:  # there is none yet, or it has ended: this process was away for too long
                try:
                    self._presence = await self._leases.present(instead_of=presence)
                except UnavailableError:
                    raise
                except Exception as error:
                    return ClaimAnswer(state="failed", failure=not_begun(claim.tool, error))

    async def confirm(self, lease: LeaseRef) -> ConfirmAnswer:
        answer: ConfirmAnswer = await self._ask(self._confirms, lease)
        return answer

    async def complete(self, completion: Completion) -> StoreAnswer:
        answer: StoreAnswer = await self._ask(self._completions, completion)
        return answer

    async def fail(self, failed: FailedCall) -> StoreAnswer:
        answer: StoreAnswer = await self._ask(self._failures, failed)
        return answer

    def give_back(self, failed: FailedCall) -> None:
        self._failures.add(_Item(failed))

    def release(self, lease: LeaseRef) -> None:
        self._releases.add(_Item(lease))

    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> AbstractContextManager[None]:
        return self._leases.keeping(lease, on_lost)

    async def drain(self, within: float | None = None) -> bool:
        """Wait until everything that was handed in is answered; False: it was not ``within`` so many seconds."""
        try:
            async with asyncio.timeout(within):
                for pages in (*self._claims.values(), self._confirms, self._completions, self._failures, self._releases):
                    await pages.drain()
        except TimeoutError:
            return False
        return True

    async def _ask(self, pages: Gatherer[_Item], facts: Any, unheard: Callable[[_Item], None] | None = None) -> Any:
        """``unheard``: told of an answer that came as its asker was cancelled."""
        item = _Item(facts)
        pages.add(item)
        try:
            return await item.answer
        except BaseException:
            if not item.answer.cancel() and unheard is not None:  # a row that was begun by hand is dropped without cancelling what it waits for
                unheard(item)
            raise

    def _unheard(self, item: _Item) -> None:
        answer = item.answer
        if not answer.cancelled() and answer.exception() is None and answer.result().state == "granted":
            self.release(_unsent(item.facts))

    # ---- pages ------------------------------------------------------------------------------------------------------------------------

    def _claiming(self, *, confirm: bool) -> Callable[[list[_Item]], Awaitable[None]]:
        async def flush(items: list[_Item]) -> None:
            items = [item for item in items if not item.answer.done()]
            claims: list[Claim] = [item.facts for item in items]
            request = ClaimReceipts(holder=self._holder, claims=claims, confirm=confirm, presence=self._presence)
            try:
                reply = await self._until_heard(request, RECEIPTS_CLAIMS, ReceiptsClaimed, wanted_by=items, tries=tries_of(items))
            except Exception as error:
                if len(items) > 1:  # one of them may be what nobody survives: it fails alone
                    await asyncio.gather(*(flush([item]) for item in items))
                    return
                for claim in claims:
                    self.release(_unsent(claim))  # for what is known it may be ours
                _tell(items, [ClaimAnswer(state="failed", failure=not_begun(claim.tool, error)) for claim in claims])
                return
            if reply is None:
                for claim in claims:  # each may be ours (there are none where nothing was asked)
                    self.release(_unsent(claim))
                return
            for item, claim, answer in zip(items, claims, reply.answers, strict=True):
                if item.answer.done() and answer.state == "granted":
                    self.release(_unsent(claim))  # who asked is gone
            _tell(items, reply.answers)

        return flush

    async def _confirm(self, items: list[_Item]) -> None:
        request = Confirm(leases=[item.facts for item in items])
        try:
            reply = await self._until_heard(request, RECEIPTS_SETTLE, Confirmed, wanted_by=items, tries=tries_of(items))
        except Exception as error:
            if len(items) > 1:  # likewise
                await asyncio.gather(*(self._confirm([item]) for item in items))
                return
            log.exception("step_not_confirmed", receipt=short_digest(items[0].facts.key))
            _tell_error(items[0], error)
        else:
            _tell(items, [] if reply is None else reply.answers)

    async def _complete(self, items: list[_Item]) -> None:
        await self._settle(items, lambda some: Complete(completions=[item.facts for item in some]), Completed)

    async def _fail(self, items: list[_Item]) -> None:
        await self._settle(items, lambda some: Fail(failures=[item.facts for item in some]), Completed)

    async def _release(self, items: list[_Item]) -> None:
        await self._settle(items, lambda some: Release(leases=[item.facts for item in some]), Released)

    async def _settle(self, items: list[_Item], request: Callable[[list[_Item]], Message], answer: type[Completed | Released]) -> None:
        """Ask until it is answered, and tell; in the end one by one, and then not at all."""
        try:
            reply = await self._until_heard(request(items), RECEIPTS_SETTLE, answer, tries=tries_of(items))
        except Exception:
            if len(items) > 1:
                await asyncio.gather(*(self._settle([item], request, answer) for item in items))
                return
            log.exception("step_given_up", message_type=request(items).message_type, receipt=short_digest(items[0].facts.key))
            _tell(items, [_NOT_STORABLE])
            return
        _tell(items, reply.answers if isinstance(reply, Completed) else [])

    async def _until_heard(
        self, request: Message, key: str, answer: type[ReplyT], *, wanted_by: Sequence[_Item] | None = None, tries: int = GIVEN_UP_AFTER
    ) -> ReplyT | None:
        """Ask until it is answered; None: by then none of ``wanted_by`` waited for it any more.

        Raises `AskDied` at once where they are given, and the last of ``tries`` errors that say more than that nobody answered.

        A process that is short of time, as its loop is where author code holds it, hears answers late. To fail its rows for that would only have them
        done again.
        """
        failures = refusals = 0
        while wanted_by is None or not all(item.answer.done() for item in wanted_by):
            try:
                return await self._asks.ask(request, key, answer)
            except Exception as error:
                failures += 1
                refusals += isinstance(error, AskDied) or not isinstance(error, RowmillError)
                if refusals >= tries or (isinstance(error, AskDied) and wanted_by is not None):
                    raise
                log.warning("steps_not_answered", message_type=request.message_type, failures=failures, error=repr(error))
                await self._clock.sleep(backoff(failures, first=0.1, limit=_AGAIN))
        return None


def _size_of(item: _Item) -> int:
    return _ITEM_BYTES + (len(memoryview(item.facts.output)) if isinstance(item.facts, Completion) else 0)


def _unsent(claim: Claim) -> LeaseRef:
    return LeaseRef(key=claim.key, lease_id=claim.lease_id, run_id=claim.run_id)


def _tell(items: Sequence[_Item], answers: Sequence[object]) -> None:
    for item, answer in zip(items, answers, strict=False):
        if not item.answer.done():
            item.answer.set_result(answer)


def _tell_error(item: _Item, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)
        item.answer.exception()  # who asked may be gone, and then nobody else looks at it
