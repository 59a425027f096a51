"""Admission between played neighbours: clients, an executor with a body of one dataset, a sheet-writer and a receipt-store that keep books."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import msgspec

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_contracts.charges import AskCharges, ChargesTold, RunCharges
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.digests import input_digest, page_digest
from rowmill_contracts.envelope import Message
from rowmill_contracts.events import DatasetEvent, RunEvent
from rowmill_contracts.receipts import HaltRun, RunHalted
from rowmill_contracts.retries import ReopenRows, RowsReopened
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import (
    LookedRow,
    LookupRows,
    ReadCounts,
    RowMark,
    RowsLooked,
    RowsSettled,
    RowTask,
    RowTasks,
    SettledRow,
)
from rowmill_contracts.run_questions import GetRun, RunShown, RunSummary
from rowmill_contracts.runs import (
    AdvanceRun,
    ColumnInfo,
    DatasetOpened,
    InputPage,
    InputSealed,
    OpenDataset,
    PageProgress,
    ParkedRow,
    ReleaseRun,
    RowsCommitted,
    RunStart,
    RunTaken,
    TakeRun,
    TermAnswer,
)
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_COUNTS,
    EVENTS,
    EXECUTOR_ADVANCE,
    EXECUTOR_KEYS,
    EXECUTOR_ROWS,
    INPUTS,
    RECEIPTS_SETTLE,
    RUNS_START,
    SHEETS_ASKS,
    SHEETS_SETTLE,
)

TERMINAL = {"duplicate", "reused", "completed", "failed", "cancelled"}
_numbers = count(1)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def rows(n: int, first: int = 0) -> list[msgspec.Raw]:
    return [raw({"id": i, "domain": f"{i}.example"}) for i in range(first, first + n)]


def new_run_id() -> str:
    return f"run-{next(_numbers)}"


class Books:
    """A sheet-writer's: page records with marks, counts that only rise. ``sheet``: keys whose rows are reused."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, str, int], dict[int, RowMark]] = {}
        self.keys: dict[tuple[str, str, int], list[str]] = {}
        self.sheet: set[str] = set()
        self.versions: dict[tuple[str, str], int] = {}
        self.first_errors: dict[tuple[str, str], Problem] = {}
        self.lookups: list[LookupRows] = []
        self.attempts: dict[tuple[str, str, int], int] = {}

    def reopen(self, request: ReopenRows) -> RowsReopened:
        letters = {"failed", "cancelled"} if request.cancelled else {"failed"}
        pages = sorted(page for run, name, page in self.pages if (run, name) == (request.run_id, request.dataset) and page >= request.page)
        out = []
        for page in pages[:1]:
            marks = self.pages[request.run_id, request.dataset, page]
            for (index, mark), key in zip(sorted(marks.items()), self.keys[request.run_id, request.dataset, page], strict=True):
                name = (request.run_id, request.dataset, index)
                if mark in letters and self.attempts.get(name, 1) < request.attempt:
                    marks[index] = "sent"
                    self.attempts[name] = request.attempt
                if marks[index] == "sent" and self.attempts.get(name) == request.attempt:
                    out.append(ParkedRow(key=key, index=index, page=page, attempt=request.attempt, waits=0))
        self._raise(request.run_id, request.dataset)
        told = self.committed(request.run_id, request.dataset)
        return RowsReopened(rows=out, next_page=pages[1] if len(pages) > 1 else None, counts=told.counts, version=told.version)

    def look_up(self, request: LookupRows) -> RowsLooked:
        self.lookups.append(request)
        name = (request.run_id, request.dataset, request.page)
        if name not in self.pages:
            self.pages[name] = {row.index: self._first_mark(row.key, duplicate=row.duplicate) for row in request.rows}
            self.keys[name] = [row.key for row in request.rows]
            self._raise(request.run_id, request.dataset)
        assert self.keys[name] == [row.key for row in request.rows], "a page changed under the run"
        return RowsLooked(rows=[LookedRow(mark=self.pages[name][row.index]) for row in request.rows])

    def _first_mark(self, key: str, *, duplicate: bool) -> RowMark:
        if duplicate:
            return "duplicate"
        return "reused" if key in self.sheet else "sent"

    def settle(self, run_id: str, dataset: str, settled: Iterable[SettledRow]) -> None:
        for row in settled:
            marks = self.pages[run_id, dataset, row.page]
            if marks[row.index] == "sent" and row.attempt >= self.attempts.get((run_id, dataset, row.index), 1):
                marks[row.index] = row.status
                if row.status == "failed" and row.error is not None:
                    self.first_errors.setdefault((run_id, dataset), row.error)
        self._raise(run_id, dataset)

    def _raise(self, run_id: str, dataset: str) -> None:
        self.versions[run_id, dataset] = self.versions.get((run_id, dataset), 0) + 1

    def marks(self, run_id: str, dataset: str = "leads") -> dict[int, RowMark]:
        return {index: mark for (run, name, _), marks in self.pages.items() if (run, name) == (run_id, dataset) for index, mark in marks.items()}

    def committed(self, run_id: str, dataset: str) -> RowsCommitted:
        marks = list(self.marks(run_id, dataset).values())
        counts = Counts(
            admitted=len(marks),
            completed=marks.count("completed"),
            failed=marks.count("failed"),
            cancelled=marks.count("cancelled"),
            reused=marks.count("reused"),
            duplicates=marks.count("duplicate"),
        )
        pages = [
            PageProgress(page=page, open=list(of_page.values()).count("sent"))
            for (run, name, page), of_page in self.pages.items()
            if (run, name) == (run_id, dataset) and "sent" in of_page.values()
        ]
        return RowsCommitted(
            run_id=run_id,
            dataset=dataset,
            counts=counts,
            version=self.versions.get((run_id, dataset), 0),
            pages=pages,
            first_error=self.first_errors.get((run_id, dataset)),
        )


