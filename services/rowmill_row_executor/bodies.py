"""Driving a play's body: run it from the top under the run's lease, until it ends or can only wait; then say so and let go.

A body that waits is dropped, not kept: whatever ends its wait has it run again. Its calls answer from the record until it is where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from rowmill.encoding.values import encode_value
from rowmill.errors import RowmillError
from rowmill.plays import Play
from rowmill.runtime.clock import Clock
from rowmill.runtime.rest import Rest, working
from rowmill_contracts.counts import Problem
from rowmill_contracts.runs import ReleaseRun, RunRecord
from rowmill_row_executor.body_calls import BodyCalls, LeaseLost
from rowmill_row_executor.body_context import BodyContext
from rowmill_row_executor.dataset_calls import DatasetFailed
from rowmill_row_executor.failures import problem_of
from rowmill_row_executor.ports import Admission, Asker, CallDesk, RowSource
from rowmill_row_executor.replay import Replay
from rowmill_row_executor.stand_in import apart
from rowmill_row_executor.step_runner import StepRunner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to drive a run. ``seconds``: how long it lasts after each renewal."""

    run_id: str
    term: int
    lease_id: str
    seconds: float


class LeaseKeeper(Protocol):
    """Renews leases while something is done under them."""

    def keeping(self, lease: Lease, on_lost: Callable[[], None]) -> AbstractContextManager[None]:
        """Renew the lease inside the ``with`` block. ``on_lost`` is called on this loop once somebody else has the run."""


class BodyExited(RowmillError):
    """A play's body ended the process (``sys.exit``); that fails the run instead."""

    code = "play_failed"


class BodyTimeout(RowmillError):
    """A play's body neither ended nor asked its context for anything for too long: it waits for something that the record cannot hold."""

    code = "body_timeout"


class World(Protocol):
    """What bodies work with."""

    @property
    def admission(self) -> Admission: ...

    @property
    def desk(self) -> CallDesk: ...

    @property
    def sheets(self) -> RowSource: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def steps(self) -> StepRunner: ...


def begin(
    world: World,
    play: Play[Any, Any],
    run: RunRecord,
    *,
    term: int,
    code_digest: str,
    wanted: str | None = None,
    rest: Rest | None = None,
) -> tuple[BodyContext, asyncio.Task[Any]]:
    """Start a body from the top, over what is on record. ``term`` 0: read-only, up to the dataset ``wanted``. Raises `InputInvalid`.

    ``rest``: of a suspect, whose body is watched.
    """
    inputs = {staged.field: staged.input_id for staged in run.inputs}
    given = apart(play.read_input, msgspec.json.decode(run.input) or {}, inputs)  # author code's validators
    calls = BodyCalls(run.run_id, term, Replay(run.calls), world.admission)
    ctx = BodyContext(
        calls,
        Asker(run.run_id, run.org, run.play, run.started_at, run.options.force),
        desk=world.desk,
        admission=world.admission,
        sheets=world.sheets,
        steps=world.steps,
        clock=world.clock,
        options=run.options,
        code_digest=code_digest,
        wanted=wanted,
    )

    async def body() -> Any:
        try:
            return await play.start(ctx, given)
        except SystemExit as error:
            raise BodyExited(f"the body ended the process: SystemExit({error.code!r})") from error

    return ctx, asyncio.create_task(body() if rest is None else rest.watch(body()), name=f"body of {run.run_id}")


async def until_it_stands(ctx: BodyContext, body: asyncio.Task[Any], limit: float | None = None) -> None:
    """Wait until the body has ended or stands still.

    Raises:
        BodyTimeout: for ``limit`` seconds it did neither, nor anything else that its context would see (said within twice the limit).

    """
    still = asyncio.create_task(ctx.calls.standing_still())
    seen = -1
    try:
        while not (await asyncio.wait([body, still], timeout=limit, return_when=asyncio.FIRST_COMPLETED))[0]:
            if ctx.calls.moves == seen >= 0:
                raise BodyTimeout(
                    f"the play's body ran for longer than {limit:g} s without an end and without asking its context for anything; "
                    "waiting is for ctx.call and the datasets, which can be waited for on record"
                )
            seen = ctx.calls.moves
    finally:
        still.cancel()
        await asyncio.gather(still, return_exceptions=True)


