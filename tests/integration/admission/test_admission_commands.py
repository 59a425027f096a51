"""Commands on a run (pause, resume, cancel, retry) that come again after a later one, or after the death of who heard them: they undo nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from itertools import permutations
from typing import Any

import pytest
from tests.integration.admission.admission_neighbours import Neighbours, new_run_id, rows
from tests.integration.admission.played_retries import failing

from rowmill.errors import UnavailableError
from rowmill.runtime.deliveries import Delivery
from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.budgets import Limits
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.rows import RowTasks, SettledRow
from rowmill_contracts.run_questions import PauseRun, ResumeRun
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import ADMISSION_ASKS, ADMISSION_RUNS

pytestmark = pytest.mark.servers

COMMANDS: dict[str, Callable[[str], Message]] = {
    "pause": lambda run_id: PauseRun(run_id=run_id),
    "resume": lambda run_id: ResumeRun(run_id=run_id),
    "resume with a budget": lambda run_id: ResumeRun(run_id=run_id, budget=Decimal(7)),
    "cancel": lambda run_id: RunStop(run_id=run_id, reason="enough"),
    "retry": lambda run_id: RunRetry(run_id=run_id),
}
STATES = ("runs", "is paused", "is over")
STANDS = (
    "SELECT state, waiting_for, halt_reason, stop_reason, decision, options ->> 'budget' AS budget, attempt, retrying,"
    " (SELECT count(*) FROM owed o WHERE o.run_id = r.run_id) AS owed FROM runs r WHERE run_id = $1"
)


@asynccontextmanager
async def instance(settings: AdmissionSettings) -> AsyncIterator[App]:
    app = App(settings)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def deliver(app: App, message: Message, message_id: str) -> None:
    """Hand a message to the instance, as the bus does, again where it says that somebody is away, and return when it would be acknowledged."""
    assert app._parts is not None
    handlers, body = app._parts.handlers, encode(message)
    async with asyncio.timeout(20):
        while True:
            try:
                if isinstance(message, PauseRun | ResumeRun):
                    return await handlers.handle_ask(Delivery(message, body, ADMISSION_ASKS, message_id=message_id))
                return await handlers.handle_run(Delivery(message, body, ADMISSION_RUNS, message_id=message_id))
            except UnavailableError:
                await asyncio.sleep(0.05)


async def stands(app: App, run_id: str) -> dict[str, Any]:
    """How the run stands once nothing is owed of it and its body has come to where it waits."""
    assert app._parts is not None
    async with asyncio.timeout(20):
        while True:
            found = await app._parts.database.fetchrow(STANDS, run_id)
            if found is not None and not found["owed"] and found["state"] not in {"queued", "running"}:
                return dict(found)
            await asyncio.sleep(0.02)


def works(over: set[str]) -> Callable[[RowTasks], list[SettledRow]]:
    """Of runs that are to be over a row fails at its first attempt; all other rows stay out."""
    first = failing({0})
    return lambda tasks: first(tasks) if tasks.run_id in over and tasks.rows[0].attempt == 1 else []


async def test_a_command_that_comes_again_after_a_later_one_changes_nothing(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    """Each after each other one, in each state of the run; again at an instance that was started since, which knows what is stored alone."""
    cases = {new_run_id(): (state, *pair) for state in STATES for pair in permutations(COMMANDS, 2)}
    some_at_a_time = asyncio.Semaphore(8)
    neighbours.work = works({run_id for run_id, (state, *_) in cases.items() if state == "is over"})

    async def twice(app: App, run_id: str) -> dict[str, Any]:
        async with some_at_a_time:
            return await in_turn(app, run_id, *cases[run_id])

    async def in_turn(app: App, run_id: str, state: str, first: str, later: str) -> dict[str, Any]:
        await neighbours.start(run_id, rows=rows(2))
        await stands(app, run_id)
        if state == "is paused":
            await deliver(app, PauseRun(run_id=run_id), "before")
        if state == "is over":
            await neighbours.until(lambda: neighbours.ended(run_id))
        await stands(app, run_id)
        await deliver(app, COMMANDS[first](run_id), "first")
        await stands(app, run_id)
        await deliver(app, COMMANDS[later](run_id), "later")
        return await stands(app, run_id)

    async with instance(settings) as app:
        stood = dict(zip(cases, await asyncio.gather(*(twice(app, run_id) for run_id in cases)), strict=True))
    changed = {}
    async with instance(settings) as app:
        for run_id, (state, first, later) in cases.items():
            await deliver(app, COMMANDS[first](run_id), "first")
            now = await stands(app, run_id)
            if now != stood[run_id]:
                changed[f"{state}: {first}, {later}, {first}"] = (stood[run_id], now)
    assert not changed
    assert {(found["state"], found["waiting_for"]) for found in stood.values()} >= {("waiting", "pause"), ("waiting", "dataset:leads")}


@asynccontextmanager
async def paused(neighbours: Neighbours, settings: AdmissionSettings) -> AsyncIterator[tuple[App, str]]:
    """A run whose rows stay out, and which waits to be resumed."""
    run_id = new_run_id()
    neighbours.work = lambda _tasks: []
    async with instance(settings.model_copy(update={"drain_timeout": 0.0})) as app:
        await neighbours.start(run_id, rows=rows(2))
        await stands(app, run_id)
        await deliver(app, PauseRun(run_id=run_id), "before")
        yield app, run_id


async def in_vain(neighbours: Neighbours, app: App, message: ResumeRun, message_id: str) -> None:
    """Hand over a command of which the receipt-store cannot be told for now; who does it is killed once it is stored what is made of it."""
    neighbours.receipts_away = True
    assert app._parts is not None
    handling = asyncio.ensure_future(deliver(app, message, message_id))
    async with asyncio.timeout(20):
        while not await app._parts.database.fetch("SELECT FROM commands WHERE run_id = $1 AND identity = $2", message.run_id, message_id):
            await asyncio.sleep(0.01)
    handling.cancel()
    with suppress(asyncio.CancelledError):
        await handling


def decided(neighbours: Neighbours, run_id: str) -> list[str]:
    """What the receipt-store was told of the run, in the order in which it was decided."""
    told = {halt.decision: halt.action for halt in neighbours.halts if halt.run_id == run_id}
    return [told[number] for number in sorted(told)]


async def test_a_pause_stands_that_comes_after_the_death_of_who_resumed_the_run(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    """The receipt-store had lifted the halt by then, and the resumption's message comes again."""
    async with paused(neighbours, settings) as (app, run_id):
        await in_vain(neighbours, app, ResumeRun(run_id=run_id), "resumed")
    neighbours.receipts_away = False
    async with instance(settings) as app:
        assert (await stands(app, run_id))["waiting_for"] == "pause"
        assert decided(neighbours, run_id) == ["halt", "resume"]
        await deliver(app, PauseRun(run_id=run_id), "paused again")
        stood = await stands(app, run_id)
        await deliver(app, ResumeRun(run_id=run_id), "resumed")
        await deliver(app, PauseRun(run_id=run_id), "paused once more")
        assert (await stands(app, run_id)) == stood
        assert (stood["waiting_for"], decided(neighbours, run_id)) == ("pause", ["halt", "resume", "halt"])
        await deliver(app, ResumeRun(run_id=run_id), "resumed anew")
        assert (await stands(app, run_id))["waiting_for"] == "dataset:leads"
    assert decided(neighbours, run_id)[3:] == ["resume"], "that of before was given up, and stands for no other"