Work = Callable[[RowTasks], Sequence[SettledRow]]


def completes(tasks: RowTasks) -> list[SettledRow]:
    return [settled(row, "completed") for row in tasks.rows]


def settled(row: RowTask, status: Any, error: Problem | None = None) -> SettledRow:
    return SettledRow(key=row.key, index=row.index, page=row.page, attempt=row.attempt, status=status, input=row.data, error=error)


class Neighbours:
    """Everyone around admission, over one bus. ``work``: what the executor does with a page; ``dataset``: what its body opens."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.books = Books()
        self.work: Work = completes
        self.dataset: dict[str, Any] = {}
        self.taken: list[RunTaken] = []
        self.advanced: list[AdvanceRun] = []
        self.tasks: list[RowTasks] = []
        self.halts: list[HaltRun] = []
        self.events: list[RunEvent | DatasetEvent] = []
        self.opened: list[DatasetOpened] = []
        self.silent_writer = False
        self.receipts_away = False
        self.charges: dict[str, RunCharges] = {}
        self.charges_away = False
        self.deadly_for: set[str] = set()
        self.keys_away = False
        self.nonsense_for: set[str] = set()
        self.nonsense_pages: set[tuple[str, int]] = set()
        self.nonsense_counts_for: set[str] = set()
        self._changed = asyncio.Condition()

    async def join(self) -> None:
        await self.bus.consume(EXECUTOR_ADVANCE, self._told(self._advance))
        await self.bus.consume(EXECUTOR_ROWS, self._told(self._row_tasks))
        await self.bus.consume(EXECUTOR_KEYS, self._told(self._keys))
        await self.bus.consume(SHEETS_ASKS, self._told(self._ask))
        await self.bus.consume(SHEETS_SETTLE, self._told(self._settled))
        await self.bus.consume(RECEIPTS_SETTLE, self._told(self._halt))
        await self.bus.consume("heard", self._told(self._event), broadcast=(EVENTS, "#"))

    def _told(self, handler: Callable[[Delivery], Any]) -> Callable[[Delivery], Any]:
        async def handle(delivery: Delivery) -> None:
            await handler(delivery)
            async with self._changed:
                self._changed.notify_all()

        return handle

    async def until(self, true: Callable[[], Any], seconds: float = 20) -> None:
        """Wait for something to become true after a message."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                while not true():
                    try:
                        async with asyncio.timeout(0.05):
                            await self._changed.wait()
                    except TimeoutError:
                        continue
        except TimeoutError:
            raise AssertionError(f"not within {seconds} s; events: {[(e.run_id, e.state) for e in self.events]}") from None

    async def _advance(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, AdvanceRun)
        self.advanced.append(message)
        lease = f"lease-{next(_numbers)}"
        taken = await self.bus.ask(TakeRun(run_id=message.run_id, lease_id=lease), ADMISSION_ASKS, RunTaken)
        self.taken.append(taken)
        if taken.outcome == "busy":
            await self.bus.publish(message, EXECUTOR_ADVANCE, exchange="rowmill.delay.1s")
        if taken.run is not None:
            await self.body(taken, lease)

    async def body(self, taken: RunTaken, lease: str) -> None:
        assert taken.run is not None
        run_id = taken.run.run_id
        staged = taken.run.inputs[0].input_id if taken.run.inputs else "nothing"
        request = {"dataset": "leads", "input_id": staged, "columns": [ColumnInfo(name="x", version="1")], "code_digest": "c", **self.dataset}
        opened = await self.bus.ask(OpenDataset(run_id=run_id, term=taken.term, **request), ADMISSION_ASKS, DatasetOpened)
        self.opened.append(opened)
        ending: dict[str, Any] = {
            "open": {"outcome": "waiting", "waiting_for": "dataset:leads"},
            "closed": {"outcome": "completed", "output": raw({"rows": opened.counts.admitted})},
            "failed": {"outcome": "failed", "error": opened.error},
        }
        if opened.outcome in ending:
            release = ReleaseRun(run_id=run_id, term=taken.term, lease_id=lease, **ending[opened.outcome])
            await self.bus.ask(release, ADMISSION_ASKS, TermAnswer)

    async def _row_tasks(self, delivery: Delivery) -> None:
        tasks = delivery.message
        assert isinstance(tasks, RowTasks)
        self.tasks.append(tasks)
        await self.settle(tasks, self.work(tasks))

    async def settle(self, tasks: RowTasks, ended: Sequence[SettledRow]) -> None:
        if ended:
            self.books.settle(tasks.run_id, tasks.dataset, ended)
            await self.tell_counts(tasks.run_id, tasks.dataset)

    async def tell_counts(self, run_id: str, dataset: str = "leads") -> None:
        if not self.silent_writer:
            await self.bus.publish(self.books.committed(run_id, dataset), ADMISSION_COUNTS)

    async def _keys(self, delivery: Delivery) -> None:
        request = delivery.message
        assert isinstance(request, KeyPage)
        if self.keys_away:
            return
        await self.bus.reply(delivery, PageKeys(keys=[str(msgspec.json.decode(row)["id"] % 7) * 64 for row in request.rows]))

    async def _ask(self, delivery: Delivery) -> None:
        match delivery.message:
            case LookupRows() as request if request.run_id in self.nonsense_for or (request.run_id, request.page) in self.nonsense_pages:
                await self.bus.reply(delivery, RunShown())
            case ReadCounts() as request if request.run_id in self.nonsense_counts_for:
                await self.bus.reply(delivery, RunShown())
            case LookupRows() as request:
                answer: Message = self.books.look_up(request)
                if any(row.mark in TERMINAL for row in answer.rows):  # type: ignore[attr-defined]
                    await self.tell_counts(request.run_id, request.dataset)
                await self.bus.reply(delivery, answer)
            case ReopenRows() as request:
                await self.bus.reply(delivery, self.books.reopen(request))
            case ReadCounts() as request:
                await self.bus.reply(delivery, self.books.committed(request.run_id, request.dataset))

    async def _settled(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, RowsSettled)
        self.books.settle(message.run_id, message.dataset, message.rows)
        await self.tell_counts(message.run_id, message.dataset)

    async def _halt(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, AskCharges):
            if not self.charges_away:
                told = [self.charges.get(run_id) or RunCharges(run_id=run_id) for run_id in delivery.message.run_ids]
                await self.bus.reply(delivery, ChargesTold(runs=told))
            return
        assert isinstance(delivery.message, HaltRun)
        self.halts.append(delivery.message)
        if delivery.message.run_id in self.deadly_for:
            raise Rejected("poison")
        if not self.receipts_away:
            await self.bus.reply(delivery, RunHalted(state="stopped" if delivery.message.action == "stop" else "running"))

    async def _event(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, RunEvent | DatasetEvent):
            self.events.append(delivery.message)

    # ---- as a client ------------------------------------------------------------------------------------------------------------------

    async def start(self, run_id: str, **fields: Any) -> None:
        await self.bus.publish(RunStart(run_id=run_id, play="leads", **fields), RUNS_START)

    async def stage(self, input_id: str, pages: Sequence[Sequence[msgspec.Raw]], *, order: Sequence[int] | None = None) -> None:
        """Publish the pages (in another order) and then the seal."""
        for page in order or range(len(pages)):
            await self.bus.publish(InputPage(input_id=input_id, page=page, rows=list(pages[page])), INPUTS)
        await self.seal(input_id, pages)

    async def seal(self, input_id: str, pages: Sequence[Sequence[msgspec.Raw]], *, digest: str | None = None) -> None:
        digest = digest or input_digest(page_digest(map(memoryview, page)) for page in pages)
        await self.bus.publish(InputSealed(input_id=input_id, pages=len(pages), rows=sum(map(len, pages)), digest=digest), INPUTS)

    async def get(self, run_id: str) -> RunSummary | None:
        return (await self.bus.ask(GetRun(run_id=run_id), ADMISSION_ASKS, RunShown)).run

    def states(self, run_id: str) -> list[str]:
        return [event.state for event in self.events if isinstance(event, RunEvent) and event.run_id == run_id]

    def ended(self, run_id: str) -> bool:
        return bool({"completed", "failed", "cancelled"} & set(self.states(run_id)))

    def sent(self, run_id: str) -> list[RowTask]:
        return [row for tasks in self.tasks if tasks.run_id == run_id for row in tasks.rows]
