"""What the executor does with each message."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import structlog

from rowmill.datasets import DatasetProgram
from rowmill.encoding.canonical import row_key_of
from rowmill.errors import CodeChanged, DefinitionError, InputInvalid, NonDeterministicPlay, RowmillError, UnknownName
from rowmill.handles import Handle
from rowmill.paged_handle import PagedHandle
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import new_id
from rowmill.runtime.deliveries import REPLAYED, Delivery, Rejected
from rowmill.runtime.loaded_code import LoadedCode
from rowmill.runtime.rest import working
from rowmill.runtime.suspicion import may_have_crashed
from rowmill.said import said_by
from rowmill_contracts.counts import Problem
from rowmill_contracts.events import AskCode, Control
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.runs import AdvanceRun, ReleaseRun, RunRecord, RunTaken
from rowmill_contracts.topology import EXECUTOR_ADVANCE, EXECUTOR_KEYS, EXECUTOR_ROWS
from rowmill_row_executor.bodies import BodyDriver, Lease
from rowmill_row_executor.capture import Captured, CaptureFailed
from rowmill_row_executor.engine import Captures, Engine, RunStopped
from rowmill_row_executor.failures import RowFailure, problem_of
from rowmill_row_executor.foreign_code import ForeignCode
from rowmill_row_executor.ports import Asker, DatasetOfRun
from rowmill_row_executor.replays import ReplayTicket, is_replayed, send_round
from rowmill_row_executor.row_context import RunBudget
from rowmill_row_executor.row_runner import Lane, RowRunner
from rowmill_row_executor.row_work import RowWork
from rowmill_row_executor.settling import PageTicket
from rowmill_row_executor.stand_in import apart

log = structlog.get_logger()

_WORKED_PAGES = 1000
"""Pages whose end is remembered, so that a lost acknowledgement does not have them worked again."""

_LOOKS = 24
"""How often the lease of a dead executor is looked at while it is waited for."""

_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


class AdvanceHandler:
    """`AdvanceRun`: take the run's lease, run its body. ``lease_patience``: seconds that it is waited for in hand, where that matters."""

    def __init__(self, engine: Engine, driver: BodyDriver, foreign: ForeignCode, *, lease_patience: float) -> None:
        self._engine = engine
        self._driver = driver
        self._foreign = foreign
        self._lease_patience = lease_patience

    async def __call__(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, AdvanceRun):
            raise Rejected(f"{message.message_type} does not belong on {EXECUTOR_ADVANCE}")
        admission = self._engine.admission
        lease_id = new_id()
        taken = await self._taken(delivery, message.run_id, lease_id)
        if taken.outcome == "busy":
            await admission.advance_later(message.run_id, reason=message.reason)
            return
        if taken.outcome != "taken" or taken.run is None:
            log.info("run_not_taken", run_id=message.run_id, outcome=taken.outcome)
            return
        run, lease = taken.run, Lease(message.run_id, taken.term, lease_id, taken.lease_seconds)
        try:
            play, digest = self._engine.code.play(run.play), self._engine.code.digest(run.play)
        except UnknownName as error:
            if run.code_digest is None:
                await self._release(lease, error=problem_of(error))
                return
            digest = ""
        if run.code_digest is not None and run.code_digest != digest:
            await self._other_code(delivery, lease, run)
            return
        await self._driver.drive(play, run, lease, digest, delivery.rest)

    async def _taken(self, delivery: Delivery, run_id: str, lease_id: str) -> RunTaken:
        """The run's lease, or why it cannot be had.

        A message that may have crashed an executor meets the lease of the dead one. Sent round it would come back as a new message, of which nobody
        knows how many it has crashed, and a body that ends its process would do so for ever: it is waited with in hand.
        """
        clock = self._engine.clock
        until = clock.monotonic() + (self._lease_patience if may_have_crashed(delivery) else 0.0)
        while (taken := await self._engine.admission.take(run_id, lease_id=lease_id)).outcome == "busy" and clock.monotonic() < until:
            await clock.sleep(self._lease_patience / _LOOKS)
        return taken

    async def _other_code(self, delivery: Delivery, lease: Lease, run: RunRecord) -> None:
        if await self._foreign.pass_on(delivery, EXECUTOR_ADVANCE):
            await self._release(lease, waiting_for="code")
        else:
            await self._release(lease, error=problem_of(code_changed(run.play)))

    async def _release(self, lease: Lease, *, waiting_for: str | None = None, error: Problem | None = None) -> None:
        await self._engine.admission.release(
            ReleaseRun(
                run_id=lease.run_id,
                term=lease.term,
                lease_id=lease.lease_id,
                outcome="waiting" if error is None else "failed",
                waiting_for=waiting_for,
                error=error,
            )
        )


