"""Working one row: its columns in order, each cell reused, computed or skipped; the first error ends the row.

Knows nothing of other rows, of queues, or of when to run.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

import msgspec
import structlog

from rowmill.columns import ColumnSpec
from rowmill.datasets import DatasetProgram
from rowmill.encoding.values import HandleFactory, decode_value, encode_value
from rowmill.errors import Cancelled, RowmillError, Suspended
from rowmill.resolvers import Resolver, Step
from rowmill.rows import OpenRow, ReadSet
from rowmill.runtime.clock import Clock
from rowmill.runtime.ends import being_cancelled
from rowmill.runtime.rest import at_work
from rowmill.steps import run_program
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, NULL
from rowmill_contracts.rows import RowTask, SettledRow
from rowmill_row_executor.cells import CellMeta, KnownCell, decode_known, encode_cells, still_reusable
from rowmill_row_executor.endings import NeighbourAway
from rowmill_row_executor.failures import RowFailure, RowTooLarge, problem_of
from rowmill_row_executor.ports import Asker, CallDesk
from rowmill_row_executor.row_context import RowCalls, RowCtx, Run, RunBudget
from rowmill_row_executor.step_runner import StepRunner

log = structlog.get_logger()

MAX_ROW_BYTES = 1024 * 1024
"""A row's input and output columns together (SPEC 2.11)."""

_LOGGED_TRACEBACKS = 100
"""Different failures of a dataset whose traceback is logged."""

_NO_COST = Decimal(0)
_NO_CELLS: dict[str, KnownCell] = {}
_NEVER_AWAITED = frozenset({str, int, float, bool, type(None), list, dict, Decimal})
_decode_row = msgspec.json.Decoder(dict[str, Any]).decode
_decode = msgspec.json.decode


class RowEnd(Protocol):
    """Knows why a row's task was cancelled."""

    def cancelled(self) -> RowmillError | None:
        """What the row fails with; None: the row is dropped, to be worked again."""


@dataclass(slots=True)
class _Worked:
    """What a row has come to so far. ``values``: cells to keep, encoded. ``changed``: columns with another outcome than the sheet knew."""

    values: dict[str, msgspec.Raw] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    calls: RowCalls | None = None


