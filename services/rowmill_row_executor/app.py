"""The row executor, wired."""

from __future__ import annotations

from typing import ClassVar

import structlog

from rowmill.runtime import deadlines
from rowmill.runtime.author_threads import AuthorThreads
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.loaded_code import LoadedCode
from rowmill_contracts.topology import CONTROL, EXECUTOR_ADVANCE, EXECUTOR_KEYS, EXECUTOR_ROWS
from rowmill_row_executor.admission_port import BusAdmission
from rowmill_row_executor.bodies import BodyDriver
from rowmill_row_executor.calls import BusCallDesk
from rowmill_row_executor.code import PlayCode, ProjectCode
from rowmill_row_executor.engine import Captures, Engine
from rowmill_row_executor.foreign_code import ForeignCode
from rowmill_row_executor.handlers import AdvanceHandler, ControlHandler, KeysHandler, RowsHandler
from rowmill_row_executor.leases import LeaseThread, owners_of
from rowmill_row_executor.loop_watch import LoopWatch
from rowmill_row_executor.presence import Presence
from rowmill_row_executor.row_runner import RowRunner
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_row_executor.settling import BusSettler
from rowmill_row_executor.sheets import SheetPages
from rowmill_row_executor.step_receipts import BusStepReceipts
from rowmill_row_executor.step_runner import StepRunner

log = structlog.get_logger()

_AUTHOR_CODE = "author code"
"""Gate of the queues whose handlers run it: what it does to its process is held against the suspect in hand (docs/adr/0024)."""

_LAST_OUTCOMES = 2.0
"""Seconds for which a process that stops waits for the receipt-store to hear what it cuts off. Leases of steps end with its presence, if later."""


class App:
    """Runs bodies and rows of the project's plays. ``code``: the plays, where they are not a project's (tests)."""

    name: ClassVar[str] = "row-executor"

    def __init__(self, settings: RowExecutorSettings | None = None, *, code: PlayCode | None = None) -> None:
        self._settings = settings or RowExecutorSettings()
        self._code = code
        self._clock = SystemClock()
        self._bus = Bus(self._settings, service=self.name)
        self._threads = AuthorThreads(self._settings.blocking_threads)
        self._desk = BusCallDesk(self._bus, self._settings, self._clock)
        self._leases = LeaseThread(lambda: owners_of(self._settings), self._clock)
        self._steps = BusStepReceipts(
            self._bus,
            Presence(self._leases, self._clock, renewal=self._settings.step_renewal),
            self._clock,
            holder=f"{self.name} {self._bus.process_id}",
            gather=self._settings.page_gather,
        )
        self._watch = LoopWatch(self._clock, limit=self._settings.hold_warning)
        self._runner: RowRunner | None = None
        self._bus.before_close(self._drop_work)

    async def start(self) -> None:
        """Load the author's code, connect, consume. Raises `ProjectError` for code that cannot be loaded."""
        settings, bus, clock = self._settings, self._bus, self._clock
        code, loaded_at = self._code or loaded(settings), clock.now()
        engine = Engine(
            admission=BusAdmission(bus),
            desk=self._desk,
            sheets=SheetPages(bus),
            settler=BusSettler(bus, page_gather=settings.page_gather),
            clock=clock,
            code=code,
            threads=self._threads,
            steps=StepRunner(
                self._steps,
                clock,
                self._threads,
                hold=settings.step_hold,
                patience=settings.step_patience,
                again=settings.step_again,
                body_limit=settings.body_timeout,
                row_limit=settings.row_timeout,
            ),
        )
        self._runner = RowRunner(
            engine.settler, clock, rows_at_once=settings.rows_at_once, row_timeout=settings.row_timeout, loop_slice=settings.loop_slice
        )
        foreign = ForeignCode(engine.code, bus, clock, patience=settings.foreign_code_patience)
        captures = Captures(engine, settings)
        driver = BodyDriver(engine, self._leases, drop_patience=settings.body_drop_patience, body_timeout=settings.body_timeout)
        await bus.start()
        self._leases.start()
        self._watch.start()
        self._desk.start()
        self._runner.start()
        control = ControlHandler(self._runner, LoadedCode(self.name, bus.process_id, loaded_at, code.digest), bus)
        await bus.consume(f"control.{bus.process_id}", control, broadcast=(CONTROL, ""))
        capture, drop = settings.capture_timeout, settings.body_drop_patience
        keys_held = deadlines.keys(settings, capture_timeout=capture, drop_patience=drop)
        keys = KeysHandler(captures, foreign, bus)
        await bus.consume(EXECUTOR_KEYS, keys, prefetch=settings.keys_prefetch, watched=True, gate=_AUTHOR_CODE, deadline=keys_held)
        rows_held = deadlines.rows(settings, capture_timeout=capture, drop_patience=drop, row_timeout=settings.row_timeout)
        rows = RowsHandler(bus, engine, captures, self._runner, foreign, self._watch.know)
        await bus.consume(EXECUTOR_ROWS, rows, prefetch=settings.rows_prefetch, watched=True, gate=_AUTHOR_CODE, deadline=rows_held)
        advance = AdvanceHandler(engine, driver, foreign, lease_patience=settings.lease_patience)
        await bus.consume(EXECUTOR_ADVANCE, advance, prefetch=settings.bodies_prefetch, watched=True, gate=_AUTHOR_CODE, deadline=deadlines.BODIES)

    async def stop(self) -> None:
        """Let rows and bodies in hand finish, to the drain deadline; the rest is delivered to others. Rows whose calls nobody answers are parked."""
        self._desk.leave()
        await self._bus.stop()
        await self._desk.stop()
        await self._watch.stop()
        await self._leases.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _drop_work(self) -> None:
        """Drop what is still in hand, and hand in what that leaves of its steps."""
        if self._runner is not None:
            await self._runner.stop()
        if self._bus.connected and not await self._steps.drain(within=_LAST_OUTCOMES):
            log.warning("steps_not_handed_in", detail="no receipt-store answered; their leases end with this process's presence")

    @property
    def ready(self) -> bool:
        return self._bus.ready


def loaded(settings: RowExecutorSettings) -> ProjectCode:
    code = ProjectCode(settings.project)
    code.load()
    return code
