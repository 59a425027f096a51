"""Runs that are paused and resumed while something else is being done to them: their retry prepared, a resumption told."""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal

import asyncpg
import pytest
from structlog.testing import capture_logs
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows
from tests.integration.admission.played_retries import FAILED, ended, failing, prepared_in_vain, sent

from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.events import RunEvent
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.run_questions import PauseRun, ResumeRun, RunShown, RunSummary
from rowmill_contracts.runs import RunOptions
from rowmill_contracts.topology import ADMISSION_ASKS

pytestmark = pytest.mark.servers


def halts(neighbours: Neighbours, run_id: str) -> list[HaltRun]:
    return [halt for halt in neighbours.halts if halt.run_id == run_id]


def told(neighbours: Neighbours, run_id: str) -> list[RunEvent]:
    return [event for event in neighbours.events if isinstance(event, RunEvent) and event.run_id == run_id]


async def shown_waiting(neighbours: Neighbours, run_id: str, reason: str | None) -> RunSummary:
    """The run once it is shown to wait for that."""
    async with asyncio.timeout(20):
        while (summary := await neighbours.get(run_id)) is None or summary.waiting_for != reason:
            await asyncio.sleep(0.02)
    return summary


async def halt_owed(settings: AdmissionSettings, run_id: str) -> None:
    """Return once it is decided that the run is halted, and nobody has told the receipt-store."""
    owed = "SELECT count(*) FROM admission.owed WHERE run_id = $1 AND asked AND convert_from(body, 'UTF8')::json ->> 'action' = 'halt'"
    connection = await asyncpg.connect(settings.database_url)
    try:
        async with asyncio.timeout(20):
            while not await connection.fetchval(owed, run_id):
                await asyncio.sleep(0.02)
    finally:
        await connection.close()


@pytest.mark.parametrize("resumed", ["later", "while it is prepared"])
async def test_a_run_that_is_paused_while_its_retry_is_prepared_waits_until_it_is_resumed(
    neighbours: Neighbours, settings: AdmissionSettings, resumed: str
) -> None:
    run_id = new_run_id()
    neighbours.work = failing(FAILED)
    app = App(settings.model_copy(update={"ask_again": 0.5}))
    await app.start()
    try:
        await neighbours.start(run_id, rows=rows(500), options=RunOptions(budget=Decimal(3)))
        await ended(neighbours, run_id)
        bodies = len(neighbours.advanced)
        await prepared_in_vain(neighbours, run_id)
        pausing = asyncio.ensure_future(neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown))
        summary = await shown_waiting(neighbours, run_id, "pause")
        assert (summary.state, summary.retrying) == ("completed", True)
        if resumed == "later":
            neighbours.receipts_away = False
            await neighbours.until(lambda: any(event.waiting_for == "pause" for event in told(neighbours, run_id)))
            summary = await shown_waiting(neighbours, run_id, "pause")
            assert (summary.state, summary.retrying, summary.finished_at) == ("waiting", False, None)
            await pausing
            await neighbours.until(lambda: halts(neighbours, run_id)[-1].action == "halt")
            assert (len(neighbours.advanced), sent(neighbours, run_id)) == (bodies, Counter()), "nothing of it is worked"
            await neighbours.bus.ask(ResumeRun(run_id=run_id), ADMISSION_ASKS, RunShown)
        else:
            resuming = asyncio.ensure_future(neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Decimal(5)), ADMISSION_ASKS, RunShown))
            await shown_waiting(neighbours, run_id, None)
            neighbours.receipts_away = False
            await asyncio.gather(pausing, resuming)
        summary = await ended(neighbours, run_id, times=2)
        assert (summary.state, summary.counts.completed) == ("completed", 500)
        assert sent(neighbours, run_id) == dict.fromkeys([(index, 2) for index in FAILED], 1)
        last = max(halts(neighbours, run_id), key=lambda halt: halt.decision)
        assert (last.action, last.budget) == ("resume", Decimal(3 if resumed == "later" else 5)), "the newest decision is the last one"
    finally:
        neighbours.receipts_away = False
        await app.stop()


@pytest.mark.parametrize("before", ["running", "paused"])
async def test_a_pause_that_comes_while_a_resumption_waits_for_the_receipt_store_stands(
    neighbours: Neighbours, settings: AdmissionSettings, before: str
) -> None:
    """The receipt-store is told of it last."""
    run_id = new_run_id()
    neighbours.work = lambda _: []
    app = App(settings.model_copy(update={"ask_again": 0.5, "halt_timeout": 30.0}))  # a resumption that is tried again would be the later one
    await app.start()
    try:
        await neighbours.start(run_id, rows=rows(5))
        await neighbours.until(lambda: len(neighbours.sent(run_id)) == 5)
        if before == "paused":
            await neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown)
        neighbours.receipts_away = True
        resuming = asyncio.ensure_future(neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Decimal(5)), ADMISSION_ASKS, RunShown))
        await neighbours.until(lambda: any(halt.action == "resume" for halt in halts(neighbours, run_id)))
        pausing = asyncio.ensure_future(neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown))
        await halt_owed(settings, run_id)
        neighbours.receipts_away = False
        await asyncio.gather(resuming, pausing)
        assert max(halts(neighbours, run_id), key=lambda halt: halt.decision).action == "halt"
        assert (await shown_waiting(neighbours, run_id, "pause")).state == "waiting"
    finally:
        neighbours.receipts_away = False
        await app.stop()


async def test_a_resumption_that_is_tried_again_is_no_later_decision_than_a_pause_since(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    """Each is tried again for as long as the receipt-store is away."""
    run_id = new_run_id()
    neighbours.work = lambda _: []
    app = App(settings.model_copy(update={"ask_again": 0.5, "halt_timeout": 0.1}))
    await app.start()
    try:
        await neighbours.start(run_id, rows=rows(5))
        await neighbours.until(lambda: len(neighbours.sent(run_id)) == 5)
        neighbours.receipts_away = True
        with capture_logs() as logs:
            resuming = asyncio.ensure_future(neighbours.bus.ask(ResumeRun(run_id=run_id, budget=Decimal(5)), ADMISSION_ASKS, RunShown))
            await neighbours.until(lambda: halts(neighbours, run_id))
            pausing = asyncio.ensure_future(neighbours.bus.ask(PauseRun(run_id=run_id), ADMISSION_ASKS, RunShown))
            await halt_owed(settings, run_id)
            async with asyncio.timeout(20):
                while sum(log["event"] == "handler_waits" and log["outages"] == 3 for log in logs) < 2:
                    await asyncio.sleep(0.02)
        neighbours.receipts_away = False
        await asyncio.gather(resuming, pausing)
        decided = {halt.decision: halt.action for halt in halts(neighbours, run_id)}
        resumption, *since = (decided[number] for number in sorted(decided))
        assert (resumption, set(since)) == ("resume", {"halt"})
        assert (await shown_waiting(neighbours, run_id, "pause")).state == "waiting"
    finally:
        neighbours.receipts_away = False
        await app.stop()
