"""Programs of steps: building them, and running one over a row without knowing who runs the steps.

Suspension and parking pass through: a program is run again from its start, and calls on record answer at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from rowmill.errors import DefinitionError, ToolFailed
from rowmill.names import column_name
from rowmill.resolvers import Program, Resolver, RunIf, Step, resolver_of, settled
from rowmill.row_views import with_outputs
from rowmill.tool_results import ToolResult

WATERFALL_MAX_WAIT = 60.0
"""Seconds that a leg of a waterfall waits for its provider (SPEC 1.3)."""

_MISSES = frozenset({"unreachable", "no_answer", "rate_limited", "payment", "unavailable"})
"""Categories of failures that say that the provider is exhausted or unavailable, not that this row is wrong."""

CallResolver = Callable[[Step, Any, Any], Awaitable[Any]]
"""Runs one step, which is never a program: (step, row as the step sees it, ctx) → its value. A step with ``waterfall`` waits 60 s at most; one of a
nested program is named ``outer.inner``."""


class WaterfallAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one leg of a waterfall ended. ``retry_after``: seconds."""

    leg: str
    status: Literal["completed", "no_result", "skipped", "unavailable"]
    provider: str = ""
    code: str = ""
    category: str = ""
    retry_after: float | None = None


@dataclass(slots=True)
class ProgramOutcome:
    """What a program gave. ``statuses``: per step, nested ones as ``outer.inner``. ``attempts``: of its waterfalls, in order."""

    value: Any = None
    statuses: dict[str, Literal["completed", "skipped", "missed"]] = field(default_factory=dict)
    attempts: list[WaterfallAttempt] = field(default_factory=list)


class StepsBuilder:
    """Steps so far. Each call gives a new builder, so a common beginning can be shared."""

    def __init__(self, waterfall: bool, steps: tuple[Step, ...] = ()) -> None:
        self._waterfall = waterfall
        self._steps = steps

    def step(self, name: str, resolver: Any, *, run_if: RunIf | None = None, else_value: Any = None) -> StepsBuilder:
        """Add a step; it sees the row with the output of every earlier step under that step's name.

        ``run_if`` false: the step is skipped and gives ``else_value``. Raises `DefinitionError` for a name that is taken.
        """
        column_name(name)
        if any(step.name == name for step in self._steps):
            raise DefinitionError(f"step {name!r} is there twice; give each step its own name")
        normal = resolver_of(resolver, f"step {name!r}")
        added = Step(name=name, resolver=normal, run_if=run_if, else_value=else_value)
        return StepsBuilder(self._waterfall, (*self._steps, added))

    def returns(self, function: Callable[[Any], Any]) -> Program:
        """End the program: its value is ``function(row)``, where the row holds every step's output."""
        if not self._steps:
            raise DefinitionError("a program needs at least one step before .returns(...)")
        resolver_of(function, "returns")
        program = Program(steps=self._steps, returns=function, waterfall=self._waterfall)
        return program.within_waterfall() if self._waterfall else program


def steps(*, continue_on_provider_unavailable: bool = False) -> StepsBuilder:
    """Begin a program of steps, used as a column's resolver or as a step of another program.

    With ``continue_on_provider_unavailable`` it is a waterfall: a leg whose provider is exhausted or unavailable is a recorded miss (its
    output is None), and the next leg runs.
    """
    return StepsBuilder(continue_on_provider_unavailable)


async def run_program(program: Program, row: Any, ctx: Any, call_resolver: CallResolver) -> ProgramOutcome:
    """Run the steps in order over one row.

    Errors of steps pass through, except the misses of a waterfall. Where the value is a `ToolResult`, its meta carries
    ``waterfall_attempts``.
    """
    outcome = ProgramOutcome()
    outputs: dict[str, Any] = {}
    for step in program.steps:
        seen = with_outputs(row, outputs)
        if step.run_if is not None and not await settled(step.run_if(seen)):
            outputs[step.name] = step.else_value
            outcome.statuses[step.name] = "skipped"
            if program.waterfall:
                outcome.attempts.append(WaterfallAttempt(leg=step.name, status="skipped"))
            continue
        outputs[step.name] = await _run_step(program, step, seen, ctx, call_resolver, outcome)
    value = await settled(program.returns(with_outputs(row, outputs)))
    if outcome.attempts and isinstance(value, ToolResult):
        meta = {**value.meta, "waterfall_attempts": msgspec.to_builtins(outcome.attempts)}
        value = msgspec.structs.replace(value, meta=meta)
    outcome.value = value
    return outcome


async def _run_step(program: Program, step: Step, seen: Any, ctx: Any, call_resolver: CallResolver, outcome: ProgramOutcome) -> Any:
    try:
        value = await _value_of(step, seen, ctx, call_resolver, outcome)
    except ToolFailed as error:
        if not (program.waterfall and is_miss(error)):
            raise
        outcome.statuses[step.name] = "missed"
        outcome.attempts.append(missed(step.name, error))
        return None
    outcome.statuses[step.name] = "completed"
    if program.waterfall:
        outcome.attempts.append(_answered(step.name, value))
    return value


async def _value_of(step: Step, seen: Any, ctx: Any, call_resolver: CallResolver, outcome: ProgramOutcome) -> Any:
    if step.resolver.program is None:
        return await call_resolver(step, seen, ctx)

    async def call_inner(inner: Step, seen: Any, ctx: Any) -> Any:
        return await call_resolver(replace(inner, name=f"{step.name}.{inner.name}"), seen, ctx)

    inner = await run_program(step.resolver.program, seen, ctx, call_inner)
    outcome.statuses.update({f"{step.name}.{name}": status for name, status in inner.statuses.items()})
    outcome.attempts.extend(msgspec.structs.replace(attempt, leg=f"{step.name}.{attempt.leg}") for attempt in inner.attempts)
    return inner.value


def is_miss(error: ToolFailed) -> bool:
    """Whether a failed call means that the provider is exhausted or unavailable, so that a waterfall goes on."""
    return error.failure is not None and (error.failure.category in _MISSES or error.failure.retryable)


def missed(leg: str, error: ToolFailed) -> WaterfallAttempt:
    """The record of a leg whose provider was unavailable."""
    failure = error.failure
    if failure is None:
        return WaterfallAttempt(leg=leg, status="unavailable", code=error.code)
    return WaterfallAttempt(
        leg=leg,
        status="unavailable",
        provider=failure.provider,
        code=failure.code,
        category=failure.category,
        retry_after=failure.retry_after,
    )


def _answered(leg: str, value: Any) -> WaterfallAttempt:
    if isinstance(value, ToolResult):
        return WaterfallAttempt(leg=leg, status=value.status, provider=value.tool.partition(".")[0])
    return WaterfallAttempt(leg=leg, status="no_result" if value is None else "completed")


__all__ = [
    "WATERFALL_MAX_WAIT",
    "CallResolver",
    "Program",
    "ProgramOutcome",
    "Resolver",
    "Step",
    "StepsBuilder",
    "WaterfallAttempt",
    "is_miss",
    "missed",
    "run_program",
    "steps",
]