async def drop(ctx: BodyContext, body: asyncio.Task[Any], patience: float) -> None:
    """End a body where it stands. What it does about that (``finally``, ``except CancelledError``) reaches nobody."""
    ctx.calls.end()
    body.cancel()
    done, _ = await asyncio.wait([body], timeout=patience)
    if not done:
        log.warning("body_goes_on", run_id=ctx.run.id, detail="it was dropped, but does not end; its calls have no effect any more")
    elif not body.cancelled():
        body.exception()  # looked at, so that asyncio does not log it


class BodyDriver:
    """Drives bodies of runs whose lease was taken."""

    def __init__(self, world: World, leases: LeaseKeeper, *, drop_patience: float, body_timeout: float | None = None) -> None:
        self._world = world
        self._leases = leases
        self._drop_patience = drop_patience
        self._body_timeout = body_timeout

    async def drive(self, play: Play[Any, Any], run: RunRecord, lease: Lease, code_digest: str, rest: Rest | None = None) -> None:
        """Run the body until it ends or waits, and release the run with what it came to. ``rest``: as for `begin`.

        Raises:
            UnavailableError: a neighbour did not answer. The run was not released; its body is to be run again.

        """
        try:
            async with working(rest):
                ctx, body = begin(self._world, play, run, term=lease.term, code_digest=code_digest, rest=rest)
        except RowmillError as error:
            await self._release(lease, error=problem_of(error))
            return
        calls = ctx.calls
        try:
            with self._leases.keeping(lease, calls.lease_lost):
                await until_it_stands(ctx, body, self._body_timeout)
                if calls.lost:
                    log.warning("run_lease_lost", run_id=run.run_id, term=lease.term)
                elif calls.outage is not None:
                    raise calls.outage
                elif calls.fatal is not None:
                    await self._release(lease, error=problem_of(calls.fatal))
                elif body.done():
                    await self._ended(lease, calls, body)
                else:
                    await self._waits(lease, calls)
        except BodyTimeout as error:
            log.warning("body_times_out", run_id=run.run_id)
            await self._release(lease, error=problem_of(error))
        except LeaseLost:
            log.warning("run_lease_lost", run_id=run.run_id, term=lease.term)
        finally:
            await drop(ctx, body, self._drop_patience)

    async def _ended(self, lease: Lease, calls: BodyCalls, body: asyncio.Task[Any]) -> None:
        try:
            output = msgspec.Raw(msgspec.json.encode(encode_value(body.result(), "output")))
            calls.check_all_met("its end")
        except DatasetFailed as error:
            await self._release(lease, error=error.problem)
        except BaseException as error:  # whatever author code raises is its own; nothing is waited for here
            log.warning("play_failed", run_id=lease.run_id, exc_info=error)
            await self._release(lease, error=problem_of(error, code="play_failed"))
        else:
            await self._world.admission.release(
                ReleaseRun(run_id=lease.run_id, term=lease.term, lease_id=lease.lease_id, outcome="completed", output=output)
            )

    async def _waits(self, lease: Lease, calls: BodyCalls) -> None:
        await calls.write()
        if calls.again_ms is not None:
            await self._world.admission.advance_later(lease.run_id, reason=calls.waiting_for[0], wait_ms=calls.again_ms)
        await self._world.admission.release(
            ReleaseRun(
                run_id=lease.run_id,
                term=lease.term,
                lease_id=lease.lease_id,
                outcome="waiting",
                waiting_for=_told(calls.waiting_for),
            )
        )

    async def _release(self, lease: Lease, *, error: Problem) -> None:
        await self._world.admission.release(ReleaseRun(run_id=lease.run_id, term=lease.term, lease_id=lease.lease_id, outcome="failed", error=error))


def _told(waiting_for: Sequence[str]) -> str:
    """What a body waits for, each once; of what a person has to see to, the first."""
    told: dict[str, str] = {}
    for what in waiting_for:
        told.setdefault("halted" if what.startswith("halted:") else what, what)
    return ", ".join(told.values())
