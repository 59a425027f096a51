"""What computes a value: a resolver, whatever form the author gave it, and a program of steps.

Resolvers may be sync or async functions, lambdas, partials, callable objects or `steps` programs, of ``(row)`` or ``(row, ctx)``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

from rowmill.errors import DefinitionError
from rowmill.tools import FunctionTool, HttpTool, Tool

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

StaleAfter = float | Callable[[Any], float | None]
"""Seconds, or a function of the cell's value that gives the next expiry in seconds, or None for never."""

RunIf = Callable[[Any], Any]
"""Whether to run, from the row; anything true runs. May be async."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """What `column` declared. None: not declared."""

    version: str | None = None
    stale_after: StaleAfter | None = None
    blocking: bool = False
    recompute: bool = False
    recompute_on_error: bool = False


class Column(Generic[Parameters, Value]):
    """A resolver function with its options; made by ``@column(...)``. Calling it calls the function."""

    def __init__(self, function: Callable[Parameters, Value], options: ColumnOptions) -> None:
        self.function = function
        self.options = options
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Parameters.args, **named: Parameters.kwargs) -> Value:
        return self.function(*arguments, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a program. ``waterfall``: it is a leg of one, so its calls wait for a provider for 60 s at most."""

    name: str
    resolver: Resolver
    run_if: RunIf | None = None
    else_value: Any = None
    waterfall: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in order and what they return. ``waterfall``: a leg whose provider is unavailable is a miss, and the next leg runs."""

    steps: tuple[Step, ...]
    returns: Callable[[Any], Any]
    waterfall: bool = False

    def within_waterfall(self) -> Program:
        """The same program as a leg of a waterfall."""
        return replace(self, steps=tuple(_leg(step) for step in self.steps))


def _leg(step: Step) -> Step:
    inner = step.resolver.program
    resolver = step.resolver if inner is None else replace(step.resolver, program=inner.within_waterfall())
    return replace(step, waterfall=True, resolver=resolver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """A resolver in its one normal form: a ``function`` or a ``program``.

    ``takes_context``: called with (row, ctx) instead of (row). ``blocking``: to be run in a thread. ``label`` names it for people.
    """

    label: str
    function: Callable[..., Any] | None = None
    program: Program | None = None
    takes_context: bool = False
    blocking: bool = False
    options: ColumnOptions = ColumnOptions()

    def start(self, row: Any, ctx: Any) -> Any:
        """Call the function; the value may be awaitable. A program is run with `rowmill.steps.run_program` instead."""
        if self.function is None:
            raise DefinitionError(f"{self.label} is a program of steps: run it with run_program")
        return self.function(row, ctx) if self.takes_context else self.function(row)


async def call_inline(resolver: Resolver, row: Any, ctx: Any) -> Any:
    """The resolver's value, computed here and awaited where it is awaitable."""
    return await settled(resolver.start(row, ctx))


async def settled(value: Any | Awaitable[Any]) -> Any:
    """The value, awaited where it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def resolver_of(given: Any, label: str) -> Resolver:
    """The resolver that an author gave, in its normal form. Raises `DefinitionError` with advice for what is none."""
    if isinstance(given, Resolver):
        return given
    if isinstance(given, Program):
        return Resolver(label=label, program=given)
    if isinstance(given, Column):
        inner = resolver_of(given.function, label)
        return replace(inner, options=given.options, blocking=_checked_blocking(inner, given.options, label))
    if isinstance(given, FunctionTool | Tool) or (isinstance(given, type) and issubclass(given, HttpTool)):
        raise DefinitionError(f"{label}: a tool is no resolver; call it: lambda row, ctx: ctx.call({getattr(given, '__name__', 'tool')}, ...)")
    if hasattr(given, "returns") and hasattr(given, "step"):
        raise DefinitionError(f"{label}: the steps have no end; add .returns(lambda row: ...)")
    if isinstance(given, type) or not callable(given):
        raise DefinitionError(f"{label}: a resolver is a function of (row) or (row, ctx) or a program of steps, not {given!r}")
    return Resolver(label=label, function=given, takes_context=takes_context(given, label))


def _checked_blocking(resolver: Resolver, options: ColumnOptions, label: str) -> bool:
    if options.blocking and inspect.iscoroutinefunction(resolver.function):
        raise DefinitionError(f"{label}: an async resolver cannot be blocking; write it with def, or leave blocking out")
    return options.blocking


def takes_context(function: Callable[..., Any], label: str) -> bool:
    """Whether a resolver is one of (row, ctx). A second argument with a default is the context only if it is named ``ctx``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not tell; they take a row
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters) or len(required) > 2:
        raise DefinitionError(f"{label}: a resolver takes (row) or (row, ctx), but this one needs {_signature(function)}")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    if not positional:
        raise DefinitionError(f"{label}: a resolver takes (row) or (row, ctx), but this one takes {_signature(function)}")
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "ctx")


def _signature(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function))
