"""The executor's neighbours in memory, for tests and for running plays without a broker. They keep the promises that the ports make, and forget
everything with the process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rowmill_contracts.receipts import Claim, ClaimAnswer, Completion, ConfirmAnswer, FailedCall, LeaseRef, StoreAnswer
from rowmill_contracts.rows import ReadRow, SettledRow, joined
from rowmill_contracts.runs import DatasetOpened, OpenDataset, ParkedRow, RecordedCall, ReleaseRun, RunRecord, RunTaken, TermAnswer
from rowmill_contracts.tools import CallItem, CallOutcome, ToolFailure
from rowmill_row_executor.ports import Asker, DatasetOfRun, Ticket

Answer = Callable[[Asker, CallItem], CallOutcome | Awaitable[CallOutcome]]


@dataclass(slots=True)
class HeldRun:
    """A run as its owner knows it. ``holder``: lease id of who drives it; empty: nobody. ``ending``: what the last release said."""

    record: RunRecord
    term: int = 0
    holder: str = ""
    ending: ReleaseRun | None = None
    calls: dict[int, RecordedCall] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.ending is not None and self.ending.outcome != "waiting"


class MemoryAdmission:
    """`Admission`. Leases do not run out by themselves: `expire` does that. Datasets are open until `close` is called."""

    def __init__(self) -> None:
        self.runs: dict[str, HeldRun] = {}
        self.opened: dict[tuple[str, str], OpenDataset] = {}
        self.closed: dict[tuple[str, str], DatasetOpened] = {}
        self.pages: dict[str, dict[int, list[msgspec.Raw]]] = {}
        self.sealed: dict[str, int] = {}
        self.later: list[tuple[str, str, int]] = []

    def add(self, record: RunRecord) -> HeldRun:
        held = self.runs[record.run_id] = HeldRun(record, calls={call.position: call for call in record.calls})
        return held

    def expire(self, run_id: str) -> None:
        """The lease's time is over; the next one who takes the run gets it."""
        self.runs[run_id].holder = ""

    def close(self, run_id: str, dataset: str, answer: DatasetOpened) -> None:
        self.closed[run_id, dataset] = answer

    def rows_of(self, input_id: str) -> list[Any]:
        """The rows of a staged input, decoded."""
        return [msgspec.json.decode(row) for page in sorted(self.pages[input_id]) for row in self.pages[input_id][page]]

    async def take(self, run_id: str, *, lease_id: str = "", read_only: bool = False) -> RunTaken:
        held = self.runs.get(run_id)
        if held is None:
            return RunTaken(outcome="unknown")
        record = msgspec.structs.replace(held.record, calls=[held.calls[position] for position in sorted(held.calls)])
        if read_only:
            return RunTaken(outcome="taken", run=record)
        if held.over:
            return RunTaken(outcome="over")
        if held.holder not in ("", lease_id):
            return RunTaken(outcome="busy")
        if held.holder != lease_id:
            held.holder = lease_id
            held.term += 1
        return RunTaken(outcome="taken", term=held.term, lease_seconds=8, run=record)

    async def renew(self, run_id: str, term: int, lease_id: str) -> TermAnswer:
        held = self.runs[run_id]
        return TermAnswer(held=held.term == term and held.holder == lease_id)

    async def record(self, run_id: str, term: int, calls: Sequence[RecordedCall]) -> TermAnswer:
        held = self.runs[run_id]
        if held.term != term or not held.holder:
            return TermAnswer(held=False)
        for call in calls:
            held.calls.setdefault(call.position, call)
        return TermAnswer(held=True)

    async def open_dataset(self, request: OpenDataset) -> DatasetOpened:
        if self.runs[request.run_id].term != request.term:
            return DatasetOpened(outcome="stale")
        self.opened.setdefault((request.run_id, request.dataset), request)
        return self.closed.get((request.run_id, request.dataset), DatasetOpened(outcome="open"))

    async def release(self, ending: ReleaseRun) -> TermAnswer:
        held = self.runs[ending.run_id]
        if held.term != ending.term or held.holder != ending.lease_id:
            return TermAnswer(held=False)
        held.holder = ""
        held.ending = ending
        return TermAnswer(held=True)

    async def stage(self, input_id: str, page: int, rows: Sequence[msgspec.Raw]) -> None:
        self.pages.setdefault(input_id, {})[page] = [row.copy() for row in rows]

    async def seal(self, input_id: str, *, pages: int, rows: int, digest: str) -> None:
        del pages, digest
        self.sealed[input_id] = rows

    async def advance_later(self, run_id: str, *, reason: str, wait_ms: int = 1000) -> None:
        self.later.append((run_id, reason, wait_ms))