class RowsHandler:
    """`RowTasks`: run the rows; over when each of them is settled or parked, confirmed."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        captures: Captures,
        runner: RowRunner,
        foreign: ForeignCode,
        on_program: Callable[[DatasetProgram], None],
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._captures = captures
        self._runner = runner
        self._foreign = foreign
        self._on_program = on_program
        self._in_work: dict[str, asyncio.Future[bool]] = {}
        self._worked: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, RowTasks):
            raise Rejected(f"{message.message_type} does not belong on {EXECUTOR_ROWS}")
        under_way = self._in_work.get(delivery.message_id)
        if under_way is not None and await asyncio.shield(under_way):
            return  # delivered again after a lost connection, while it was being worked
        if delivery.deliveries > 1 and delivery.message_id in self._worked:
            return  # or after that, since its acknowledgement was lost with the connection
        over = self._in_work[delivery.message_id] = asyncio.get_running_loop().create_future()
        try:
            await self._work(delivery, message)
            over.set_result(True)
            self._remember(delivery.message_id)
        finally:
            if not over.done():
                over.set_result(False)
            if self._in_work.get(delivery.message_id) is over:
                del self._in_work[delivery.message_id]

    def _remember(self, message_id: str) -> None:
        self._worked[message_id] = None
        while len(self._worked) > _WORKED_PAGES:
            self._worked.popitem(last=False)

    async def _work(self, delivery: Delivery, message: RowTasks) -> None:
        of = DatasetOfRun(message.run_id, message.number, message.org, message.play, message.dataset)
        if not self._foreign.is_ours(message.play, message.code_digest):
            if not await self._foreign.pass_on(delivery, EXECUTOR_ROWS):
                await self._settle_all(of, message, "failed", code_changed(message.play))
            return
        try:
            captured = await self._captures.of(message.run_id, message.dataset, delivery.rest)
        except RunStopped:
            self._runner.stop_run(message.run_id)
            await self._settle_all(of, message, "cancelled")
            return
        except (NonDeterministicPlay, CaptureFailed, InputInvalid, DefinitionError) as error:
            await self._settle_all(of, message, "failed", error)
            return
        lane = self._runner.lane(of) or self._lane(of, message, captured)
        replay = ReplayTicket(len(message.rows), delivery.rest) if is_replayed(delivery) else None
        ticket = replay or PageTicket(len(message.rows), delivery.rest)
        self._runner.submit(lane, message.rows, ticket)
        try:
            await ticket.wait()
        finally:
            self._runner.leave(lane)
        if replay is not None:
            await send_round(self._bus, message, replay, delivery.headers[REPLAYED])

    def _lane(self, of: DatasetOfRun, message: RowTasks, captured: Captured) -> Lane:
        program, options = captured.program, captured.options
        self._on_program(program)
        work = RowWork(
            program,
            Asker(message.run_id, message.org, message.play, message.started_at, message.force),
            self._engine.desk,
            self._engine.clock,
            make_handle=self._handle,
            threads=self._engine.threads,
            steps=self._engine.steps,
            budget=RunBudget(options.budget),
        )
        return Lane(of, work, program.concurrency or options.concurrency)

    def _handle(self, run_id: str, dataset: str) -> Handle:
        return PagedHandle(run_id, dataset, self._engine.sheets)

    async def _settle_all(
        self, of: DatasetOfRun, message: RowTasks, status: Literal["failed", "cancelled"], error: RowmillError | None = None
    ) -> None:
        """Settle every row of a page without running it."""
        ticket = PageTicket(len(message.rows))
        for row in message.rows:
            problem = None if error is None else problem_of(error, row=row.index)
            settled = SettledRow(key=row.key, index=row.index, page=row.page, attempt=row.attempt, status=status, input=row.data, error=problem)
            self._engine.settler.settle(of, settled, ticket)
        await ticket.wait()


class KeysHandler:
    """`KeyPage`: row keys by the author's key function."""

    def __init__(self, captures: Captures, foreign: ForeignCode, bus: Bus) -> None:
        self._captures = captures
        self._foreign = foreign
        self._bus = bus

    async def __call__(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, KeyPage):
            raise Rejected(f"{message.message_type} does not belong on {EXECUTOR_KEYS}")
        run = await self._captures.record_of(message.run_id)
        if run.code_digest is not None and not self._foreign.is_ours(run.play, run.code_digest):
            if not await self._foreign.pass_on(delivery, EXECUTOR_KEYS):
                await self._bus.reply(delivery, PageKeys(error=problem_of(code_changed(run.play))))
            return
        try:
            captured = await self._captures.of(message.run_id, message.dataset, delivery.rest)
            async with working(delivery.rest):
                keys = apart(keys_of, captured.program.key_spec, message)
        except RowFailure as failure:
            await self._bus.reply(delivery, PageKeys(error=problem_of(failure.error, row=failure.row, code="key_failed")))
        except (NonDeterministicPlay, CaptureFailed, InputInvalid, DefinitionError, RunStopped) as error:
            await self._bus.reply(delivery, PageKeys(error=problem_of(error)))
        else:
            await self._bus.reply(delivery, PageKeys(keys=keys))


