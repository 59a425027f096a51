"""From an author's class or function to the `Tool` that describes it: types, names and options, checked when it is defined."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable, Iterable
from decimal import Decimal
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from rowmill.durations import Duration, Rate, optional_seconds, seconds
from rowmill.encoding.receipts import Cache
from rowmill.errors import DefinitionError, ToolError
from rowmill.names import routing_word, snake_case
from rowmill.tools import Batch, Cost, Effect, FunctionTool, HttpTool, Tool

if TYPE_CHECKING:
    from rowmill.providers import Provider

DEFAULT_MAX_WAIT = 3600.0
"""Seconds that a call may wait in all (SPEC 4.4)."""
_EFFECTS = get_args(Effect)
_CACHES = get_args(Cache)
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


class FunctionToolOptions(TypedDict, total=False):
    """What any tool may declare. ``cost``: Decimal, or a function of the input (an upper bound); ``actual_cost``: of the result.

    ``no_result``: HTTP statuses that mean "nothing found". ``timeout``: from dispatch. ``max_wait``: over all waiting. ``rate``: a second limit
    besides the provider's. ``retry_5xx``: whether a 5xx answer may be repeated (default: where the effect allows). ``version``: part of
    the receipts' keys. ``cache``: who shares results: the ``"org"`` (default), the ``"play"``, the ``"run"``, or ``"none"``: each call of a
    row is made and paid for by itself, and still once, however often the row is worked. ``stale_after``: results that were older than that
    when a run started do not serve it (default: for ever; a call may say otherwise).
    """

    effect: Required[Effect]
    cost: Cost
    actual_cost: Callable[[Any], Decimal] | None
    version: str
    timeout: Duration | None
    max_wait: Duration | None
    rate: str | Rate | None
    retry_5xx: bool | None
    cache: Cache
    stale_after: Duration | None


class ToolOptions(FunctionToolOptions, total=False):
    """What an HTTP tool may declare besides. ``id``: its name, instead of the class's name in snake case."""

    batch: Batch | None
    id: str | None
    no_result: Iterable[int]


def http_tool(provider: Provider, method: str, path: str, options: ToolOptions, tool_class: type[HttpTool[Any, Any]]) -> Tool:
    """The tool that an `HttpTool` subclass describes. Raises `DefinitionError`."""
    if not isinstance(tool_class, type) or not issubclass(tool_class, HttpTool):
        raise DefinitionError(
            f"@{provider.name}.{method.lower()} decorates a subclass of HttpTool[In, Out]; for a function use @{provider.name}.tool"
        )
    input_type, output_type = _http_types(tool_class)
    name = routing_word("tool", options.get("id") or snake_case(tool_class.__name__))
    return Tool(
        id=f"{provider.name}.{name}",
        name=name,
        provider=provider,
        kind="http",
        method=method,
        path=path,
        batch=options.get("batch"),
        extract=_checked_extract(tool_class),
        no_result=frozenset(options.get("no_result", ())),
        input_type=input_type,
        output_type=output_type,
        definition=tool_class,
        **_common(provider, name, options),
    )


def function_tool(
    provider: Provider, name: str, function: Callable[..., Any], batch: Batch | None, blocking: bool, options: FunctionToolOptions
) -> FunctionTool[Any, Any]:
    """The tool that a function is. Raises `DefinitionError`."""
    if not callable(function) or isinstance(function, type):
        raise DefinitionError(f"@{provider.name}.tool decorates a function, not {function!r}")
    name = routing_word("tool", name)
    input_type, output_type = _function_types(f"{provider.name}.{name}", function, batched=batch is not None)
    tool = Tool(
        id=f"{provider.name}.{name}",
        name=name,
        provider=provider,
        kind="function",
        batch=batch,
        blocking=blocking,
        input_type=input_type,
        output_type=output_type,
        function=function,
        **_common(provider, name, options),
    )
    defined: FunctionTool[Any, Any] = FunctionTool(tool, function)
    object.__setattr__(tool, "definition", defined)  # the two name each other; nobody has seen the tool yet
    return defined


