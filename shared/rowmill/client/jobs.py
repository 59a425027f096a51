"""A run as its client sees it: events while it goes, a result when it is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from rowmill.budgets import BudgetLike, budget_of
from rowmill.client.outages import Outage, outages
from rowmill.client.patience import Patience, Report
from rowmill.client.reading import SheetReader
from rowmill.encoding.values import decode_value
from rowmill.errors import RunFailed, UsageError
from rowmill.paged_handle import PagedHandle
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock, new_id
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import DatasetEvent, RowsCompleted, RowsFailed, RunEvent
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.run_questions import GetRun, PauseRun, ResumeRun, RunShown, RunSummary
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import ADMISSION_ASKS, RUNS_RETRY, RUNS_STOP

Event = RunEvent | DatasetEvent | RowsCompleted | RowsFailed

OVER = frozenset({"completed", "failed", "cancelled"})
PERSON = frozenset({"budget", "payment", "quota", "pause", "halted"})
"""What a run may wait for that only a person can give."""

POLL_SECONDS = 2.0
"""How long a client waits in silence before it asks for the run's state: events are hints, the state is the truth."""

EVENTS_KEPT = 10_000
"""Events kept for a job whose `events` nobody reads; the oldest go first."""

FAILED_ROWS = 100
"""Failed rows that a result carries; all of them are in the sheet."""


@dataclass(frozen=True)
class FailedRow:
    """A row that failed: its place in the input (from 0), its data, and why."""

    dataset: str
    index: int
    data: dict[str, Any]
    error: Problem | None


@dataclass(frozen=True)
class RunResult:
    """How a run ended. ``output`` is what the play returned, with live handles; ``failed`` holds its first 100 failed rows. ``cost``: what the run
    was charged for all its calls, whatever came of them; with ``charges_known`` false what was last heard of that.
    """

    run_id: str
    state: str
    output: Any
    counts: Counts
    cost: Decimal
    failed: list[FailedRow] = field(default_factory=list)
    error: Problem | None = None
    charges_known: bool = True


