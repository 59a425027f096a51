"""A sheet writer between played neighbours: admission that looks pages up, executors that settle rows, listeners that hear what is told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import RowEvent, RowsCompleted, RowsFailed
from rowmill_contracts.rows import LookupRow, LookupRows, ReadCounts, ReadRow, ReadRows, RowsLooked, RowsRead, RowsSettled, SettledRow
from rowmill_contracts.runs import ColumnInfo, RowsCommitted
from rowmill_contracts.topology import ADMISSION_COUNTS, EVENTS, SHEETS_ASKS, SHEETS_SETTLE
from rowmill_sheet_writer.app import App
from rowmill_sheet_writer.settings import SheetWriterSettings

COLUMNS = [ColumnInfo(name="email", version="1"), ColumnInfo(name="score", version="1")]
_numbers = count(1)
_datasets = count(1)


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def decoded(value: msgspec.Raw) -> Any:
    return msgspec.json.decode(value)


class Neighbours:
    """A bus that hears all that the writer tells. ``committed`` and ``events`` are in order of arrival."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.committed: list[RowsCommitted] = []
        self.events: list[RowsCompleted | RowsFailed] = []
        self._changed = asyncio.Condition()

    async def listen(self) -> None:
        await self.bus.consume(ADMISSION_COUNTS, self._heard)
        await self.bus.consume(f"listener.{self.bus.process_id}", self._heard, broadcast=(EVENTS, "rows.#"))

    async def _heard(self, delivery: Delivery) -> None:
        async with self._changed:
            match delivery.message:
                case RowsCommitted() as committed:
                    self.committed.append(committed)
                case RowsCompleted() | RowsFailed() as event:
                    self.events.append(event)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed, asyncio.timeout(20):
            await self._changed.wait_for(condition)

    def told(self, run: SheetRun) -> RowsCommitted:
        """The newest counts of the run."""
        return max((c for c in self.committed if c.run_id == run.run_id), key=lambda c: c.version)

    async def until_counts(self, run: SheetRun, **counts: int) -> RowsCommitted:
        def reached() -> bool:
            return any(c.run_id == run.run_id and all(getattr(c.counts, name) == value for name, value in counts.items()) for c in self.committed)

        await self.until(reached)
        return self.told(run)

    def events_of(self, run: SheetRun) -> list[RowsCompleted | RowsFailed]:
        return [event for event in self.events if event.run_id == run.run_id]

    def event_rows(self, run: SheetRun) -> list[RowEvent]:
        return [row for event in self.events_of(run) for row in event.rows]


def input_row(name: str, **columns: Any) -> dict[str, Any]:
    return {"name": name, **columns}


