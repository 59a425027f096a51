"""Runs that wait for a person: halted (a spent budget, an unpaid provider), paused, resumed (DESIGN.md, "Stop and halt").

The receipt-store is told through what the run owes, in the order in which it was decided; decisions are numbered, so that a late copy of one changes
nothing.
A resumption takes two commits: first the receipt-store is to lift the halt, and once it has, the rows that waited are due.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from rowmill.runtime.db import Connection, Database
from rowmill_admission.charges import Charges
from rowmill_admission.decisions import checked, decision_on, raised
from rowmill_admission.endings import read_counts, want_advance
from rowmill_admission.owed import Owed, Postman
from rowmill_admission.resuming import too_little
from rowmill_admission.running import Runs
from rowmill_admission.runs import Run, told
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import owed
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_contracts.budgets import limits_of
from rowmill_contracts.events import Control
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.runs import GetRun, PauseRun, ResumeRun, RunShown
from rowmill_contracts.topology import CONTROL

PAUSE: Final = "pause"
HALTED_CALL: Final = "halted:"
"""What a body waits for that a call found its run halted begins so."""
REMEMBERED: Final = 1000
"""Requests to resume of which it is remembered what was decided."""

_decode = msgspec.json.Decoder(HaltRun).decode


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
        self._resuming: set[str] = set()
        """Runs whose halt the receipt-store lifts, or has lifted, and which do not go on yet."""
        self._decided: OrderedDict[str, int | None] = OrderedDict()
        """What was decided on a request to resume, by its message: tried again, or come again, it is no later decision than a pause since."""

    async def pause(self, request: PauseRun) -> RunShown:
        """Halt a run until somebody resumes it; one whose retry is being prepared, as soon as it is.

        Raises:
            UnavailableError: the receipt-store has not confirmed the halt yet; asking again is safe.

        """

        async def work(connection: Connection) -> list[str]:
            run = await run_store.lock(connection, request.run_id)
            if run is None or run.stopped or (run.over and not run.retrying):
                return []
            if run.retrying:
                await run_store.note_halt(connection, run.run_id, PAUSE)
                return []
            if run.halt_reason is not None and await self._is_being_resumed(connection, run.run_id):
                await owed.add(connection, await decision_on(connection, run, "halt", run.halt_reason))
                return [run.run_id]
            return await halt_run(connection, run, PAUSE)

        await self._database.transact(work)
        return await self._done(request.run_id)

    async def resume(self, request: ResumeRun, message_id: str) -> RunShown:
        """Lift the halt in the receipt-store, then publish the rows that waited. Refused where the run would stop at once again for its budget.

        Raises:
            Rejected: the budget cannot be kept.
            UnavailableError: the receipt-store has not lifted the halt yet; asking again is safe.

        """
        budget = request.budget
        checked(budget)
        charges = await self._charges.at_once([request.run_id])

        async def lift(connection: Connection) -> int | str | None:
            """The number of the decision that the receipt-store is told; None: there is none to tell. Or why the run cannot go on."""
            run = await run_store.lock(connection, request.run_id)
            if run is None or run.stopped or (run.over and not run.retrying):
                return None
            if run.retrying:  # nobody was told of a halt yet
                await run_store.note_halt(connection, run.run_id, None)
            if budget is None and (run.retrying or not _waits_for_a_person(run)):
                return None
            if budget is not None:
                run = dataclasses.replace(run, options=msgspec.structs.replace(run.options, budget=raised(run.options.budget, budget)))
            if charges is not None:
                reason = run.halt_reason or (run.waiting_for or "").removeprefix(HALTED_CALL)
                worked = await run_store.worked_seconds(connection, run.run_id)
                if refused := too_little(run.run_id, reason, limits_of(run.options.budget), charges[run.run_id], worked):
                    return refused
            if budget is not None:
                await run_store.set_options(connection, run.run_id, run.options)
            await owed.add(connection, await decision_on(connection, run, "resume", "resumed"))
            return await run_store.newest_decision(connection, run.run_id)

        async def go_on(connection: Connection, decided: int) -> None:
            run = await run_store.lock(connection, request.run_id)
            if run is None or run.over or run.stopped or not _waits_for_a_person(run):
                return
            if await run_store.newest_decision(connection, run.run_id) != decided:
                return  # it was halted anew since, or somebody else resumes it
            await run_store.resume(connection, run.run_id)
            await wait_store.end_halts(connection, run.run_id)
            await owed.add(
                connection,
                told(run, "running" if run.term else "queued", await read_counts(connection, run)),
                Owed(run.run_id, Control(run_id=run.run_id, action="resume"), "", CONTROL),
            )
            await want_advance(connection, run, "resumed")

        if message_id in self._decided:
            decided: int | str | None = self._decided[message_id]
        else:
            decided = await self._database.transact(lift)
            if isinstance(decided, str):
                return RunShown(run=(await self._runs.shown(GetRun(run_id=request.run_id))).run, refused=decided)
            self._remember(message_id, decided)
        if isinstance(decided, int):
            number = decided
            self._resuming.add(request.run_id)
            await self._told(request.run_id)
            await self._database.transact(lambda connection: go_on(connection, number))
            self._resuming.discard(request.run_id)
        return await self._done(request.run_id)

    async def _is_being_resumed(self, connection: Connection, run_id: str) -> bool:
        """Whether a halted run is about to go on, as far as is known, unless it is decided now that it stays as it is."""
        newest = await owed.newest_question(connection, run_id)
        return run_id in self._resuming if newest is None else _decode(newest).action == "resume"

    def _remember(self, message_id: str, decided: int | None) -> None:
        if message_id:
            self._decided[message_id] = decided
            if len(self._decided) > REMEMBERED:
                self._decided.popitem(last=False)

    async def _told(self, run_id: str) -> None:
        await self._postman.sent(
            run_id, within=self._settings.halt_timeout, otherwise=f"the receipt-store does not answer, so run {run_id} stays as it is for now"
        )

    async def _done(self, run_id: str) -> RunShown:
        await self._told(run_id)
        self._on_change(run_id)
        return await self._runs.shown(GetRun(run_id=run_id))


def _waits_for_a_person(run: Run) -> bool:
    return run.halt_reason is not None or (run.waiting_for or "").startswith(HALTED_CALL)
