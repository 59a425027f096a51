"""``ctx`` in a resolver: tool calls of one row, what they cost, and the rule that a row that waits runs no further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import structlog

from rowmill.context import RowContext, Tools
from rowmill.durations import Duration, optional_seconds
from rowmill.encoding.values import HandleFactory
from rowmill.errors import UsageError
from rowmill.resolvers import Step
from rowmill.runtime.clock import Clock
from rowmill.runtime.rest import goes_on
from rowmill.steps import WATERFALL_MAX_WAIT
from rowmill.tool_results import ToolResult
from rowmill_contracts.budgets import Budget as BudgetOption
from rowmill_contracts.budgets import limits_of
from rowmill_contracts.tools import CallOutcome, Effect
from rowmill_row_executor.cells import CellMeta
from rowmill_row_executor.endings import Parked
from rowmill_row_executor.ports import Asker, CallDesk
from rowmill_row_executor.step_calling import StepIds, refuse_within_step, value_of
from rowmill_row_executor.step_runner import StepRunner
from rowmill_row_executor.tool_calling import charge_of, prepare, result_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Run:
    """`RunFacts`: the run that is going on."""

    id: str


@dataclass(frozen=True, slots=True)
class RunBudget:
    """`Budget`: the run's money, of all that its ``given`` budget limits."""

    given: BudgetOption = None

    @property
    def limit(self) -> Decimal | None:
        """What the run may spend; None: not limited."""
        return limits_of(self.given).money


class RowCalls:
    """The calls of one row while it is being worked.

    ``asked``: since when the call is waiting that the row was parked for, else None. ``paid``: cost by receipt of the calls that this row paid for.
    ``parked``: set once a call must wait; from then on every further call of the row ends it again, whatever author code did with the first.
    ``column``: the one that is worked now.
    """

    __slots__ = (
        "_charges",
        "_clock",
        "_ids",
        "_in_hand",
        "_make_handle",
        "_providers",
        "_steps",
        "asked",
        "asker",
        "caller",
        "column",
        "desk",
        "paid",
        "parked",
    )

    def __init__(
        self, asker: Asker, desk: CallDesk, steps: StepRunner, caller: str, clock: Clock, asked: float | None, make_handle: HandleFactory
    ) -> None:
        self.asker = asker
        self.desk = desk
        self.caller = caller
        self.column = ""
        self.asked = asked
        self._steps = steps
        self._ids: StepIds | None = None
        self._make_handle = make_handle
        self.paid: dict[str, Decimal] = {}
        self.parked: Parked | None = None
        self._clock = clock
        self._in_hand: set[str] = set()
        self._providers: list[str] = []
        self._charges: list[Decimal] = []

    def check(self) -> None:
        """Raise `Parked` again if author code went on after it."""
        if self.parked is not None:
            raise self.parked

    async def execute(
        self,
        *,
        tool: Any,
        input: Any,  # noqa: A002 - the authoring surface names it so
        id: str | None,  # noqa: A002 - likewise
        force: bool,
        stale_after: Duration | None,
        timeout: Duration | None,
        max_wait: float | None,
    ) -> ToolResult[Any]:
        """Make a call and wait for its answer. Raises what `result_of` raises, and `UsageError` for an id that is in hand in this row."""
        self.check()
        refuse_within_step()
        call = prepare(
            self.asker,
            self.desk.new_call_id(),
            tool=tool,
            input=input,
            caller=self.caller,
            asked=self._clock.now() if self.asked is None else self.asked,
            id=id,
            force=force,
            stale_after=stale_after,
            timeout=timeout,
            max_wait=max_wait,
        )
        if call.name in self._in_hand:
            raise UsageError(f"call id {call.name!r} is used twice at once in one row; give each call its own id=")
        self._in_hand.add(call.name)
        try:
            outcome = await self.desk.ask(self.asker, call.shard, call.item)
        finally:
            self._in_hand.discard(call.name)
        await goes_on()
        self._note(call.tool.provider.name, outcome)
        try:
            return result_of(call, outcome)
        except Parked as parked:
            if self.parked is None:
                self.parked = parked
            raise

    async def step(
        self,
        id: str,  # noqa: A002 - the authoring surface names it so
        fn: Callable[[], Any],
        *,
        within: str,
        semantic_key: Any,
        stale_after: Duration | None,
        blocking: bool,
        effect: Effect,
    ) -> Any:
        """Run a step, or get its stored result. ``within``: the step of the column's program that has it.

        Raises what `value_of` raises, and `UsageError` for an id that is in hand in this column, or in that step of it.
        """
        self.check()
        refuse_within_step()
        column = f"{self.column}\n{within}" if within else self.column  # which no column's name is
        if self._ids is None:  # few rows have steps
            self._ids = StepIds("one column of one row")
        step = self._ids.prepare(
            self.asker,
            id,
            fn,
            caller=self.caller,
            column=column,
            semantic_key=semantic_key,
            stale_after=stale_after,
            blocking=blocking,
            effect=effect,
        )
        with self._ids.in_hand(column, step):
            outcome = await self._steps.run(self.asker, step)
            await goes_on()
        self._answered(outcome)
        try:
            return value_of(step, outcome, self._make_handle, asked=self._clock.now() if self.asked is None else self.asked)
        except Parked as parked:
            if self.parked is None:
                self.parked = parked
            raise

    def account(self, meta: CellMeta) -> None:
        """Put what was called and paid since the last time into a cell."""
        if self._providers:
            meta.provider = ",".join(self._providers)
            self._providers = []
        if self._charges:
            meta.calls = len(self._charges)
            meta.cost = sum(self._charges, Decimal(0))
            self._charges = []

    def _note(self, provider: str, outcome: CallOutcome) -> None:
        if provider not in self._providers:
            self._providers.append(provider)
        charge = charge_of(outcome)
        if charge is not None and charge[0] not in self.paid:
            self.paid[charge[0]] = charge[1]
            self._charges.append(charge[1])
        self._answered(outcome)

    def _answered(self, outcome: CallOutcome) -> None:
        if self.asked is not None and outcome.completed_at is not None and outcome.completed_at > self.asked:
            self.asked = None  # the call that the row was parked for is answered; later calls have not waited yet


