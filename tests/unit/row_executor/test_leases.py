"""Leases renewed on a thread of their own, and the watch over the loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from rowmill import steps
from rowmill.datasets import DatasetBuilder
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.runs import RunRecord
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.in_memory import MemoryAdmission
from rowmill_row_executor.leases import LeaseOwners, LeaseThread
from rowmill_row_executor.loop_watch import LoopWatch

from .conftest import until


class Renewals(MemoryAdmission):
    """Counts renewals."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed = self.odd = 0
        self.add(RunRecord(run_id="run", number=1, org="org", play="play", started_at=0))

    async def renew(self, run_id: str, term: int, lease_id: str) -> object:  # type: ignore[override]
        self.renewed += 1
        if self.odd:
            self.odd -= 1
            raise KeyError("nobody foresaw this")
        return await super().renew(run_id, term, lease_id)


@pytest.fixture
async def renewals() -> AsyncIterator[tuple[Renewals, LeaseThread]]:
    admission = Renewals()

    @asynccontextmanager
    async def opened() -> AsyncIterator[LeaseOwners]:
        yield admission  # type: ignore[misc]

    thread = LeaseThread(opened, SystemClock())
    thread.start()
    yield admission, thread
    await thread.stop()


async def test_a_lease_is_renewed_also_while_the_loop_is_held(renewals: tuple[Renewals, LeaseThread]) -> None:
    admission, thread = renewals
    taken = await admission.take("run", lease_id="mine")
    with thread.keeping(Lease("run", taken.term, "mine", 0.003), lambda: pytest.fail("it is ours")):
        while admission.renewed < 3:
            pass  # the loop is held on purpose
    assert admission.renewed >= 3


async def test_an_error_that_nobody_foresaw_does_not_end_renewing(renewals: tuple[Renewals, LeaseThread]) -> None:
    admission, thread = renewals
    taken = await admission.take("run", lease_id="mine")
    admission.odd = 2
    with thread.keeping(Lease("run", taken.term, "mine", 0.003), lambda: pytest.fail("it is ours")):
        await until(lambda: admission.renewed >= 5)


async def test_what_is_done_on_the_thread_and_fails_is_logged(renewals: tuple[Renewals, LeaseThread]) -> None:
    _, thread = renewals

    async def odd() -> None:
        raise KeyError("nobody foresaw this")

    with capture_logs() as logs:
        thread.call(lambda: thread.spawn(odd()))
        await until(lambda: any(entry["event"] == "lease_work_failed" for entry in logs))


async def test_who_lost_a_lease_is_told_on_its_own_loop(renewals: tuple[Renewals, LeaseThread]) -> None:
    admission, thread = renewals
    taken = await admission.take("run", lease_id="mine")
    lost = asyncio.Event()
    admission.expire("run")
    await admission.take("run", lease_id="another")
    with thread.keeping(Lease("run", taken.term, "mine", 0.003), lost.set):
        await asyncio.wait_for(lost.wait(), 10)


async def test_stopping_before_admission_answers_does_not_hang() -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[LeaseOwners]:
        await asyncio.Event().wait()
        yield MemoryAdmission()  # type: ignore[misc]

    thread = LeaseThread(never, SystemClock())
    thread.start()
    with thread.keeping(Lease("run", 1, "mine", 0.003), lambda: None):
        await asyncio.wait_for(thread.stop(), 10)


async def test_a_resolver_that_holds_the_loop_is_named() -> None:
    seen: list[str] = []
    watch = LoopWatch(SystemClock(), limit=1.0)

    def look(row: object) -> None:
        seen.append(watch.held_by(sys._getframe()))

    def deep(row: object) -> None:
        any(map(look, [row]))

    nested = steps().step("first", deep).returns(lambda row: 1)
    watch.know(DatasetBuilder("leads", [], None).with_column("slow", nested).program())  # type: ignore[arg-type]
    deep(None)
    assert seen == ["column 'slow' of dataset 'leads'"]
    assert "test_a_resolver" in watch.held_by(sys._getframe())