class RowWork:
    """The columns of one dataset of one run, ready for any number of its rows.

    ``make_handle`` gives handles that are read back from cells. ``threads``: where resolvers run that are declared ``blocking``.
    """

    def __init__(
        self,
        program: DatasetProgram,
        asker: Asker,
        desk: CallDesk,
        clock: Clock,
        *,
        make_handle: HandleFactory,
        threads: Executor,
        steps: StepRunner,
        budget: RunBudget | None = None,
    ) -> None:
        self.program = program
        self.asker = asker
        self._desk = desk
        self._clock = clock
        self._make_handle = make_handle
        self._threads = threads
        self._steps = steps
        self._run = Run(asker.run_id)
        self._budget = budget or RunBudget()
        self._persisted = frozenset(program.persisted)
        self._logged: set[str] = set()
        self._hidden: frozenset[str] = frozenset()

    async def work(self, task: RowTask, end: RowEnd) -> SettledRow:
        """Run the columns over one row. Where its task is cancelled, ``end`` says whether the column that it is at has failed.

        Raises:
            MemoryError: this process's memory is at its limit, which may be another row's doing.
            Parked: the row waits; it is to be run again from its start later.
            NeighbourAway: a neighbour did not answer; likewise.

        """
        worked = _Worked()
        shadows = False
        try:
            values = self._values_of(task)
            shadows = not self._persisted.isdisjoint(values)
            if shadows:
                self._tell_hidden(self._persisted.intersection(values))
            await self._run_columns(task, values, worked, end)
            settled = self._settled(task, worked, shadows=shadows)
            _check_size(task, settled, worked)
        except RowFailure as failure:
            return self._failed(task, worked, failure, shadows=shadows)
        return settled

    def _tell_hidden(self, columns: frozenset[str]) -> None:
        """Once for each set of input columns whose values no one will see, since columns that are computed have their names."""
        if not columns <= self._hidden:
            self._hidden |= columns
            log.warning("input_columns_hidden", dataset=self.program.key, columns=sorted(columns))

    def _values_of(self, task: RowTask) -> dict[str, Any]:
        text = bytes(task.data)
        try:
            values: dict[str, Any] = _decode_row(text)
            return values if b'"$' not in text else {name: decode_value(value, name, handle=self._make_handle) for name, value in values.items()}
        except (msgspec.DecodeError, RowmillError) as error:
            raise RowFailure(None, error) from error

    async def _run_columns(self, task: RowTask, values: dict[str, Any], worked: _Worked, end: RowEnd) -> None:
        try:
            row = OpenRow(values, self.program.shape)
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # validators of the author's row model may raise anything
            raise RowFailure(None, error) from error
        known = _NO_CELLS if task.known == EMPTY_OBJECT else decode_known(task.known)
        ctx: RowCtx | None = None
        for column in self.program.columns:
            name = column.name
            cell = known.get(name)
            if cell is not None and still_reusable(cell, worked.changed):
                row.put(name, decode_value(_decode(cell.value), name, handle=self._make_handle))
                worked.values[name] = cell.value
                worked.meta[name] = {**cell.meta, "status": "cached"}
                continue
            if ctx is None and (column.resolver.takes_context or column.resolver.program is not None):
                caller = f"{self.program.key}/{task.key}"
                worked.calls = RowCalls(self.asker, self._desk, self._steps, caller, self._clock, task.asked, self._make_handle)
                ctx = RowCtx(worked.calls, self._run, self._budget)
            value, encoded = await self._compute(column, row, ctx, worked, end)
            row.put(name, value)
            if name in self._persisted:
                worked.values[name] = encoded
            if known and (cell is None or cell.value != encoded):
                worked.changed.add(name)

    async def _compute(self, column: ColumnSpec, row: OpenRow, ctx: RowCtx | None, worked: _Worked, end: RowEnd) -> tuple[Any, msgspec.Raw]:
        """The column's value as the columns after it see it, and as it is stored (encoded now: later columns may change what it refers to)."""
        reads = ReadSet()
        view = row.view(reads)
        meta = CellMeta(status="completed", version=column.version)
        if column.persisted:
            worked.meta[column.name] = meta
        resolver = column.resolver
        if worked.calls is not None:
            worked.calls.column = column.name
        try:
            if column.run_if is not None and not await _awaited(column.run_if(view)):
                meta.status = "skipped"
                value = column.else_value
            elif resolver.program is not None:
                outcome = await run_program(resolver.program, view, ctx, self._call_step)
                meta.note(outcome)
                value = outcome.value
            elif resolver.blocking:
                value = await self._in_thread(resolver, view, ctx)
            else:
                value = resolver.start(view, ctx)
                if type(value) not in _NEVER_AWAITED and hasattr(value, "__await__"):
                    value = await value
            if worked.calls is not None:
                worked.calls.check()
            encoded = msgspec.Raw(encode_cells(encode_value(value, column.name)))
            meta.completed_at = now = round(self._clock.now(), 3)
            if column.stale_after is not None and (expiry := column.expiry_after(value)) is not None:
                meta.stale_at = now + expiry
        except (Suspended, Cancelled, KeyboardInterrupt, GeneratorExit, NeighbourAway, MemoryError):
            raise
        except BaseException as error:  # whatever author code raises, SystemExit too, is this row's
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                cancelled = end.cancelled()
                if cancelled is None:
                    raise
                meta.status = "failed"
                raise RowFailure(column.name, cancelled) from error
            if worked.calls is not None and worked.calls.parked is not None:
                raise worked.calls.parked from error  # it follows from having been parked
            meta.status = "failed"
            meta.completed_at = round(self._clock.now(), 3)
            raise RowFailure(column.name, error) from error
        finally:
            meta.reads = reads.columns
            if worked.calls is not None:
                worked.calls.account(meta)
        return value, encoded

    async def _call_step(self, step: Step, seen: Any, ctx: Any) -> Any:
        within = ctx.of_step(step)
        if step.resolver.blocking:
            return await self._in_thread(step.resolver, seen, within)
        return await _awaited(step.resolver.start(seen, within))

    async def _in_thread(self, resolver: Resolver, view: Any, ctx: Any) -> Any:
        with at_work():
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, resolver.start, view, ctx)

    def _failed(self, task: RowTask, worked: _Worked, failure: RowFailure, *, shadows: bool) -> SettledRow:
        problem = problem_of(failure.error, column=failure.column, row=task.index)
        digest = problem.traceback_digest or ""
        if digest not in self._logged and len(self._logged) < _LOGGED_TRACEBACKS:
            self._logged.add(digest)
            log.warning("row_failed", dataset=self.program.key, column=failure.column, row=task.index, traceback=digest, exc_info=failure.error)
        name = failure.column
        if name is not None and name in worked.meta:
            meta = worked.meta[name]
            if not isinstance(meta, CellMeta):
                meta = worked.meta[name] = CellMeta()
            meta.status, meta.error = "failed", problem
            worked.values[name] = NULL
        return self._settled(task, worked, shadows=shadows, error=problem)

    def _settled(self, task: RowTask, worked: _Worked, *, shadows: bool, error: Problem | None = None) -> SettledRow:
        paid = worked.calls.paid if worked.calls is not None else None
        return SettledRow(
            key=task.key,
            index=task.index,
            page=task.page,
            attempt=task.attempt,
            status="completed" if error is None else "failed",
            input=task.data,
            values=msgspec.Raw(encode_cells(worked.values)),
            meta=msgspec.Raw(encode_cells(worked.meta)),
            shadows=shadows,
            error=error,
            calls=len(paid) if paid else 0,
            cost=sum(paid.values(), _NO_COST) if paid else _NO_COST,
        )


def _check_size(task: RowTask, settled: SettledRow, worked: _Worked) -> None:
    size = len(memoryview(task.data)) + len(memoryview(settled.values))
    if size > MAX_ROW_BYTES:
        largest = max(worked.values, key=lambda name: len(memoryview(worked.values[name])), default=None)
        raise RowFailure(largest, RowTooLarge(f"the row has {size} bytes, more than {MAX_ROW_BYTES}; its largest column is {largest!r}"))


async def _awaited(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value
