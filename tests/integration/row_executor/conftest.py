"""An executor on a real broker, between neighbours played on a second bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill import registry
from rowmill.plays import Play
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.counts import Counts
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.rows import ReadCounts, ReadRow, ReadRows, RowsRead, RowsSettled, RowTask, RowTasks, SettledRow, joined
from rowmill_contracts.runs import (
    AdvanceRun,
    DatasetOpened,
    InputPage,
    InputSealed,
    OpenDataset,
    ParkedRow,
    RecordCalls,
    ReleaseRun,
    RenewRun,
    RowsCommitted,
    RowsParked,
    RunRecord,
    StagedInput,
    TakeRun,
)
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_INPUTS,
    ADMISSION_PARKED,
    EXECUTOR_ADVANCE,
    EXECUTOR_ROWS,
    RECEIPTS_CLAIMS,
    RECEIPTS_SETTLE,
    SHEETS_ASKS,
    SHEETS_SETTLE,
    gateway_calls,
)
from rowmill_row_executor.app import App
from rowmill_row_executor.in_memory import MemoryAdmission
from rowmill_row_executor.settings import RowExecutorSettings

SCALE = 0.05


class RegisteredCode:
    """The plays that the test defined, under a digest that the test may change."""

    def __init__(self, digest: str = "code-1") -> None:
        self.code_digest = digest

    def play(self, name: str) -> Play[Any, Any]:
        return registry.play_named(name)

    def digest(self, name: str) -> str:
        registry.play_named(name)
        return self.code_digest


class Neighbours:
    """Admission, gateway and sheet writer: `MemoryAdmission` behind the messages, calls answered by ``answer``, rows kept by index.

    ``answer`` gives the outcome of a call, or None to say nothing. ``asked``: how often each receipt key was asked for.
    """

    def __init__(self, broker_url: str) -> None:
        self.bus = Bus(ServiceSettings(broker_url=broker_url, time_scale=SCALE), service="neighbours")
        self.admission = MemoryAdmission()
        self.answer: Callable[[CallItem], CallOutcome | None] = lambda item: CallOutcome(call_id=item.call_id, outcome="completed")
        self.asked: dict[str, int] = {}
        self.settled: dict[tuple[str, str], dict[int, SettledRow]] = {}
        self.settled_messages: list[RowsSettled] = []
        self.parked: list[tuple[RowsParked, ParkedRow]] = []
        self.changed = asyncio.Event()

    async def start(self) -> None:
        await self.bus.start()
        await self.bus.consume(ADMISSION_ASKS, self._admission_asks)
        await self.bus.consume(ADMISSION_INPUTS, self._inputs)
        await self.bus.consume(ADMISSION_PARKED, self._parked)
        await self.bus.consume(SHEETS_SETTLE, self._settle)
        await self.bus.consume(SHEETS_ASKS, self._sheets)
        for shard in range(SHARDS):
            await self.bus.consume(gateway_calls(shard), self._calls)

    async def until(self, happened: Callable[[], Any], *, seconds: float = 30) -> None:
        """Wait until it is so."""
        async with asyncio.timeout(seconds):
            while not happened():
                self.changed.clear()
                waiting = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait([waiting], timeout=0.2)
                waiting.cancel()

    # ---- what tests do ----------------------------------------------------------------------------------------------------------------

    def know(self, run_id: str, play: Play[Any, Any], *, code_digest: str | None = None, inputs: dict[str, str] | None = None, **given: Any) -> None:
        self.admission.add(
            RunRecord(
                run_id=run_id,
                number=1,
                org="default",
                play=play.name,
                started_at=1.0,
                input=msgspec.Raw(msgspec.json.encode(given)),
                inputs=[StagedInput(input_id=input_id, field=field) for field, input_id in (inputs or {}).items()],
                code_digest=code_digest,
            )
        )

    async def advance(self, run_id: str) -> None:
        await self.bus.publish(AdvanceRun(run_id=run_id), EXECUTOR_ADVANCE)

    async def send_rows(
        self, run_id: str, dataset: str, rows: list[Any], *, page: int = 0, first: int = 0, message_id: str | None = None, code_digest: str = "code-1"
    ) -> None:
        play = self.admission.runs[run_id].record.play
        tasks = [
            RowTask(key=f"key-{index}", index=index, page=page, data=msgspec.Raw(msgspec.json.encode(row))) for index, row in enumerate(rows, first)
        ]
        message = RowTasks(run_id=run_id, number=1, org="default", play=play, dataset=dataset, started_at=1.0, code_digest=code_digest, rows=tasks)
        await self.bus.publish(message, EXECUTOR_ROWS, message_id=message_id)

    def rows(self, run_id: str, dataset: str) -> dict[int, SettledRow]:
        return self.settled.get((run_id, dataset), {})

    def values(self, run_id: str, dataset: str) -> list[Any]:
        rows = self.rows(run_id, dataset)
        return [msgspec.json.decode(rows[index].values) for index in sorted(rows)]

    def ending(self, run_id: str) -> ReleaseRun | None:
        return self.admission.runs[run_id].ending

    async def keep_receipts(self) -> MemoryReceipts:
        """Be the receipt-store, too."""
        store = MemoryReceipts(time.time)

        async def answer(delivery: Delivery) -> None:
            await self.bus.reply(delivery, store.answer(delivery.message))
            self.changed.set()

        for queue in (RECEIPTS_CLAIMS, RECEIPTS_SETTLE):
            await self.bus.consume(queue, answer)
        return store

    # ---- what neighbours do -----------------------------------------------------------------------------------------------------------

    async def _admission_asks(self, delivery: Delivery) -> None:
        admission = self.admission
        match delivery.message:
            case TakeRun() as asked:
                answer: Any = await admission.take(asked.run_id, lease_id=asked.lease_id, read_only=asked.read_only)
            case RenewRun() as asked:
                answer = await admission.renew(asked.run_id, asked.term, asked.lease_id)
            case RecordCalls() as asked:
                answer = await admission.record(asked.run_id, asked.term, asked.calls)
            case OpenDataset() as asked:
                answer = await admission.open_dataset(asked)
            case ReleaseRun() as asked:
                answer = await admission.release(asked)
            case other:
                raise AssertionError(other)
        await self.bus.reply(delivery, answer)
        self.changed.set()

    async def _inputs(self, delivery: Delivery) -> None:
        match delivery.message:
            case InputPage() as page:
                await self.admission.stage(page.input_id, page.page, page.rows)
            case InputSealed() as seal:
                await self.admission.seal(seal.input_id, pages=seal.pages, rows=seal.rows, digest=seal.digest or "")
        self.changed.set()

    async def _parked(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, RowsParked)
        self.parked.extend((message, row) for row in message.rows)
        self.changed.set()

    async def _settle(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, RowsSettled)
        self.settled_messages.append(message)
        self.settled.setdefault((message.run_id, message.dataset), {}).update({row.index: row for row in message.rows})
        self.changed.set()

    async def _sheets(self, delivery: Delivery) -> None:
        match delivery.message:
            case ReadRows() as asked:
                rows = self.rows(asked.run_id, asked.dataset)
                wanted = [rows[index] for index in sorted(rows)][asked.offset : asked.offset + asked.limit]
                read = [ReadRow(index=row.index, key=row.key, mark=row.status, data=joined(row.input, row.values)) for row in wanted]
                end = asked.offset + len(read)
                await self.bus.reply(delivery, RowsRead(rows=read, next_offset=end if end < len(rows) else None))
            case ReadCounts() as asked:
                counts = Counts(admitted=len(self.rows(asked.run_id, asked.dataset)))
                await self.bus.reply(delivery, RowsCommitted(run_id=asked.run_id, dataset=asked.dataset, counts=counts, version=1))

    async def _calls(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, ToolCalls)
        results = []
        for item in message.calls:
            self.asked[item.receipt_key] = self.asked.get(item.receipt_key, 0) + 1
            outcome = self.answer(item)
            if outcome is not None:
                results.append(msgspec.structs.replace(outcome, call_id=item.call_id))
        if results and delivery.reply_to:
            await self.bus.send_reply(delivery.reply_to, ToolResults(results=results))
        self.changed.set()


def close(neighbours: Neighbours, run_id: str, dataset: str, **counts: int) -> None:
    neighbours.admission.close(run_id, dataset, DatasetOpened(outcome="closed", counts=msgspec.convert(counts, Counts)))


@pytest.fixture
def fresh_registry() -> Iterator[registry.Registry]:
    with registry.isolated() as known:
        yield known


@pytest.fixture
async def neighbours(broker_url: str, fresh_registry: registry.Registry) -> AsyncIterator[Neighbours]:
    played = Neighbours(broker_url)
    await played.start()
    yield played
    await played.bus.stop()


@pytest.fixture
async def new_executor(broker_url: str, fresh_registry: registry.Registry) -> AsyncIterator[Callable[..., Any]]:
    """Starts executors; they are stopped at the end of the test."""
    started: list[App] = []

    async def start(code: RegisteredCode | None = None, **settings: Any) -> App:
        app = App(RowExecutorSettings(broker_url=broker_url, time_scale=SCALE, **settings), code=code or RegisteredCode())
        started.append(app)
        await app.start()
        return app

    yield start
    for app in started:
        await app.stop()


@pytest.fixture
async def executor(new_executor: Callable[..., Any]) -> App:
    app: App = await new_executor()
    return app


@pytest.fixture
def code_of() -> Callable[[str], RegisteredCode]:
    return RegisteredCode


@pytest.fixture
def close_dataset(neighbours: Neighbours) -> Callable[..., None]:
    def closes(run_id: str, dataset: str, **counts: int) -> None:
        close(neighbours, run_id, dataset, **counts)

    return closes
