"""The owner of runs, over the bus."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rowmill.runtime.bus import Bus
from rowmill_contracts.runs import (
    AdvanceRun,
    DatasetOpened,
    InputPage,
    InputSealed,
    OpenDataset,
    RecordCalls,
    RecordedCall,
    ReleaseRun,
    RenewRun,
    RunTaken,
    TakeRun,
    TermAnswer,
)
from rowmill_contracts.topology import ADMISSION_ASKS, EXECUTOR_ADVANCE, INPUTS

_SHORT_DELAY_MS = 1000


class BusAdmission:
    """`Admission` by messages; every request is idempotent, and asked again after a silence."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def take(self, run_id: str, *, lease_id: str = "", read_only: bool = False) -> RunTaken:
        return await self._bus.ask(TakeRun(run_id=run_id, lease_id=lease_id, read_only=read_only), ADMISSION_ASKS, RunTaken)

    async def renew(self, run_id: str, term: int, lease_id: str) -> TermAnswer:
        return await self._bus.ask(RenewRun(run_id=run_id, term=term, lease_id=lease_id), ADMISSION_ASKS, TermAnswer)

    async def record(self, run_id: str, term: int, calls: Sequence[RecordedCall]) -> TermAnswer:
        return await self._bus.ask(RecordCalls(run_id=run_id, term=term, calls=list(calls)), ADMISSION_ASKS, TermAnswer)

    async def open_dataset(self, request: OpenDataset) -> DatasetOpened:
        return await self._bus.ask(request, ADMISSION_ASKS, DatasetOpened)

    async def release(self, ending: ReleaseRun) -> TermAnswer:
        return await self._bus.ask(ending, ADMISSION_ASKS, TermAnswer)

    async def stage(self, input_id: str, page: int, rows: Sequence[msgspec.Raw]) -> None:
        await self._bus.publish(InputPage(input_id=input_id, page=page, rows=list(rows)), INPUTS)

    async def seal(self, input_id: str, *, pages: int, rows: int, digest: str) -> None:
        await self._bus.publish(InputSealed(input_id=input_id, pages=pages, rows=rows, digest=digest), INPUTS)

    async def advance_later(self, run_id: str, *, reason: str, wait_ms: int = _SHORT_DELAY_MS) -> None:
        exchange = "rowmill.delay.1s" if wait_ms <= _SHORT_DELAY_MS else "rowmill.delay.5s"
        await self._bus.publish(AdvanceRun(run_id=run_id, reason=reason), EXECUTOR_ADVANCE, exchange=exchange)
