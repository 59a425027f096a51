"""Runs that wait for a person: halted (a spent budget, an unpaid provider), paused, resumed (DESIGN.md, "Stop and halt").

The receipt-store is told through what the run owes, in the order in which it was decided; decisions are numbered, so that a late copy of one changes
nothing. What was made of a command is kept in the commit that makes it, by its message: one that is tried again by its sender, delivered again or
handed to another instance makes nothing more, whatever was decided since.
A resumption takes two commits: first the receipt-store is to lift the halt, and once it has, the rows that waited are due.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import msgspec

from rowmill.runtime.clock import new_id
from rowmill.runtime.db import Connection, Database
from rowmill_admission.charges import Charges
from rowmill_admission.decisions import checked, decision_on, raised
from rowmill_admission.endings import read_counts, want_advance
from rowmill_admission.owed import Owed, Postman
from rowmill_admission.resuming import too_little
from rowmill_admission.running import Runs
from rowmill_admission.runs import Run, told
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import commands, owed
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_admission.store.commands import Heard
from rowmill_contracts.budgets import limits_of
from rowmill_contracts.charges import RunCharges
from rowmill_contracts.events import Control
from rowmill_contracts.run_questions import GetRun, PauseRun, ResumeRun, RunShown
from rowmill_contracts.topology import CONTROL

PAUSE: Final = "pause"
HALTED_CALL: Final = "halted:"
"""What a body waits for that a call found its run halted begins so."""


async def halt_run(connection: Connection, run: Run, reason: str) -> list[str]:
    """Halt a locked run that goes on; nothing where it is over, stopped or halted already. Returns the runs that owe messages."""
    if run.over or run.stopped or run.halt_reason is not None:
        return []
    await run_store.halt(connection, run.run_id, reason)
    await tell_halt(connection, run, reason)
    return [run.run_id]


async def tell_halt(connection: Connection, run: Run, reason: str) -> None:
    """What a locked run owes that is halted now."""
    await owed.add(
        connection,
        told(run, "waiting", await read_counts(connection, run), waiting_for=reason),
        await decision_on(connection, run, "halt", reason),
        Owed(run.run_id, Control(run_id=run.run_id, action="halt", reason=reason), "", CONTROL),
    )


async def halt_if_out_of_time(connection: Connection, run_id: str) -> list[str]:
    """Halt a run whose wall time is over, whatever it is doing. (Its calls are refused by the receipt-store from that moment on.)"""
    run = await run_store.lock(connection, run_id)
    wall_time = None if run is None else limits_of(run.options.budget).wall_time
    if run is None or wall_time is None or not await run_store.is_out_of_time(connection, run_id):
        return []
    return await halt_run(connection, run, f"budget: wall time, {wall_time:g} s are over")


class Halting:
    """``on_change``: called with a run that was paused or resumed, after the commit."""

    def __init__(
        self, database: Database, postman: Postman, runs: Runs, charges: Charges, settings: AdmissionSettings, on_change: Callable[[str], None]
    ) -> None:
        self._database = database
        self._postman = postman
        self._runs = runs
        self._charges = charges
        self._settings = settings
        self._on_change = on_change

    async def pause(self, request: PauseRun, message_id: str) -> RunShown:
        """Halt a run until somebody resumes it; one whose retry is being prepared, as soon as it is. Once for each message.

        Raises:
            UnavailableError: the receipt-store has not confirmed the halt yet; asking again is safe.

        """
        identity = message_id or new_id()

        async def work(connection: Connection) -> list[str]:
            run = await run_store.lock(connection, request.run_id)
            if run is None or await commands.find(connection, run.run_id, identity) is not None:
                return []
            await commands.note(connection, run.run_id, identity)
            if run.stopped or (run.over and not run.retrying):
                return []
            if run.retrying:
                await run_store.note_halt(connection, run.run_id, PAUSE)
                return []
            if run.halt_reason is not None and await commands.resumption(connection, run.run_id) is not None:
                await owed.add(connection, await decision_on(connection, run, "halt", run.halt_reason))
                return [run.run_id]
            return await halt_run(connection, run, PAUSE)

        await self._database.transact(work)
        return await self._done(request.run_id)

    async def resume(self, request: ResumeRun, message_id: str) -> RunShown:
        """Lift the halt in the receipt-store, then publish the rows that waited. Once for each message; refused where the run would stop at once
        again for its budget.

        Raises:
            Rejected: the budget cannot be kept.
            UnavailableError: the receipt-store has not lifted the halt yet; asking again is safe.

        """
        checked(request.budget)
        charges = await self._charges.at_once([request.run_id])
        told_of = None if charges is None else charges[request.run_id]
        identity = message_id or new_id()

        async def lift(connection: Connection) -> Heard:
            run = await run_store.lock(connection, request.run_id)
            if run is None:
                return Heard()
            known = await commands.find(connection, run.run_id, identity)
            if known is not None:
                return known
            return await commands.note(connection, run.run_id, identity, await self._lift(connection, run, request, told_of))

        heard = await self._database.transact(lift)
        if heard.refused:
            return RunShown(run=(await self._runs.shown(GetRun(run_id=request.run_id))).run, refused=heard.refused)
        number = heard.decision
        if number is not None:
            await self._told(request.run_id)
            await self._database.transact(lambda connection: _go_on(connection, request.run_id, number))
        return await self._done(request.run_id)

    async def _lift(self, connection: Connection, run: Run, request: ResumeRun, charges: RunCharges | None) -> Heard:
        """Decide that a locked run is resumed, under the number that is answered, or why it is not. Who resumes it while that is being done for
        another, with no other budget, waits for the same decision.
        """
        budget = request.budget
        if run.stopped or (run.over and not run.retrying):
            return Heard()
        if run.retrying:  # nobody was told of a halt yet
            await run_store.note_halt(connection, run.run_id, None)
        if budget is None and (run.retrying or not _waits_for_a_person(run)):
            return Heard()
        before = run.options
        if budget is not None:
            run = dataclasses.replace(run, options=msgspec.structs.replace(run.options, budget=raised(run.options.budget, budget)))
        if charges is not None:
            reason = run.halt_reason or (run.waiting_for or "").removeprefix(HALTED_CALL)
            worked = await run_store.worked_seconds(connection, run.run_id)
            if refused := too_little(run.run_id, reason, limits_of(run.options.budget), charges, worked):
                return Heard(refused=refused)
        under_way = await commands.resumption(connection, run.run_id)
        if under_way is not None and run.options == before:
            return Heard(under_way)
        if budget is not None:
            await run_store.set_options(connection, run.run_id, run.options)
        await owed.add(connection, await decision_on(connection, run, "resume", "resumed"))
        return Heard(await run_store.newest_decision(connection, run.run_id))

    async def _told(self, run_id: str) -> None:
        await self._postman.sent(
            run_id, within=self._settings.halt_timeout, otherwise=f"the receipt-store does not answer, so run {run_id} stays as it is for now"
        )

    async def _done(self, run_id: str) -> RunShown:
        await self._told(run_id)
        self._on_change(run_id)
        return await self._runs.shown(GetRun(run_id=run_id))


async def _go_on(connection: Connection, run_id: str, decided: int) -> None:
    """The receipt-store has lifted the halt under this number: let the run go on, unless it was halted anew since."""
    run = await run_store.lock(connection, run_id)
    if run is None or await run_store.newest_decision(connection, run_id) != decided:
        return
    await commands.carried_out(connection, run_id, decided)
    if run.over or run.stopped or not _waits_for_a_person(run):
        return
    await run_store.resume(connection, run_id)
    await wait_store.end_halts(connection, run_id)
    await owed.add(
        connection,
        told(run, "running" if run.term else "queued", await read_counts(connection, run)),
        Owed(run_id, Control(run_id=run_id, action="resume"), "", CONTROL),
    )
    await want_advance(connection, run, "resumed")


def _waits_for_a_person(run: Run) -> bool:
    return run.halt_reason is not None or (run.waiting_for or "").startswith(HALTED_CALL)
