"""Columns: a named resolver with its version and what rules out reuse of its cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rowmill.durations import Duration, seconds
from rowmill.names import column_name
from rowmill.resolvers import Column, ColumnOptions, Parameters, Program, Resolver, RunIf, StaleAfter, Value, resolver_of
from rowmill.versions import column_version

__all__ = ["Column", "ColumnSpec", "column", "column_spec", "column_version"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """A column of a dataset, ready to run.

    ``version``: as declared, else a digest of the resolver's code (SPEC 2.5). ``stale_after``: seconds, or a function of the value.
    ``recompute``: never reuse a cell; ``recompute_on_error``: nor one that failed. ``persisted``: its name does not start with ``_``.
    """

    name: str
    resolver: Resolver
    version: str
    run_if: RunIf | None = None
    else_value: Any = None
    stale_after: StaleAfter | None = None
    recompute: bool = False
    recompute_on_error: bool = False

    @property
    def persisted(self) -> bool:
        return not self.name.startswith("_")

    @property
    def blocking(self) -> bool:
        return self.resolver.blocking

    def expiry_after(self, value: Any) -> float | None:
        """Seconds until a cell of this value is stale; None: never."""
        if callable(self.stale_after):
            expiry = self.stale_after(value)
            return None if expiry is None else seconds(expiry)
        return self.stale_after


def column(
    *,
    stale_after: Duration | Callable[[Any], float | None] | None = None,
    version: str | None = None,
    blocking: bool = False,
    recompute: bool = False,
    recompute_on_error: bool = False,
) -> Callable[[Callable[Parameters, Value]], Column[Parameters, Value]]:
    """Give a resolver function its options.

    ``stale_after``: after that long a cell is computed anew (default: never). ``version``: change it to compute every cell anew; without it
    a change of the code does. ``blocking``: a sync function that waits, run in a thread. ``recompute``: compute in every run;
    ``recompute_on_error``: compute again where the cell failed.
    """
    options = ColumnOptions(
        version=None if version is None else str(version),
        stale_after=_stale(stale_after),
        blocking=blocking,
        recompute=recompute,
        recompute_on_error=recompute_on_error,
    )

    def attach(function: Callable[Parameters, Value]) -> Column[Parameters, Value]:
        resolver_of(Column(function, options), getattr(function, "__qualname__", "column"))
        return Column(function, options)

    return attach


def column_spec(
    name: str,
    resolver: Any,
    *,
    run_if: RunIf | None = None,
    else_value: Any = None,
    version: str | None = None,
    stale_after: Duration | Callable[[Any], float | None] | None = None,
    recompute: bool | None = None,
    recompute_on_error: bool | None = None,
) -> ColumnSpec:
    """A column from what ``with_column`` was given; what is given here wins over what ``@column`` declared. Raises `DefinitionError`."""
    normal = resolver_of(resolver, f"column {column_name(name)!r}")
    options = normal.options
    declared = version if version is not None else options.version
    staleness = _stale(stale_after) if stale_after is not None else options.stale_after
    if staleness is None and normal.program is not None:
        staleness = shortest_stale_after(normal.program)
    return ColumnSpec(
        name=name,
        resolver=normal,
        version=column_version(normal, run_if=run_if, else_value=else_value) if declared is None else f"={declared}",
        run_if=run_if,
        else_value=else_value,
        stale_after=staleness,
        recompute=options.recompute if recompute is None else recompute,
        recompute_on_error=options.recompute_on_error if recompute_on_error is None else recompute_on_error,
    )


def shortest_stale_after(program: Program) -> float | None:
    """A program's cell is as fresh as its shortest-lived step, so that a step's ``stale_after`` counts in a program too.

    A ``stale_after`` that is a function speaks of the step's own value, which the cell does not hold, so it does not count.
    """
    found: list[float] = []
    for step in program.steps:
        own = step.resolver.options.stale_after
        inner = None if step.resolver.program is None else shortest_stale_after(step.resolver.program)
        found.extend(limit for limit in (own, inner) if isinstance(limit, float))
    return min(found, default=None)


def _stale(stale_after: Duration | Callable[[Any], float | None] | None) -> StaleAfter | None:
    if stale_after is None or callable(stale_after):
        return stale_after
    return seconds(stale_after)
