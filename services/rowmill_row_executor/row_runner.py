"""The row runner: takes rows in turn from all datasets that have some, runs them, hands in what they came to.

Rows that never wait are run by hand, one after the other, without a task: a task per row would cost as much as the row. Rows that wait get a task
each. Which of the two a dataset's rows are is found out from its first rows, and corrected when a later one waits after all.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context

import structlog

from rowmill.datasets import DatasetProgram
from rowmill.errors import RowmillError
from rowmill.runtime.clock import Clock
from rowmill.runtime.limits import end_process
from rowmill_contracts.rows import RowTask, SettledRow
from rowmill_contracts.runs import ParkedRow
from rowmill_row_executor.endings import Parked
from rowmill_row_executor.failures import RowTimeout, problem_of
from rowmill_row_executor.fairness import RoundRobin
from rowmill_row_executor.ports import DatasetOfRun, Settler, Ticket
from rowmill_row_executor.row_ends import CANCELLED_BY_HAND, RowCancelled
from rowmill_row_executor.row_work import RowWork
from rowmill_row_executor.stand_in import StandIn

log = structlog.get_logger()

_STOPPED_RUNS = 10_000
"""Runs of which it is remembered that they were stopped; the stop is stored with their owner, this only saves work."""


_STOP_SECONDS = 5.0
"""How long rows may take to unwind when the process stops."""


class Lane:
    """Rows of one dataset of one run in this process.

    ``limit``: rows at once, None for no limit. ``waits``: whether its rows wait for something; None while that is not known.
    """

    __slots__ = ("limit", "of", "pages", "running", "waits", "work")

    def __init__(self, of: DatasetOfRun, work: RowWork, limit: int | None) -> None:
        self.of = of
        self.work = work
        self.limit = limit
        self.running = 0
        self.pages = 0
        self.waits: bool | None = None if _may_wait(work.program) else False


class _Working:
    """A row that is worked in a task. ``since``: when it began, on the clock's monotonic time.

    ``over``: its time is over, so its task was cancelled. ``given_up``: it was settled without it. ``dropped`` says whether rows are dropped, to be
    worked again elsewhere.
    """

    __slots__ = ("dropped", "given_up", "lane", "limit", "over", "row", "since", "ticket")

    def __init__(self, lane: Lane, row: RowTask, ticket: Ticket, since: float, limit: float, dropped: Callable[[], bool]) -> None:
        self.lane = lane
        self.row = row
        self.ticket = ticket
        self.since = since
        self.limit = limit
        self.dropped = dropped
        self.over = False
        self.given_up = False

    def timeout(self) -> RowTimeout:
        return RowTimeout(f"the row was worked for longer than {self.limit:g} s without an end")

    def cancelled(self) -> RowmillError | None:
        if self.over:
            return self.timeout()
        return None if self.dropped() else RowCancelled()


class RowRunner:
    """Runs rows of any number of datasets. `start` it on the loop that its rows run on."""

    def __init__(
        self,
        settler: Settler,
        clock: Clock,
        *,
        rows_at_once: int,
        row_timeout: float,
        loop_slice: float,
        out_of_memory: Callable[[], object] = lambda: end_process("memory_limit_reached"),
    ) -> None:
        self._settler = settler
        self._clock = clock
        self._rows_at_once = rows_at_once
        self._loop_slice = loop_slice
        self._lanes: dict[DatasetOfRun, Lane] = {}
        self._ready: RoundRobin[Lane, tuple[RowTask, Ticket]] = RoundRobin()
        self._row_timeout = row_timeout
        self._out_of_memory = out_of_memory
        self._tasks: dict[asyncio.Task[None], _Working] = {}
        self._given_up: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopped: OrderedDict[str, None] = OrderedDict()
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    def start(self) -> None:
        self._stand_in = StandIn()
        self._keep_going("row runner", self._run_rows)
        self._keep_going("row deadlines", self._watch_time)

    def _keep_going(self, name: str, loop: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run one of the runner's loops, and begin it anew should it end: without it no row would be worked again, and nobody would notice."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if self._dropping() or isinstance(error, KeyboardInterrupt | SystemExit):
                return
            log.error("row_loop_ended", loop=name, detail="it is begun anew", exc_info=error)
            self._keep_going(name, loop)
            self._wake.set()

        task = self._loops[name] = asyncio.create_task(loop(), name=name)
        task.add_done_callback(ended)

    def _dropping(self) -> bool:
        """Whether rows are dropped: this process stops them, or ends, which cancels all tasks at once."""
        return self._stopping or all(task.cancelling() for task in self._loops.values())

    async def stop(self) -> None:
        """Drop every row that is not settled; their pages were not acknowledged."""
        self._stopping = True
        tasks = [*self._tasks, *self._loops.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, going_on = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
            if going_on:
                log.warning("rows_go_on", rows=len(going_on), detail="author code swallows its cancellation; it ends with the process")
            self._stand_in.end()

    def lane(self, of: DatasetOfRun) -> Lane | None:
        """The dataset's lane, if it has rows here."""
        return self._lanes.get(of)

    def submit(self, lane: Lane, rows: Sequence[RowTask], ticket: Ticket) -> None:
        """Run these rows when it is their turn; ``ticket`` is told of each."""
        self._lanes[lane.of] = lane
        lane.pages += 1
        self._ready.add(lane, [(row, ticket) for row in rows])
        self._wake.set()

    def leave(self, lane: Lane) -> None:
        """A page of the lane is over."""
        lane.pages -= 1
        if not lane.pages:
            self._lanes.pop(lane.of, None)

    def stop_run(self, run_id: str) -> None:
        """Settle the run's rows that were not begun as cancelled, from now on."""
        self._stopped[run_id] = None
        self._stopped.move_to_end(run_id)
        while len(self._stopped) > _STOPPED_RUNS:
            self._stopped.popitem(last=False)

    # ---- running ----------------------------------------------------------------------------------------------------------------------

    async def _run_rows(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            since = self._clock.monotonic()
            while self._ready and len(self._tasks) < self._rows_at_once:
                lane, (row, ticket) = self._ready.take()
                try:
                    self._begin(lane, row, ticket)
                except MemoryError:
                    self._out_of_memory()
                except Exception as error:  # of the engine: that page is worked again, and all others go on
                    log.exception("row_not_worked", dataset=lane.of.dataset, row=row.index)
                    ticket.fail(error)
                if self._clock.monotonic() - since > self._loop_slice:
                    await asyncio.sleep(0)
                    since = self._clock.monotonic()

    def _begin(self, lane: Lane, row: RowTask, ticket: Ticket) -> None:
        if lane.of.run_id in self._stopped:
            self._settler.settle(lane.of, _cancelled(row), ticket)
        elif lane.waits is False and ticket.rest is None:
            self._by_hand(lane, row, ticket)
        else:
            self._in_a_task(lane, row, ticket)

    def _by_hand(self, lane: Lane, row: RowTask, ticket: Ticket) -> None:
        """Run a row to its end here. Where it waits after all, begin it anew in a task: only there author code's timeouts and groups work."""
        working = lane.work.work(row, CANCELLED_BY_HAND)
        context = copy_context()
        self._stand_in.enter()
        try:
            context.run(working.send, None)
        except StopIteration as end:
            self._settler.settle(lane.of, end.value, ticket)
        except Parked as parked:
            self._park(lane, row, ticket, parked)
        except MemoryError:
            self._out_of_memory()
        except Exception as error:
            log.exception("row_not_worked", dataset=lane.of.dataset, row=row.index)
            ticket.fail(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # author code's, where nobody foresaw any: it must not end the loop of all rows
            self._settler.settle(lane.of, _failed(row, error), ticket)
        else:
            lane.waits = True
            context.run(_drop, working)
            self._in_a_task(lane, row, ticket)
        finally:
            self._stand_in.leave()

    def _in_a_task(self, lane: Lane, row: RowTask, ticket: Ticket) -> None:
        lane.running += 1
        if lane.limit is not None and lane.running >= lane.limit:
            self._ready.hold(lane)
        working = _Working(lane, row, ticket, self._clock.monotonic(), self._row_timeout, self._dropping)
        task = asyncio.create_task(self._work(working))
        self._tasks[task] = working
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._given_up.discard(task)
        working = self._tasks.pop(task, None)
        if working is not None:
            self._make_room(working.lane)

    def _make_room(self, lane: Lane) -> None:
        lane.running -= 1
        if lane.limit is not None and lane.running < lane.limit:
            self._ready.release(lane)
        self._wake.set()

    async def _work(self, working: _Working) -> None:
        lane, row, ticket = working.lane, working.row, working.ticket
        waited: list[bool] = []
        turn = asyncio.get_running_loop().call_soon(waited.append, True) if lane.waits is None else None
        try:
            work = lane.work.work(row, working)
            settled = await (work if ticket.rest is None else ticket.rest.watch(work))
        except Parked as parked:
            if not working.given_up:
                self._park(lane, row, ticket, parked)
        except MemoryError:
            self._out_of_memory()
        except Exception as error:
            log.exception("row_not_worked", dataset=lane.of.dataset, row=row.index)
            if not working.given_up:
                ticket.fail(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError:
            cancelled = working.cancelled()
            if cancelled is None:
                raise
            if not working.given_up:
                self._settler.settle(lane.of, _failed(row, cancelled), ticket)
        except BaseException as error:  # likewise
            if not working.given_up:
                self._settler.settle(lane.of, _failed(row, error), ticket)
        else:
            if not working.given_up:
                self._settler.settle(lane.of, settled, ticket)
        finally:
            if turn is not None:
                turn.cancel()
                lane.waits = lane.waits or bool(waited)

    async def _watch_time(self) -> None:
        """End rows whose time is over; give up those that do not end for that."""
        interval = self._row_timeout / 20
        while True:
            await self._clock.sleep(interval)
            now = self._clock.monotonic()
            for task, working in list(self._tasks.items()):  # the oldest first
                if now - working.since < self._row_timeout:
                    break
                if not working.over:
                    log.warning("row_times_out", dataset=working.lane.of.dataset, row=working.row.index, seconds=round(now - working.since, 1))
                    working.over = True
                    task.cancel()
                elif now - working.since > self._row_timeout + 2 * interval:
                    self._give_up(task, working)

    def _give_up(self, task: asyncio.Task[None], working: _Working) -> None:
        """Author code swallowed its cancellation and goes on: settle its row without it. Its calls were counted as they were made."""
        log.warning("row_goes_on", dataset=working.lane.of.dataset, row=working.row.index, detail="it has failed, but its code does not end")
        working.given_up = True
        del self._tasks[task]
        self._given_up.add(task)
        self._make_room(working.lane)
        self._settler.settle(working.lane.of, _failed(working.row, working.timeout()), working.ticket)

    def _park(self, lane: Lane, row: RowTask, ticket: Ticket, parked: Parked) -> None:
        parked.__traceback__ = None  # its frames hold the row's context, which holds it: both would stay until the collector comes, which is seldom
        if lane.of.run_id in self._stopped:
            self._settler.settle(lane.of, _cancelled(row), ticket)
            return
        waiting = ParkedRow(
            key=row.key,
            index=row.index,
            page=row.page,
            attempt=row.attempt,
            waits=row.waits + 1,
            wait_ms=parked.wait_ms,
            asked=parked.asked,
            provider=parked.provider,
            away=parked.away,
        )
        if not ticket.keep(waiting, reason=parked.reason, halted=parked.halted):
            self._settler.park(lane.of, waiting, ticket, reason=parked.reason, halted=parked.halted)


def _may_wait(program: DatasetProgram) -> bool:
    """Whether a row of it may wait, as far as can be told without running one. A plain function without context waits for nothing."""
    return any(
        column.resolver.program is not None
        or column.resolver.takes_context
        or column.resolver.blocking
        or inspect.iscoroutinefunction(column.resolver.function)
        for column in program.columns
    )


def _cancelled(row: RowTask) -> SettledRow:
    return SettledRow(key=row.key, index=row.index, page=row.page, attempt=row.attempt, status="cancelled", input=row.data)


def _failed(row: RowTask, error: BaseException) -> SettledRow:
    """As a whole, whatever its columns had come to."""
    return SettledRow(
        key=row.key,
        index=row.index,
        page=row.page,
        attempt=row.attempt,
        status="failed",
        input=row.data,
        error=problem_of(error, row=row.index),
    )


def _drop(working: object) -> None:
    """End a row that was begun by hand, where it stands."""
    try:
        working.close()  # type: ignore[attr-defined]
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except RuntimeError:
        log.warning("row_begun_twice", detail="author code goes on after being closed")
    except BaseException as error:  # author code's, at an end that nobody hears of
        log.warning("row_begun_twice", detail="author code raised as it was closed", error_type=type(error).__name__)


__all__ = ["Lane", "RowRunner"]