def keys_of(key: object, page: KeyPage) -> list[str]:
    """The rows' keys, hexadecimal. Raises `RowFailure`, naming the row, for what the function raises and for an empty key."""
    if not callable(key):
        raise DefinitionError(f"dataset {page.dataset!r} has no key function")
    function: Callable[[Any], Any] = key
    called = getattr(function, "__name__", type(function).__name__)
    keys = []
    for index, text in enumerate(page.rows, page.first_index):
        row = None
        try:
            row = _decode_row(text)
            keys.append(row_key_of(function(row), index=index, function=called).hex())
        except BaseException as error:  # author code
            raise RowFailure(None, _told_of_dicts(error, row), row=index) from error
    return keys


def _told_of_dicts(error: BaseException, row: dict[str, Any] | None) -> BaseException:
    """The same error, but that of a function which takes its row for the row model, as columns get it, says what it is."""
    if not isinstance(error, AttributeError) or row is None or error.obj is not row:
        return error
    told = f'{said_by(error)}: key functions get the row as a dict of the input\'s cells, so write row["{error.name}"]'
    return AttributeError(told).with_traceback(error.__traceback__)


class ControlHandler:
    """`Control`: hints that a run was stopped. Nothing depends on their arrival. `AskCode`: which code there is."""

    def __init__(self, runner: RowRunner, code: LoadedCode, bus: Bus) -> None:
        self._runner = runner
        self._code = code
        self._bus = bus

    async def __call__(self, delivery: Delivery) -> None:
        match delivery.message:
            case Control(run_id=run_id, action="stop"):
                self._runner.stop_run(run_id)
            case AskCode() as question if delivery.reply_to:
                await self._bus.send_reply(delivery.reply_to, self._code.shown(question))
            case _:
                pass


def code_changed(play: str) -> CodeChanged:
    return CodeChanged(f"no executor has the code of play {play!r} that this run began with; deploy it again, or start a new run")