async def test_a_resumption_goes_on_after_the_death_of_who_began_it(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    async with paused(neighbours, settings) as (app, run_id):
        await in_vain(neighbours, app, ResumeRun(run_id=run_id), "resumed")
    neighbours.receipts_away = False
    async with instance(settings) as app:
        await deliver(app, ResumeRun(run_id=run_id), "resumed")
        assert (await stands(app, run_id))["waiting_for"] == "dataset:leads"
    assert decided(neighbours, run_id) == ["halt", "resume"]


async def test_who_resumes_a_run_that_is_being_resumed_decides_nothing_more_unless_it_is_about_its_budget(
    neighbours: Neighbours, settings: AdmissionSettings
) -> None:
    async with paused(neighbours, settings) as (app, run_id):
        for number in range(3):
            await in_vain(neighbours, app, ResumeRun(run_id=run_id), f"resumed {number}")
        for number in range(2):
            await in_vain(neighbours, app, ResumeRun(run_id=run_id, budget=Decimal(7)), f"raised {number}")
        neighbours.receipts_away = False
        for message_id in ("resumed 0", "raised 1"):
            await deliver(app, ResumeRun(run_id=run_id), message_id)
        assert (await stands(app, run_id))["waiting_for"] == "dataset:leads"
    assert decided(neighbours, run_id) == ["halt", "resume", "resume"]


async def test_a_resumption_that_was_carried_out_resumes_nothing_that_waits_anew(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    async with paused(neighbours, settings) as (app, run_id):
        await deliver(app, ResumeRun(run_id=run_id), "resumed")
        await stands(app, run_id)
        assert app._parts is not None
        await app._parts.database.execute("UPDATE runs SET waiting_for = 'halted:budget: calls' WHERE run_id = $1", run_id)  # so its body released it
        stood = await stands(app, run_id)
        await deliver(app, ResumeRun(run_id=run_id), "resumed")
        assert await stands(app, run_id) == stood


async def test_a_resumption_that_was_refused_stays_so(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    async with paused(neighbours, settings) as (app, run_id):
        assert app._parts is not None
        await app._parts.database.execute("UPDATE runs SET halt_reason = 'budget: calls, 5 are made' WHERE run_id = $1", run_id)
        neighbours.charges[run_id] = RunCharges(run_id=run_id, version=1, calls=5, counted_calls=5)
        halting = app._parts.handlers._halting
        too_small = ResumeRun(run_id=run_id, budget=Limits(calls=3))
        refused = (await halting.resume(too_small, "too small")).refused
        assert "--budget calls=6" in refused
        await deliver(app, ResumeRun(run_id=run_id, budget=Limits(calls=9)), "enough")
        stood = await stands(app, run_id)
        assert (await halting.resume(too_small, "too small")).refused == refused
        assert await stands(app, run_id) == stood
        assert '"calls":9' in stood["budget"].replace(" ", "")


async def test_commands_are_forgotten_after_a_while(neighbours: Neighbours, settings: AdmissionSettings) -> None:
    async with paused(neighbours, settings) as (app, run_id):
        assert app._parts is not None
        repair, database = app._parts.repair, app._parts.database
        kept = "SELECT array_agg(identity ORDER BY identity) FROM commands WHERE run_id = $1"
        await deliver(app, PauseRun(run_id=run_id), "later")
        await database.execute("UPDATE commands SET heard_at = now() - interval '1 year' WHERE run_id = $1 AND identity = 'before'", run_id)
        await repair.look()
        assert [row[0] for row in await database.fetch(kept, run_id)] == [["later"]]
