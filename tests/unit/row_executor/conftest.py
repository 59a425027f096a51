"""An engine in memory: the service's own bodies, capture and rows between neighbours that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from tests.fakes.clocks import FrozenClock
from tests.fakes.receipts import MemoryReceipts
from tests.unit.row_executor.leads import Tools
from tests.unit.row_executor.step_executors import Executor, Now

from rowmill import registry
from rowmill.paged_handle import PagedHandle
from rowmill.plays import Play
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.counts import Counts
from rowmill_contracts.rows import RowTask
from rowmill_contracts.runs import DatasetOpened, ReleaseRun, RunOptions, RunRecord, StagedInput
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_row_executor.bodies import BodyDriver, Lease
from rowmill_row_executor.capture import Captured, capture
from rowmill_row_executor.engine import Engine
from rowmill_row_executor.in_memory import MemoryAdmission, MemoryDesk, MemorySettler, MemorySheets, MemoryStepReceipts
from rowmill_row_executor.ports import Asker, DatasetOfRun
from rowmill_row_executor.row_runner import Lane, RowRunner
from rowmill_row_executor.row_work import RowWork
from rowmill_row_executor.settling import PageTicket
from rowmill_row_executor.step_runner import StepRunner

RUN = "run-1"
CODE = "code-1"


async def until(happened: Callable[[], Any]) -> None:
    """Return once it is so."""
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.001)


class RegisteredCode:
    """The plays that the test defined."""

    def play(self, name: str) -> Play[Any, Any]:
        return registry.play_named(name)

    def digest(self, name: str) -> str:
        registry.play_named(name)
        return CODE


class LeasesForEver:
    """Leases that nobody takes away, unless the test does: call ``lost[run_id]()``."""

    def __init__(self) -> None:
        self.lost: dict[str, Callable[[], None]] = {}

    @contextmanager
    def keeping(self, lease: Lease, on_lost: Callable[[], None]) -> Iterator[None]:
        self.lost[lease.run_id] = on_lost
        yield
        del self.lost[lease.run_id]


class Bench:
    """Everything that a play needs to run, in memory. ``answer``: how calls are answered, settable."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.clock = FrozenClock()
        self.admission = MemoryAdmission()
        self.settler = MemorySettler()
        self.sheets = MemorySheets(self.settler)
        self.answer: Callable[[CallItem], Any] = lambda item: CallOutcome(call_id=item.call_id, outcome="completed")
        self.desk = MemoryDesk(lambda _, item: self.answer(item))
        self.leases = LeasesForEver()
        self.receipts = MemoryStepReceipts(self.clock.now)
        self.steps = StepRunner(self.receipts, SystemClock(), threads, hold=0.02, patience=0.02, again=5.0, body_limit=0.2, row_limit=20.0)
        self.threads = threads
        self.engine = Engine(
            admission=self.admission,
            desk=self.desk,
            sheets=self.sheets,
            settler=self.settler,
            clock=self.clock,
            code=RegisteredCode(),
            threads=threads,
            steps=self.steps,
        )
        self.driver = BodyDriver(self.engine, self.leases, drop_patience=1.0)

    def start(self, play: Play[Any, Any], *, options: RunOptions | None = None, inputs: dict[str, str] | None = None, **given: Any) -> None:
        """Know a run of the play, as admission does after a `RunStart`."""
        self.admission.add(
            RunRecord(
                run_id=RUN,
                number=1,
                org="default",
                play=play.name,
                started_at=self.clock.now(),
                input=msgspec.Raw(msgspec.json.encode(given)),
                inputs=[StagedInput(input_id=input_id, field=field) for field, input_id in (inputs or {}).items()],
                options=options or RunOptions(),
            )
        )

    async def advance(self) -> ReleaseRun | None:
        """Take the run's lease and run its body once; what the run was released with (None: it was not)."""
        held = self.admission.runs[RUN]
        taken = await self.admission.take(RUN, lease_id=f"lease-{held.term}")
        assert taken.outcome == "taken"
        assert taken.run is not None
        held.ending = None
        lease = Lease(RUN, taken.term, held.holder, 8)
        await self.driver.drive(registry.play_named(held.record.play), taken.run, lease, CODE)
        return held.ending

    async def capture(self, dataset: str) -> Captured:
        record = (await self.admission.take(RUN, read_only=True)).run
        assert record is not None
        return await capture(self.engine, registry.play_named(record.play), record, dataset, CODE, timeout=5, drop_patience=1)

    async def run_rows(
        self, program: Any, rows: list[Any], *, concurrency: int | None = None, known: dict[int, Any] | None = None, **task: Any
    ) -> None:
        """Run these rows of a program, through the row runner."""
        runner = self.runner()
        runner.start()
        lane = self.lane(program, concurrency)
        tasks = [
            RowTask(
                key=f"key-{index}",
                index=index,
                page=0,
                data=msgspec.Raw(msgspec.json.encode(row)),
                known=msgspec.Raw(msgspec.json.encode((known or {}).get(index, {}))),
                **task,
            )
            for index, row in enumerate(rows)
        ]
        ticket = PageTicket(len(tasks))
        runner.submit(lane, tasks, ticket)
        try:
            async with asyncio.timeout(20):
                await ticket.wait()
        finally:
            await runner.stop()

    def runner(self) -> RowRunner:
        return RowRunner(self.settler, self.clock, rows_at_once=1000, row_timeout=3600, loop_slice=0.005)

    def lane(self, program: Any, concurrency: int | None = None) -> Lane:
        work = RowWork(
            program,
            Asker(RUN, "default", "bench", self.clock.now()),
            self.desk,
            self.clock,
            make_handle=lambda run_id, dataset: PagedHandle(run_id, dataset, self.sheets),
            threads=self.threads,
            steps=self.steps,
        )
        return Lane(DatasetOfRun(RUN, 1, "default", "bench", program.key), work, concurrency)

    def close(self, dataset: str, **counts: int) -> None:
        """Admission closes the dataset."""
        self.admission.close(RUN, dataset, DatasetOpened(outcome="closed", counts=msgspec.convert(counts, Counts)))


@pytest.fixture
def fresh_registry() -> Iterator[registry.Registry]:
    """Plays and tools of this test only."""
    with registry.isolated() as known:
        yield known


@pytest.fixture
def frozen_clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
async def bench(fresh_registry: registry.Registry) -> AsyncIterator[Bench]:
    with ThreadPoolExecutor(2) as threads:
        yield Bench(threads)


@pytest.fixture
def tools(fresh_registry: Any) -> Tools:
    return Tools()


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def store(now: Now) -> MemoryReceipts:
    return MemoryReceipts(now, held_poll=0.001)


@pytest.fixture
def new_executor(store: MemoryReceipts) -> Iterator[Callable[[], Executor]]:
    with ThreadPoolExecutor(1) as threads:
        yield lambda clock=None: Executor(store, threads, clock or SystemClock())  # type: ignore[misc]