class RowTools(Tools):
    """``ctx.tools`` of a row. ``max_wait``: seconds that a leg of a waterfall waits for a provider that does not serve."""

    __slots__ = ("_calls", "_max_wait")

    def __init__(self, calls: RowCalls, max_wait: float | None) -> None:
        self._calls = calls
        self._max_wait = max_wait

    async def execute(
        self,
        *,
        tool: Any,
        input: Any,  # noqa: A002 - the authoring surface names it so
        id: str | None = None,  # noqa: A002 - likewise
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Any]:
        max_wait = min((limit for limit in (optional_seconds(wait), self._max_wait) if limit is not None), default=None)
        return await self._calls.execute(tool=tool, input=input, id=id, force=force, stale_after=stale_after, timeout=timeout, max_wait=max_wait)


class RowCtx(RowContext):
    """What a resolver is given. ``within``: the step of its column's program that it is given to."""

    __slots__ = ("_budget", "_calls", "_run", "_tools", "_within")

    def __init__(self, calls: RowCalls, run: Run, budget: RunBudget, *, within: str = "", max_wait: float | None = None) -> None:
        self._calls = calls
        self._run = run
        self._budget = budget
        self._within = within
        self._tools = RowTools(calls, max_wait)

    @property
    def tools(self) -> Tools:
        return self._tools

    @property
    def run(self) -> Run:
        return self._run

    @property
    def budget(self) -> RunBudget:
        return self._budget

    async def step(
        self,
        id: str,  # noqa: A002 - the authoring surface names it so
        fn: Callable[[], Any],
        *,
        semantic_key: Any = None,
        stale_after: Duration | None = None,
        blocking: bool = False,
        effect: Effect = "idempotent",
    ) -> Any:
        return await self._calls.step(
            id, fn, within=self._within, semantic_key=semantic_key, stale_after=stale_after, blocking=blocking, effect=effect
        )

    def log(self, message: str, **fields: Any) -> None:
        log.info("play_log", run_id=self._run.id, row=self._calls.caller, message=message, fields=fields)

    def of_step(self, step: Step) -> RowCtx:
        """The same row's context in a step of a program; calls of a leg of a waterfall wait for their provider for 60 s at most."""
        return RowCtx(self._calls, self._run, self._budget, within=step.name, max_wait=WATERFALL_MAX_WAIT if step.waterfall else None)
