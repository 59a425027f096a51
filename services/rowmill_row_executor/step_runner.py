"""Running steps on receipts: claimed, run under a lease, stored; or answered by what is stored, here or elsewhere."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import msgspec
import structlog

from rowmill.encoding.receipts import short_digest
from rowmill.errors import RowmillError, StepFailed, Suspended, UnavailableError
from rowmill.runtime.clock import Clock, new_id
from rowmill.runtime.rest import at_work, watched
from rowmill_contracts.receipts import Claim, ClaimAnswer, Completion, FailedCall, LeaseRef
from rowmill_contracts.tools import CallOutcome, ToolFailure
from rowmill_row_executor.ports import Asker, StepReceipts
from rowmill_row_executor.step_calling import StepCall, encoded, enter, failure_of, not_begun, raised

log = structlog.get_logger()

_SHORTEST_POLL = 0.001

_LAST_WORD = 1.0
"""Seconds for which a process whose memory is at its limit waits, before it ends, for a step's lease to go back."""


class StepExited(RowmillError):
    """A step's function ended the process (``sys.exit``); that fails the step instead."""

    code = "step_failed"


class StepRunner:
    """``hold``: seconds for which a step that another run has is waited for in hand; ``again``: after how many it is then looked at again.
    ``patience``: the same for a step that this run has itself. Its executor is dead, or the message was delivered again while it is worked. Sent
    round, it would come back as a new message, of which nobody knows how many executors it has crashed: a step that ends its process would do so for
    ever.
    ``body_limit``, ``row_limit``: seconds that a step of a body and of a row may take.
    """

    def __init__(
        self,
        receipts: StepReceipts,
        clock: Clock,
        threads: Executor,
        *,
        hold: float,
        patience: float,
        again: float,
        body_limit: float,
        row_limit: float,
    ) -> None:
        self._receipts = receipts
        self._clock = clock
        self._threads = threads
        self._hold = hold
        self._patience = patience
        self._again = again
        self._body_limit = body_limit
        self._row_limit = row_limit

    async def run(self, asker: Asker, step: StepCall, *, run_term: int | None = None) -> CallOutcome:
        """How the step ended, or what it waits for (``deferred``, ``halted``). ``run_term``: of the body that has the step.

        Raises `UnavailableError` where this process stops.
        """
        limit = self._row_limit if run_term is None else self._body_limit
        since = self._clock.monotonic()
        while True:
            lease_id = new_id()
            answer = await self._receipts.claim(_claim(asker, step, lease_id, run_term), confirm=step.effect != "non_idempotent")
            if answer.state == "granted":
                lease = LeaseRef(key=step.key, lease_id=lease_id, run_id=asker.run_id, dispatch=answer.dispatch)
                ended = await self._begun(step, lease, limit)
                if ended is not None:
                    return ended
                since = self._clock.monotonic()
                continue
            ended = _answered(step, answer)
            if ended is not None:
                return ended
            left = since + (self._patience if answer.run_id == asker.run_id else self._hold) - self._clock.monotonic()
            if left <= 0:
                return _outcome(step, "deferred", wait_ms=int(1000 * self._again), reason=f"step {step.id} is run elsewhere")
            await self._clock.sleep(min(max(answer.wait_ms / 1000, _SHORTEST_POLL), left))

    async def _begun(self, step: StepCall, lease: LeaseRef, limit: float) -> CallOutcome | None:
        """Run a step whose lease is ours, confirmed first where it was not; None: the lease is lost."""
        if lease.dispatch:
            return await self._under_lease(step, lease, limit)
        try:
            confirmed = await self._receipts.confirm(lease)
        except BaseException as error:
            self._receipts.release(lease)
            if isinstance(error, UnavailableError) or not isinstance(error, Exception):
                raise
            return _outcome(step, "failed", failure=not_begun(step.tool, error))
        match confirmed.state:
            case "confirmed":
                return await self._under_lease(step, msgspec.structs.replace(lease, dispatch=confirmed.dispatch), limit)
            case "halted":
                self._receipts.release(lease)
                return _outcome(step, "halted", reason=confirmed.reason or "halted")
        self._receipts.release(lease)
        return None

    async def _under_lease(self, step: StepCall, lease: LeaseRef, limit: float) -> CallOutcome | None:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[Any] = loop.create_future()
        with self._receipts.keeping(lease, lambda: _said(lost)):
            work = loop.create_task(watched(self._called(step)), name=f"step {step.id}")
            either: set[asyncio.Future[Any]] = {work, lost}
            try:
                await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    failure = _failure(step, work)
                    return await (self._completed(step, lease, work.result()) if failure is None else self._failed(step, lease, failure))
                if lost.done():
                    log.warning("step_lease_lost", step=step.id, run_id=lease.run_id)
                    return None
                return await self._overdue(step, lease, failure_of(step, "step_timeout", f"step {step.id!r} took longer than {limit:g} s"))
            except BaseException as error:
                if not work.done() or work.cancelled() or _is_no_failure(work.exception()):
                    await self._cut_off(_cut_off(step, lease), now=isinstance(error, MemoryError))
                raise
            finally:
                lost.cancel()
                if not work.done():
                    work.cancel()
                    work.add_done_callback(_looked_at)

    async def _cut_off(self, cut_off: FailedCall, *, now: bool) -> None:
        """``now``: whoever hears of it next may end the process."""
        if not now:
            self._receipts.give_back(cut_off)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await self._receipts.fail(cut_off)

    async def _called(self, step: StepCall) -> bytes:
        """The function's result, as it is stored."""
        enter(step)
        try:
            if step.blocking:
                with at_work():
                    value = await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, step.function)
            else:
                value = step.function()
            if inspect.isawaitable(value):
                value = await value
        except SystemExit as error:
            raise StepExited(f"its function ended the process: SystemExit({error.code!r})") from error
        return encoded(step, value)

    async def _completed(self, step: StepCall, lease: LeaseRef, output: bytes) -> CallOutcome:
        completion = Completion(key=lease.key, lease_id=lease.lease_id, dispatch=lease.dispatch, output=msgspec.Raw(output), run_id=lease.run_id)
        answer = await self._receipts.complete(completion)
        if answer.state == "rejected":
            return _outcome(step, "failed", failure=failure_of(step, "too_large", f"the result of step {step.id!r} cannot be stored"))
        return _outcome(step, "completed", result=msgspec.Raw(output), completed_at=answer.completed_at)

    async def _failed(self, step: StepCall, lease: LeaseRef, failure: ToolFailure) -> CallOutcome:
        await self._receipts.fail(
            FailedCall(key=lease.key, lease_id=lease.lease_id, dispatch=lease.dispatch, run_id=lease.run_id, failure=failure, charged=False)
        )
        return _outcome(step, "failed", failure=failure)

    async def _overdue(self, step: StepCall, lease: LeaseRef, failure: ToolFailure) -> CallOutcome:
        """Its function was begun, and one in a thread goes on: whether it has its effect is not known."""
        if step.effect != "non_idempotent":
            return await self._failed(step, lease, failure)
        await self._receipts.fail(_cut_off(step, lease, failure))
        return _outcome(step, "unknown")