def _common(provider: Provider, name: str, options: FunctionToolOptions) -> dict[str, Any]:
    effect = options.get("effect")
    if effect not in _EFFECTS:
        raise DefinitionError(f"tool '{provider.name}.{name}': effect must be one of {', '.join(_EFFECTS)}, not {effect!r}")
    cost = options.get("cost", Decimal(0))
    if isinstance(cost, float | bool) or not (callable(cost) or (isinstance(cost, Decimal | int) and cost >= 0)):
        raise DefinitionError(f"tool '{provider.name}.{name}': cost is a Decimal that is not negative, or a function of the input, not {cost!r}")
    cache = options.get("cache", "org")
    if cache not in _CACHES:
        raise DefinitionError(f"tool '{provider.name}.{name}': cache must be one of {', '.join(_CACHES)}, not {cache!r}")
    timeout, max_wait, rate, retry_5xx = options.get("timeout"), options.get("max_wait"), options.get("rate"), options.get("retry_5xx")
    return {
        "effect": effect,
        "cost": cost if callable(cost) else Decimal(cost),
        "actual_cost": options.get("actual_cost"),
        "version": str(options.get("version", "1")),
        "timeout": provider.timeout if timeout is None else seconds(timeout),
        "max_wait": DEFAULT_MAX_WAIT if max_wait is None else seconds(max_wait),
        "rate": None if rate is None else Rate.parse(rate),
        "cache": cache,
        "stale_after": optional_seconds(options.get("stale_after")),
        "retry_5xx": effect != "non_idempotent" if retry_5xx is None else retry_5xx,
    }


def _http_types(tool_class: type[HttpTool[Any, Any]]) -> tuple[Any, Any]:
    for ancestor in tool_class.__mro__:
        for parent in ancestor.__dict__.get("__orig_bases__", ()):
            arguments = get_args(parent)
            if get_origin(parent) is HttpTool and not any(isinstance(argument, TypeVar) for argument in arguments):
                return arguments[0], arguments[1]
    raise DefinitionError(f"tool {tool_class.__name__}: say its input and output types, as in class {tool_class.__name__}(HttpTool[In, Out])")


def _checked_extract(tool_class: type[HttpTool[Any, Any]]) -> dict[str, list[str]]:
    extract = tool_class.extract
    for name, paths in extract.items():
        if isinstance(paths, str) or not paths or not all(isinstance(path, str) and path for path in paths):
            raise DefinitionError(f"tool {tool_class.__name__}: extract[{name!r}] is a list of dotted paths, not {paths!r}")
    return {name: [*paths] for name, paths in extract.items()}


def _function_types(tool_id: str, function: Callable[..., Any], *, batched: bool) -> tuple[Any, Any]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wanted = "a list of inputs and a ToolCall" if batched else "an input and a ToolCall"
    if len(parameters) != 2:
        raise DefinitionError(f"tool {tool_id!r} is a function of {wanted}; {function.__qualname__} takes {len(parameters)} arguments")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise DefinitionError(f"tool {tool_id!r}: an annotation of {function.__qualname__} cannot be resolved: {error}") from error
    taken, given = hints.get(parameters[0].name, Any), hints.get("return", Any)
    if batched:
        taken, given = _item_of(tool_id, taken, "takes"), _item_of(tool_id, given, "returns")
    return taken, _without_errors(given)


def _item_of(tool_id: str, annotation: Any, verb: Literal["takes", "returns"]) -> Any:
    if annotation is Any or annotation in _LISTS:
        return Any
    arguments = get_args(annotation)
    if get_origin(annotation) in _LISTS and len(arguments) == 1:
        return arguments[0]
    raise DefinitionError(f"tool {tool_id!r} works on batches, so it {verb} a list, not {annotation!r}")


def _without_errors(annotation: Any) -> Any:
    """The output type without `ToolError`, which stands in an item's place and is not an output."""
    if get_origin(annotation) not in {Union, UnionType}:
        return annotation
    kept = tuple(argument for argument in get_args(annotation) if argument is not ToolError)
    return Union[kept] if kept else Any  # noqa: UP007 - built at run time
