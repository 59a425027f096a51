"""Processes that run steps against one receipt-store in memory, which may not answer, answer late, or give their leases to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.fakes.receipts import MemoryReceipts

from rowmill.errors import AskDied, AskTimeout
from rowmill.runtime.clock import Clock, SystemClock
from rowmill_contracts.envelope import Message
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import ClaimReceipts, Complete, Confirm, Fail, LeaseRef, Release
from rowmill_contracts.tools import CallOutcome
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.step_calling import StepCall, StepIds
from rowmill_row_executor.step_receipts import BusStepReceipts
from rowmill_row_executor.step_runner import StepRunner

RUN = "run-1"
HOLD = 0.1


class Now:
    """The store's clock."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def __call__(self) -> float:
        return self.time


class Asks:
    """A bus to a store in memory. ``lose``: what is not answered, though it is carried out; ``drop``: what is not even that. ``deadly``: the run
    whose claims no store survives; ``unconfirmed``: what confirmations of the run of that name end in; ``odd``: runs whose requests end in an error
    that nobody foresaw. All waits for ``go``.
    """

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.asked: list[Message] = []
        self.lose: list[type[Message]] = []
        self.drop: list[type[Message]] = []
        self.deadly = ""
        self.unconfirmed: type[Exception] | None = None
        self.odd: dict[str, type[Exception]] = {}
        self.go = asyncio.Event()
        self.go.set()

    async def ask(self, message: Message, key: str, answer: type[Any], *, timeout: float | None = None) -> Any:
        del key, timeout
        await asyncio.sleep(0)
        self.asked.append(message)
        await self.go.wait()
        if type(message) in self.drop:
            self.drop.remove(type(message))
            raise AskTimeout("no answer")
        if isinstance(message, ClaimReceipts) and any(claim.run_id == self.deadly for claim in message.claims):
            raise AskDied("dead-lettered")
        if isinstance(message, Confirm) and self.unconfirmed is not None and any(lease.run_id == "unconfirmed" for lease in message.leases):
            raise self.unconfirmed("dead-lettered")
        for run, error in self.odd.items():
            if isinstance(message, Complete | Fail | Release) and run in str(message):
                raise error("odd")
        reply = self.store.answer(message)
        if type(message) in self.lose:
            self.lose.remove(type(message))
            raise AskTimeout("no answer")
        assert isinstance(reply, answer)
        return reply

    def of(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.asked)


class Leases:
    """`StepLeases` of one process, without a thread. ``lost``: what is to be called where a lease moved, by lease id."""

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.names: list[str] = []
        self.lost: dict[str, Callable[[], None]] = {}

    async def present(self, instead_of: str = "") -> str:
        if not self.names or self.names[-1] == instead_of:
            self.names.append(f"presence-{id(self)}-{len(self.names)}")
            self.store.answer(KeepPresence(presence=self.names[-1]))
        return self.names[-1]

    @contextmanager
    def keeping(self, lease: LeaseRef, on_lost: Callable[[], None]) -> Iterator[None]:
        self.lost[lease.lease_id] = on_lost
        yield
        del self.lost[lease.lease_id]


class Executor:
    """One process's steps. All share the ``store``."""

    def __init__(self, store: MemoryReceipts, threads: ThreadPoolExecutor, clock: Clock) -> None:
        self.asks = Asks(store)
        self.leases = Leases(store)
        self.receipts = BusStepReceipts(self.asks, self.leases, clock, holder="executor", gather=0.001)
        self.runner = StepRunner(self.receipts, SystemClock(), threads, hold=HOLD, patience=10.0, again=5.0, body_limit=20.0, row_limit=20.0)

    async def run(self, fn: Callable[[], Any], *, run: str = RUN, **facts: Any) -> CallOutcome:
        asker = Asker(run, "org", "play", 0.0)
        return await self.runner.run(asker, step_of(asker, fn, **facts))


def step_of(asker: Asker, fn: Callable[[], Any], **facts: Any) -> StepCall:
    """The same step, whatever its function does here."""
    given: dict[str, Any] = {"semantic_key": None, "stale_after": None, "blocking": False, "effect": "idempotent"} | facts
    return replace(StepIds("a test").prepare(asker, "work", int, **given), function=fn)