class MemoryDesk:
    """`CallDesk` that has each call answered by a function, sync or async, as soon as the loop turns."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[CallItem] = []
        self._answer = answer
        self._under_way: set[asyncio.Task[None]] = set()

    def new_call_id(self) -> str:
        return f"call-{len(self.asked)}-{id(object())}"

    def ask(self, asker: Asker, shard: int, item: CallItem) -> asyncio.Future[CallOutcome]:
        del shard
        self.asked.append(item)
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._find(asker, item, future))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return future

    async def _find(self, asker: Asker, item: CallItem, future: asyncio.Future[CallOutcome]) -> None:
        try:
            found = self._answer(asker, item)
            outcome = await found if inspect.isawaitable(found) else found
        except Exception as error:  # the function is the test's: its error is what the caller gets
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(msgspec.structs.replace(outcome, call_id=item.call_id))


class MemoryStepReceipts:
    """`StepReceipts`. Leases do not run out by themselves, and nobody takes them. ``held``: lease id by key. ``halted``: why runs make no calls."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.claims: list[Claim] = []
        self.outputs: dict[str, tuple[bytes, float]] = {}
        self.failures: dict[tuple[str, str], ToolFailure] = {}
        self.held: dict[str, LeaseRef] = {}
        self.unknown: set[str] = set()
        self.halted: dict[str, str] = {}
        self._now = now
        self._dispatches = 0

    async def claim(self, claim: Claim, *, confirm: bool) -> ClaimAnswer:
        self.claims.append(claim)
        output = self.outputs.get(claim.key)
        if claim.run_id in self.halted:
            return ClaimAnswer(state="halted", reason=self.halted[claim.run_id])
        if output is not None and _serves(claim, output[1]):
            return ClaimAnswer(state="completed", output=msgspec.Raw(output[0]), completed_at=output[1])
        if (claim.key, claim.run_id) in self.failures:
            return ClaimAnswer(state="failed", failure=self.failures[claim.key, claim.run_id])
        if claim.key in self.unknown:
            return ClaimAnswer(state="unknown")
        if claim.key in self.held:
            return ClaimAnswer(state="held", wait_ms=1)
        self._dispatches += 1
        self.held[claim.key] = LeaseRef(key=claim.key, lease_id=claim.lease_id, dispatch=self._dispatches)
        return ClaimAnswer(state="granted", lease_id=claim.lease_id, dispatch=self._dispatches if confirm else 0)

    async def confirm(self, lease: LeaseRef) -> ConfirmAnswer:
        return ConfirmAnswer(state="confirmed", dispatch=self.held[lease.key].dispatch)

    async def complete(self, completion: Completion) -> StoreAnswer:
        self.held.pop(completion.key, None)
        self.outputs[completion.key] = (bytes(completion.output), self._now())
        return StoreAnswer(state="stored", completed_at=self._now())

    async def fail(self, failed: FailedCall) -> StoreAnswer:
        self.give_back(failed)
        return StoreAnswer(state="stored")

    def give_back(self, failed: FailedCall) -> None:
        self.held.pop(failed.key, None)
        if failed.outcome_unknown:
            self.unknown.add(failed.key)
        elif failed.final:
            self.failures[failed.key, failed.run_id] = failed.failure

    def release(self, lease: LeaseRef) -> None:
        self.held.pop(lease.key, None)

    @contextmanager
    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> Iterator[None]:
        del lease, on_lost
        yield


def _serves(claim: Claim, completed_at: float) -> bool:
    fresh = claim.fresh_for is None or completed_at + claim.fresh_for >= claim.started_at
    return completed_at >= claim.started_at or (fresh and not claim.force)


class MemorySettler:
    """`Settler` that is safe at once. ``settled``: the last outcome of each row, by index."""

    def __init__(self) -> None:
        self.settled: dict[tuple[str, str], dict[int, SettledRow]] = {}
        self.parked: list[tuple[DatasetOfRun, ParkedRow, str, bool]] = []

    def settle(self, of: DatasetOfRun, row: SettledRow, ticket: Ticket) -> None:
        self.settled.setdefault((of.run_id, of.dataset), {})[row.index] = row
        ticket.done()

    def park(self, of: DatasetOfRun, row: ParkedRow, ticket: Ticket, *, reason: str, halted: bool = False) -> None:
        self.parked.append((of, row, reason, halted))
        ticket.done()

    def values(self, run_id: str, dataset: str) -> list[dict[str, Any]]:
        """What the rows' columns came to, in input order."""
        rows = self.settled.get((run_id, dataset), {})
        return [msgspec.json.decode(rows[index].values) for index in sorted(rows)]


class MemorySheets:
    """`RowSource` over what a `MemorySettler` was given."""

    def __init__(self, settler: MemorySettler) -> None:
        self._settler = settler

    async def rows(self, run_id: str, dataset: str, offset: int, limit: int | None) -> AsyncIterator[ReadRow]:
        rows = self._settler.settled.get((run_id, dataset), {})
        for index in sorted(rows)[offset : None if limit is None else offset + limit]:
            row = rows[index]
            data = joined(row.input, row.values, shadows=row.shadows)
            yield ReadRow(index=index, key=row.key, mark=row.status, data=data, attempt=row.attempt, error=row.error)

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        return [msgspec.json.decode(row.data) async for row in self.rows(run_id, dataset, page_number * size, size)]

    async def count(self, run_id: str, dataset: str) -> int:
        return len(self._settler.settled.get((run_id, dataset), {}))