def _claim(asker: Asker, step: StepCall, lease_id: str, run_term: int | None) -> Claim:
    return Claim(
        key=step.key,
        lease_id=lease_id,
        run_id=asker.run_id,
        tool=step.tool,
        effect=step.effect,
        started_at=asker.started_at,
        caller=step.caller,
        force=step.force,
        fresh_for=step.stale_after,
        org=asker.org,
        run_term=run_term,
        counted=False,
    )


def _answered(step: StepCall, answer: ClaimAnswer) -> CallOutcome | None:
    """What is said of a step whose lease is not ours; None: it is another's."""
    match answer.state:
        case "completed":
            return _outcome(step, "completed", result=answer.output, completed_at=answer.completed_at)
        case "failed":
            return _outcome(step, "failed", failure=answer.failure)
        case "unknown":
            return _outcome(step, "unknown")
        case "halted" | "over_budget":
            return _outcome(step, "halted", reason=answer.reason or "halted")
        case _:
            return None


def _outcome(step: StepCall, outcome: Any, **facts: Any) -> CallOutcome:
    return CallOutcome(call_id="", outcome=outcome, receipt=short_digest(step.key), **facts)


def _failure(step: StepCall, work: asyncio.Task[bytes]) -> ToolFailure | None:
    """What the function failed of; None: of nothing. Raises what is no failure of its own."""
    if work.cancelled():  # by itself: nobody else did
        return failure_of(step, StepFailed.code, f"step {step.id!r} failed: its function was cancelled")
    error = work.exception()
    if error is None:
        return None
    if _is_no_failure(error):
        raise error
    return raised(step, error)


def _is_no_failure(error: BaseException | None) -> bool:
    """Whether what a function raised is none of its own: the process's memory, which may be another's doing, or its end."""
    return isinstance(error, MemoryError | KeyboardInterrupt | Suspended)


def _cut_off(step: StepCall, lease: LeaseRef, failure: ToolFailure | None = None) -> FailedCall:
    """The function did not come to its end, or nobody knows that it did."""
    return FailedCall(
        key=lease.key,
        lease_id=lease.lease_id,
        dispatch=lease.dispatch,
        run_id=lease.run_id,
        failure=failure or failure_of(step, "cut_off", f"step {step.id!r} was cut off"),
        outcome_unknown=step.effect == "non_idempotent",
        charged=False,
        final=False,
    )


def _said(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def _looked_at(work: asyncio.Task[bytes]) -> None:
    """Whatever it still came to: looked at, so that asyncio does not log it."""
    if not work.cancelled():
        work.exception()