@dataclass
class SheetRun:
    """One run over one dataset. Rows are named; a row's key is made of its name alone."""

    bus: Bus
    dataset: str
    number: int = field(default_factory=lambda: next(_numbers))
    started_at: float = 1_000.0
    play: str = "leads"

    @property
    def run_id(self) -> str:
        return f"{self.dataset}-{self.number}"

    def lookup(self, rows: Sequence[dict[str, Any]], *, page: int = 0, first_index: int = 0, seen: Sequence[str] = (), **changes: Any) -> LookupRows:
        """``seen``: names that stood in earlier pages."""
        names = set(seen)
        looked = []
        for position, row in enumerate(rows):
            name = row["name"]
            looked.append(LookupRow(key=key_of(name), index=first_index + position, duplicate=name in names, data=raw(row)))
            names.add(name)
        return LookupRows(
            run_id=self.run_id,
            number=self.number,
            org="acme",
            play=self.play,
            dataset=self.dataset,
            page=page,
            started_at=self.started_at,
            rows=looked,
            **{"columns": COLUMNS, **changes},
        )

    async def look_up(self, rows: Sequence[dict[str, Any]], **changes: Any) -> RowsLooked:
        return await self.ask(self.lookup(rows, **changes))

    async def ask(self, request: LookupRows) -> RowsLooked:
        return await self.bus.ask(request, SHEETS_ASKS, RowsLooked)

    def completed(self, row: dict[str, Any], index: int, *, page: int = 0, attempt: int = 1, **changes: Any) -> SettledRow:
        name = row["name"]
        meta = {
            "email": {"status": "completed", "version": "1", "reads": ["name"], "completed_at": 1_000.5},
            "score": {"status": "completed", "version": "1", "reads": ["email"], "completed_at": 1_000.6},
        }
        given: dict[str, Any] = {
            "status": "completed",
            "input": raw(row),
            "values": raw({"email": f"{name}@x", "score": len(name)}),
            "meta": raw(meta),
            "calls": 1,
            "cost": Decimal("0.010"),
        }
        return SettledRow(key=key_of(name), index=index, page=page, attempt=attempt, **{**given, **changes})

    def failed(self, row: dict[str, Any], index: int, *, page: int = 0, attempt: int = 1, **changes: Any) -> SettledRow:
        given: dict[str, Any] = {
            "status": "failed",
            "values": raw({"email": None}),
            "meta": raw({"email": {"status": "failed", "version": "1"}}),
            "error": Problem(code="resolver_failed", message=f"no luck with {row['name']}", column="email", row=index),
        }
        return self.completed(row, index, page=page, attempt=attempt, **{**given, **changes})

    def without_cells(self, row: dict[str, Any], index: int, **changes: Any) -> SettledRow:
        """As admission settles rows that never ran: cancelled ones, and dead-lettered ones with ``dead=True``."""
        dead = changes.pop("dead", False)
        given = {"page": 0, "attempt": 1, **changes}
        return SettledRow(
            key=key_of(row["name"]),
            index=index,
            status="failed" if dead else "cancelled",
            error=Problem(code="dead_lettered", message="its message died") if dead else None,
            **given,
        )

    def settled(self, *rows: SettledRow) -> RowsSettled:
        return RowsSettled(run_id=self.run_id, number=self.number, org="acme", play=self.play, dataset=self.dataset, rows=list(rows))

    async def settle(self, *rows: SettledRow) -> None:
        await self.bus.publish(self.settled(*rows), SHEETS_SETTLE)

    async def read(self, **slice_: Any) -> RowsRead:
        return await self.bus.ask(ReadRows(run_id=self.run_id, dataset=self.dataset, **slice_), SHEETS_ASKS, RowsRead)

    async def read_all(self, *, limit: int = 1000, meta: bool = False) -> list[ReadRow]:
        rows: list[ReadRow] = []
        offset: int | None = 0
        while offset is not None:
            answer = await self.read(offset=offset, limit=limit, meta=meta)
            rows += answer.rows
            offset = answer.next_offset
        return rows

    async def counts(self) -> RowsCommitted:
        return await self.bus.ask(ReadCounts(run_id=self.run_id, dataset=self.dataset), SHEETS_ASKS, RowsCommitted)


def accounted(counts: Counts) -> bool:
    return counts.terminal == counts.admitted


@pytest.fixture
def settings(broker_url: str, database_url: str) -> SheetWriterSettings:
    return SheetWriterSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, ask_timeout=400, ask_again=200)


@pytest.fixture
async def writer(settings: SheetWriterSettings) -> AsyncIterator[App]:
    app = App(settings)
    await app.start()
    yield app
    await app.stop()


@pytest.fixture
async def neighbours(settings: SheetWriterSettings) -> AsyncIterator[Neighbours]:
    async with Bus(settings, service="neighbours") as bus:
        heard = Neighbours(bus)
        await heard.listen()
        yield heard


@pytest.fixture
def new_run(writer: App, neighbours: Neighbours) -> Callable[..., SheetRun]:
    """A run over a sheet of this test's own; called again, a later run over the same sheet."""
    return partial(SheetRun, neighbours.bus, f"sheet{next(_datasets)}")