class Job:
    """A started run. Made by `Client.start` and `Client.job`.

    `events`, `wait` and `result` outlast an outage of the services, the broker or the database, however long it is: bound them with
    ``asyncio.timeout`` where you must. Whatever else is asked raises `AskTimeout` when nobody answers.
    """

    def __init__(self, bus: Bus, run_id: str, report: Report | None = None) -> None:
        self.run_id = run_id
        self._bus = bus
        self._patience = Patience(bus, run_id, report)
        self.patient_reader = SheetReader(self._patience)
        """Reads rows of the run, and outlasts outages, too."""
        self._reader = SheetReader(bus)
        self._heard: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._news = asyncio.Event()
        self._state_news = asyncio.Event()

    def hear(self, event: Event) -> None:
        """Take an event of this run (called by the client's one listener)."""
        self._heard.append(event)
        self._news.set()
        if isinstance(event, RunEvent):
            self._state_news.set()

    async def events(self) -> AsyncIterator[Event]:
        """Events of the run from its start until it is over, at least once each; rows come in pages.

        Who reads slower than 10 000 events lose the oldest. The stream ends after the run's last state, also where that event was lost.
        """
        while True:
            while self._heard:
                event = self._heard.popleft()
                yield event
                if isinstance(event, RunEvent) and event.state in OVER:
                    return
            if not await _within(POLL_SECONDS, self._news):
                summary = await self._stands()
                if summary is not None and summary.state in OVER and not self._heard:
                    yield _as_event(summary)
                    return

    async def status(self) -> RunSummary | None:
        """The run as admission has it stored; None while its start has not arrived there."""
        return (await self._bus.ask(GetRun(run_id=self.run_id), ADMISSION_ASKS, RunShown)).run

    async def _stands(self) -> RunSummary | None:
        """As `status`, for who waits."""
        return (await self._patience.ask(GetRun(run_id=self.run_id), ADMISSION_ASKS, RunShown)).run

    async def outages(self) -> list[Outage]:
        """Providers that do not serve and for which rows of the run wait; asks admission, and then the gateways, for a second at most."""
        run = await self.status()
        return [] if run is None else await self.outages_of(run)

    async def outages_of(self, run: RunSummary) -> list[Outage]:
        """The same of the run as `status` answered it; asks the gateways alone, and only where rows wait."""
        return await outages(self._bus, run, SystemClock())

    async def stop(self, reason: str = "stopped by its client") -> None:
        """Stop the run: nothing new is sent for it; what is in flight is recorded."""
        await self._bus.publish(RunStop(run_id=self.run_id, reason=reason), RUNS_STOP)

    async def pause(self) -> RunSummary | None:
        """Let the run wait until it is resumed: what is in flight is recorded, nothing new is sent. Answers how it stands; None: no such run."""
        return (await self._bus.ask(PauseRun(run_id=self.run_id), ADMISSION_ASKS, RunShown)).run

    async def resume(self, *, budget: BudgetLike | None = None) -> RunSummary | None:
        """Let a paused or halted run go on, with another budget of each kind that is given. Answers how it stands; None: no such run.

        Raises:
            UsageError: for what is no budget, or one with which the run would stop at once again; says how much it needs.

        """
        shown = await self._bus.ask(ResumeRun(run_id=self.run_id, budget=budget_of(budget)), ADMISSION_ASKS, RunShown)
        if shown.refused:
            raise UsageError(shown.refused)
        return shown.run

    async def retry(self) -> RunSummary | None:
        """Have the failed rows of the run, which is over, worked again; all that completed stays, and is not paid for again. Answers how it stands;
        None: no such run. Of a run that goes on nothing changes.

        Raises:
            UsageError: there is nothing to retry, or it cannot be; says why.

        """
        shown = await self._bus.ask(RunRetry(run_id=self.run_id, retry_id=new_id()), RUNS_RETRY, RunShown)
        if shown.refused:
            raise UsageError(shown.refused)
        return shown.run

    async def wait(self, *, standing: bool = False) -> RunSummary:
        """Return when the run is over; with ``standing`` also when it waits for a person (`waits_for_a_person`)."""
        while True:
            summary = await self._stands()
            if summary is not None and (summary.state in OVER or (standing and waits_for_a_person(summary))):
                return summary
            await _within(POLL_SECONDS, self._state_news)

    async def result(self, *, check: bool = True) -> RunResult:
        """Wait for the end and return what came of it.

        Raises:
            RunFailed: the run failed or was cancelled and ``check`` is true. Failed rows alone do not raise.

        """
        summary = await self.wait()
        if check and summary.state != "completed":
            reason = f": {summary.error.message}" if summary.error is not None else ""
            raise RunFailed(f"run {self.run_id} {summary.state}{reason}")
        return RunResult(
            run_id=self.run_id,
            state=summary.state,
            output=decode_value(msgspec.json.decode(summary.output), "output", handle=self._handle),
            counts=summary.counts,
            cost=summary.counts.cost,
            failed=[row async for row in self._failed(summary)],
            error=summary.error,
            charges_known=summary.charges_known,
        )

    def _handle(self, run_id: str, dataset: str) -> PagedHandle:
        return PagedHandle(run_id, dataset, self._reader)

    async def _failed(self, summary: RunSummary) -> AsyncIterator[FailedRow]:
        found = 0
        for dataset in summary.datasets:
            if not dataset.counts.failed:
                continue
            async for row in self.patient_reader.rows(self.run_id, dataset.dataset):
                if row.mark != "failed":
                    continue
                yield FailedRow(dataset.dataset, row.index, msgspec.json.decode(row.data), row.error)
                found += 1
                if found >= FAILED_ROWS:
                    return


def _as_event(summary: RunSummary) -> RunEvent:
    return RunEvent(
        event_id=f"{summary.run_id}/{summary.state}",
        run_id=summary.run_id,
        play=summary.play,
        state=summary.state,
        counts=summary.counts,
        cost=summary.counts.cost,
        output=summary.output,
        error=summary.error,
    )


def waits_for_a_person(summary: RunSummary) -> bool:
    """Whether the run goes on only when somebody resumes it: it was paused, its budget is spent, or a provider wants to be paid."""
    waiting_for = summary.waiting_for or ""
    return summary.state == "waiting" and (waiting_for.partition(":")[0] in PERSON)


async def _within(seconds: float, news: asyncio.Event) -> bool:
    """Whether the event was set within that time; it is cleared for the next wait."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    news.clear()
    return True
