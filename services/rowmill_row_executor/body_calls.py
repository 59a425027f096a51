"""The calls of one run of a body: on record, under way, or waiting; and when the body has come to where it can only wait.

`BodyContext` makes the calls, `BodyDriver` ends the body. Nothing here knows what a call does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from rowmill.errors import NonDeterministicPlay, Suspended, UnavailableError
from rowmill_contracts.envelope import NULL
from rowmill_contracts.runs import RecordedCall
from rowmill_row_executor.ports import Admission
from rowmill_row_executor.replay import MetCall, Replay
from rowmill_row_executor.step_calling import refuse_within_step

_QUIET_TURNS = 8
"""Turns of the loop without a call after which a body counts as waiting. Branches that `asyncio.gather` has just started need a few of them; too
few would only open their datasets one after the other."""

_STRAGGLERS = 1.0
"""Seconds that branches of a body get to come to their recorded calls, where another branch is already past the record: a branch may be waiting for
something of its own (a thread, a file)."""


class LeaseLost(Suspended):
    """Another executor has the run, or it has ended: the body is dropped and says nothing more."""


class BodyCalls:
    """Meets calls with the record, keeps what is new, and knows what the body waits for.

    ``term``: 0 for a read-only replay, which records nothing and lets no new call begin.
    """

    def __init__(self, run_id: str, term: int, replay: Replay, admission: Admission) -> None:
        self.run_id = run_id
        self.term = term
        self.waiting_for: list[str] = []
        self.again_ms: int | None = None
        self.found = False
        self.lost = False
        self.fatal: Exception | None = None
        self.outage: UnavailableError | None = None
        self._replay = replay
        self._admission = admission
        self._unwritten: list[RecordedCall] = []
        self._writing = asyncio.Lock()
        self._held: list[tuple[MetCall, asyncio.Future[None]]] = []
        self._stuck: set[asyncio.Future[Any]] = set()
        self._under_way = 0
        self._activity = 0
        self._moved = asyncio.Event()
        self._ended = False

    # ---- calls ------------------------------------------------------------------------------------------------------------------------

    async def meet(self, kind: str, name: str, request: str = "") -> MetCall:
        """Begin a call. Returns at once what is on record; a new call begins only after the whole record was met again."""
        if self._ended:
            raise Suspended(self.run_id)
        refuse_within_step()
        self._move()
        try:
            met = self._replay.meet(kind, name, request, asyncio.current_task())
        except Exception as error:
            self.fatal = error
            raise
        if self._replay.exhausted:
            self._let_go()
        if met.recorded is None:
            if self.read_only:
                await self.never()
            if not self._replay.exhausted:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._held.append((met, turn))
                await turn
        return met

    def find(self, kind: str, name: str, request: str = "") -> MetCall | None:
        """The call if it is on record, else None: for the second half of a call, whose first half was met."""
        met = self._replay.meet(kind, name, request, asyncio.current_task())
        if self._replay.exhausted:
            self._let_go()
        return met if met.recorded is not None else None

    def keep(self, met: MetCall, result: msgspec.Raw = NULL) -> None:
        """Put a new call on record, at the latest before the next one has an effect."""
        self._unwritten.append(self._replay.record(met, result))

    async def write(self) -> None:
        """Store what was kept. Raises `LeaseLost`."""
        async with self._writing:
            calls, self._unwritten = self._unwritten, []
            if calls and not (await self._admission.record(self.run_id, self.term, calls)).held:
                self.lose()

    async def wait_for(self, what: str) -> NoReturn:
        """The body waits for something outside; it will be dropped here and run again."""
        self.waiting_for.append(what)
        await self.never()

    async def never(self) -> NoReturn:
        """Does not return: the body is dropped while it stands here."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stuck.add(future)
        try:
            await future
        finally:
            self._stuck.discard(future)
        raise Suspended(self.run_id)

    def lose(self) -> NoReturn:
        """Another term rules: what this body asks for has no effect any more."""
        self.lease_lost()
        raise LeaseLost(self.run_id)

    def lease_lost(self) -> None:
        """The lease keeper says so."""
        self.lost = self._ended = True
        self._moved.set()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """While something is being asked for, the body is not standing still. Where nobody answers, the body is dropped, and run again later."""
        self._under_way += 1
        try:
            yield
        except UnavailableError as error:
            self.outage = error
            self._ended = True
            raise Suspended(self.run_id) from error
        finally:
            self._under_way -= 1
            self._move()

    def again_in(self, wait_ms: int) -> None:
        """What the body waits for says when to look again."""
        self.again_ms = wait_ms if self.again_ms is None else min(wait_ms, self.again_ms)

    def changed(self, what: str) -> NonDeterministicPlay:
        """The error of a replay that finds the world changed under it."""
        self.fatal = NonDeterministicPlay(what)
        self._move()
        return self.fatal

    async def captured(self) -> NoReturn:
        """The replay has come to what it was to find."""
        self.found = True
        self._move()
        await self.never()

    # ---- where the body stands --------------------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return self.term == 0

    @property
    def moves(self) -> int:
        """How often the body did something here; -1 while a call of its is under way, which has its own limit."""
        return -1 if self._under_way else self._activity

    async def standing_still(self) -> None:
        """Return once the body can only wait: for what is in ``waiting_for``, or because it went another way than the record (``fatal``)."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            if self._ended or self.found or self.fatal is not None:
                return
            if self._under_way or not await self._quiet():
                continue
            if self._held or (self.waiting_for and self._replay.one_branch and not self._replay.exhausted):
                if not self._replay.one_branch and await self._moves_within(_STRAGGLERS):
                    continue
                self.fatal = self._replay.contradiction(str(self._held[0][0]) if self._held else self.waiting_for[0])
                return
            if self.waiting_for or (self.read_only and self._stuck):
                return

    def check_all_met(self, met: str) -> None:
        """Raise `NonDeterministicPlay` if the body came to ``met`` past a call on record."""
        if not self._replay.exhausted:
            raise self._replay.contradiction(met)

    def end(self) -> None:
        """Drop the body's calls: whatever it does from now on, none of them goes on."""
        self._ended = True
        for future in (*self._stuck, *(turn for _, turn in self._held)):
            future.cancel()

    async def _quiet(self) -> bool:
        before = self._activity
        for _ in range(_QUIET_TURNS):
            await asyncio.sleep(0)
            if self._activity != before:
                self._moved.set()
                return False
        return True

    async def _moves_within(self, seconds: float) -> bool:
        """Whether the body makes a call within that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def _move(self) -> None:
        self._activity += 1
        self._moved.set()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for _, turn in held:
            if not turn.done():
                turn.set_result(None)
