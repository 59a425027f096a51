"""What the engine needs from the world. The service's adapters speak to the broker; a test's fakes, or a harness, do without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rowmill.runtime.rest import Rest
from rowmill_contracts.receipts import Claim, ClaimAnswer, Completion, ConfirmAnswer, FailedCall, LeaseRef, StoreAnswer
from rowmill_contracts.rows import ReadRow, SettledRow
from rowmill_contracts.runs import DatasetOpened, Force, OpenDataset, ParkedRow, RecordedCall, ReleaseRun, RunTaken, TermAnswer
from rowmill_contracts.tools import CallItem, CallOutcome


@dataclass(frozen=True, slots=True)
class Asker:
    """The run that calls are made for. ``started_at``: seconds since the epoch, by the database's clock."""

    run_id: str
    org: str
    play: str
    started_at: float
    force: Force | None = None


class CallDesk(Protocol):
    """Where tool calls are handed in."""

    def new_call_id(self) -> str:
        """An id that no other call of this process has."""

    def ask(self, asker: Asker, shard: int, item: CallItem) -> asyncio.Future[CallOutcome]:
        """Hand in a call; its answer is the future's result. Cancel the future to stop waiting (the call itself goes on)."""


class StepReceipts(Protocol):
    """The receipts of steps, claimed by this process."""

    async def claim(self, claim: Claim, *, confirm: bool) -> ClaimAnswer:
        """Claim a key, or hear what is stored for it, however long that takes. Raises `UnavailableError` where this process stops."""

    async def confirm(self, lease: LeaseRef) -> ConfirmAnswer:
        """Right before a step that must not be repeated, likewise. Raises what its asking ended in where no receipt-store survives it."""

    async def complete(self, completion: Completion) -> StoreAnswer:
        """Store a result; returns once it is stored, however long that takes."""

    async def fail(self, failed: FailedCall) -> StoreAnswer:
        """Store a failure, likewise."""

    def give_back(self, failed: FailedCall) -> None:
        """The step was cut off: store that, sooner or later."""

    def release(self, lease: LeaseRef) -> None:
        """The step was not begun: give its lease back, sooner or later."""

    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> AbstractContextManager[None]:
        """Renew a running lease inside the block. ``on_lost`` is called on this loop once somebody else has it."""


@dataclass(frozen=True, slots=True)
class DatasetOfRun:
    """Whose rows these are."""

    run_id: str
    number: int
    org: str
    play: str
    dataset: str


class Ticket(Protocol):
    """What waits for rows to be safe."""

    @property
    def rest(self) -> Rest | None:
        """Of a suspect, whose row is watched."""

    def done(self) -> None:
        """One row more is stored or parked, confirmed."""

    def fail(self, error: BaseException) -> None:
        """The engine could not work a row; its page must be worked again."""

    def keep(self, row: ParkedRow, *, reason: str, halted: bool) -> bool:
        """Whether the page itself has this row, which must wait, come again; else it is to be parked."""


class Settler(Protocol):
    """Where rows that ended, or must wait, are handed in. Each ticket is told once its row's message is confirmed."""

    def settle(self, of: DatasetOfRun, row: SettledRow, ticket: Ticket) -> None: ...

    def park(self, of: DatasetOfRun, row: ParkedRow, ticket: Ticket, *, reason: str, halted: bool = False) -> None: ...


class RowSource(Protocol):
    """Where rows of datasets are read back from; also a `PageReader` for handles. Raises `NeighbourAway` where nobody answers."""

    def rows(self, run_id: str, dataset: str, offset: int, limit: int | None) -> AsyncIterator[ReadRow]: ...

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]: ...

    async def count(self, run_id: str, dataset: str) -> int: ...


class Admission(Protocol):
    """The owner of runs. Each request may be repeated; each carries the term where only the lease's holder may ask."""

    async def take(self, run_id: str, *, lease_id: str = "", read_only: bool = False) -> RunTaken: ...

    async def record(self, run_id: str, term: int, calls: Sequence[RecordedCall]) -> TermAnswer: ...

    async def open_dataset(self, request: OpenDataset) -> DatasetOpened: ...

    async def renew(self, run_id: str, term: int, lease_id: str) -> TermAnswer: ...

    async def release(self, ending: ReleaseRun) -> TermAnswer: ...

    async def stage(self, input_id: str, page: int, rows: Sequence[msgspec.Raw]) -> None:
        """Store one page of an input, confirmed."""

    async def seal(self, input_id: str, *, pages: int, rows: int, digest: str) -> None:
        """Say that the input is whole, confirmed."""

    async def advance_later(self, run_id: str, *, reason: str, wait_ms: int = 1000) -> None:
        """Have the body run again in about ``wait_ms``, confirmed; at most 5 s, and then it looks again."""
