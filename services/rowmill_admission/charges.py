"""What runs were charged, as the receipt-store tells it, whose books are the only ones (docs/adr/0022). Kept here as it was last heard, for when it
does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import structlog

from rowmill.errors import AskDied, MalformedMessage, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill.runtime.db import Database
from rowmill_admission.runs import OVER, Run
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import runs as run_store
from rowmill_contracts.charges import AskCharges, ChargesTold, RunCharges
from rowmill_contracts.events import RunEvent
from rowmill_contracts.topology import RECEIPTS_SETTLE

log = structlog.get_logger()


MOST_RUNS: Final = 1000
"""In one question."""


@dataclass(slots=True, eq=False)
class _Question:
    """Runs that are asked for together. ``told``, or why not; neither before it was asked."""

    run_ids: set[str] = field(default_factory=set)
    told: Mapping[str, RunCharges] | None = None
    error: Exception | None = None

    @property
    def asked(self) -> bool:
        return self.told is not None or self.error is not None


class Charges:
    """One per process."""

    def __init__(self, database: Database, bus: Bus, clock: Clock, settings: AdmissionSettings) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._silent = False
        self._silent_until = 0.0
        self._next = _Question()
        self._one_at_a_time = asyncio.Lock()

    async def learn(self, run_ids: Sequence[str], *, within: float | None = None) -> dict[str, RunCharges]:
        """What these runs, at most a thousand, were charged by now. ``within``: seconds (default: as long as any question waits).

        Raises:
            UnavailableError: the receipt-store does not answer. AskDied, MalformedMessage: it cannot, and asking again will not help.

        """
        if not run_ids:
            return {}
        told = await self._bus.ask(AskCharges(run_ids=list(run_ids)), RECEIPTS_SETTLE, ChargesTold, timeout=within)
        await run_store.store_charges(self._database, told.runs)
        return {each.run_id: each for each in told.runs}

    async def at_once(self, run_ids: Sequence[str]) -> Mapping[str, RunCharges] | None:
        """The same for somebody who waits for an answer. None: the receipt-store is silent; then nobody waits for it for a while, and after that
        one at a time finds out whether it does, since who waits here holds up others.
        """
        patience, now = self._settings.charges_patience, self._clock.monotonic()
        if now < self._silent_until:
            return None
        if self._silent:
            self._silent_until = now + patience
        try:
            told = await self.learn(run_ids, within=patience)
        except (UnavailableError, AskDied, MalformedMessage) as error:
            self._silent, self._silent_until = True, self._clock.monotonic() + self._settings.charges_pause
            log.warning("charges_not_told", error=str(error))
            return None
        self._silent, self._silent_until = False, 0.0
        return told

    async def _learn_with_others(self, run_id: str) -> RunCharges:
        """What the run was charged. Whoever comes while a question is under way shares the next one: while the receipt-store is away, each of the
        many runs that end would leave questions of its own in the queue of the leases.
        """
        if len(self._next.run_ids) >= MOST_RUNS:
            self._next = _Question()
        question = self._next
        question.run_ids.add(run_id)
        async with self._one_at_a_time:
            if not question.asked:
                self._next = _Question() if question is self._next else self._next
                try:
                    question.told = await self.learn(sorted(question.run_ids))
                except (UnavailableError, AskDied, MalformedMessage) as error:
                    question.error = error
                except BaseException:
                    question.error = UnavailableError("whoever asked for the charges was stopped")
                    raise
        if question.told is None:
            raise question.error or UnavailableError("the charges were not told")
        return question.told[run_id]

    async def booked(self, event: RunEvent) -> RunEvent:
        """An event that says how a run ended, or that it waits for a person, with what the run was charged by now. It is told late rather than with
        less: the run itself does not wait. Told twice, it may say more the second time. Other events say what was last heard.

        Raises:
            UnavailableError: the receipt-store does not answer.

        """
        if event.state not in OVER and (event.state != "waiting" or (event.waiting_for or "").startswith("dataset:")):
            return event
        try:
            told = await self._learn_with_others(event.run_id)
        except (AskDied, MalformedMessage) as error:
            log.warning("charges_not_told", run_id=event.run_id, error=str(error))
            return event
        counts = msgspec.structs.replace(event.counts, calls=told.calls, cost=told.cost)
        return msgspec.structs.replace(event, counts=counts, cost=told.cost)


def charged(run: Run, told: Mapping[str, RunCharges] | None) -> Run:
    """The run with what was told of it, unless something newer was heard before it was read."""
    found = None if told is None else told.get(run.run_id)
    if found is None or found.version < run.charges_version:
        return run
    return replace(run, charged=found.cost, calls=found.calls, charges_version=found.version)
