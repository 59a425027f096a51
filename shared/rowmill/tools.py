"""Tools: what an author declares about a unit of paid outside work, as one frozen description.

`HttpTool` subclasses and functions become tools through the decorators of `rowmill.providers.Provider`; this module describes them and says
how their inputs and outputs become JSON. Sending requests, pacing and receipts belong to the gateway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from rowmill import registry
from rowmill.encoding.receipts import Cache
from rowmill.errors import DefinitionError, InputInvalid, OutputInvalid, ToolError
from rowmill.tool_results import Execution, Extract, ResultStatus, ToolResult, values_at
from rowmill.validation import explain
from rowmill_contracts.budgets import is_amount
from rowmill_contracts.tools import ToolFailure

if TYPE_CHECKING:
    import httpx

    from rowmill.durations import Rate
    from rowmill.providers import Provider

__all__ = [
    "Batch",
    "Cost",
    "Effect",
    "Execution",
    "FunctionTool",
    "HttpTool",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolFailure",
    "ToolResult",
    "ToolSecrets",
    "tool_of",
]

In = TypeVar("In")
Out = TypeVar("Out")

Effect = Literal["read", "idempotent", "non_idempotent"]
"""What an unknown outcome allows: ``read`` and ``idempotent`` may be sent again, ``non_idempotent`` may not (SPEC 3.8)."""

Cost = Decimal | Callable[[Any], Decimal]
"""Money per call: a value, or a function (of the input: an upper bound; of the result: what it did cost)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One request for up to ``max`` calls.

    For an HTTP tool the request goes to ``path`` (else the tool's own) as ``{items: [input, ...]}``, and its answer holds the results at the
    dotted path ``results``; where ``items`` or ``results`` is None, the list is the whole body. Results are matched by position, or, with
    ``id_field``, by that member of each result, which repeats the item's ``item_key`` member, or its own member of that name where
    ``item_key`` is None. ``item_key`` names the member in which each item carries its idempotency key.
    """

    max: int
    path: str | None = None
    items: str | None = None
    results: str | None = None
    item_key: str | None = None
    id_field: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max, bool) or not isinstance(self.max, int) or self.max < 1:
            raise DefinitionError(f"Batch(max={self.max!r}): a batch holds at least one call")


class ToolSecrets(Protocol):
    """The secrets that the tool's provider declares, resolved."""

    def __getitem__(self, name: str) -> str: ...


def _none_given() -> httpx.Client:
    import httpx  # noqa: PLC0415 - only tests of blocking functions come here

    def refuse(_: httpx.Request) -> httpx.Response:
        raise DefinitionError("this ToolCall was made without a blocking_http; give it one to test a function that uses it")

    return httpx.Client(transport=httpx.MockTransport(refuse))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a tool function is given besides its inputs.

    ``http``: a client with the provider's base URL, credential and headers; ``blocking_http``: the same for functions declared with
    ``blocking=True``, which run in a thread. Neither sends anything once the call is over. ``keys``: one idempotency key per input, stable over every
    repetition of that call. ``deadline``: when the answer must be there, in seconds of ``time.monotonic()``. ``secrets``: by name.
    """

    http: httpx.AsyncClient
    keys: list[str]
    deadline: float
    secrets: ToolSecrets | Mapping[str, str] = field(default_factory=dict, repr=False)
    blocking_http: httpx.Client = field(default_factory=_none_given, repr=False)


class HttpTool(Generic[In, Out]):
    """An HTTP tool: subclass with its input and output types and decorate with a provider's ``get``, ``post``, ...

    ``extract`` names values of the answer by dotted paths, tried in turn; when every one is null, the call has no result.
    """

    extract: ClassVar[Extract] = {}
    __rowmill_tool__: ClassVar[Tool]

    def __init__(self) -> None:
        raise DefinitionError(f"{type(self).__name__} is a tool, not made to be instantiated: call it with ctx.call({type(self).__name__}, ...)")


class FunctionTool(Generic[In, Out]):
    """A tool that is a function; made by ``@provider.tool(...)``. Calling it calls the function, for tests."""

    def __init__(self, tool: Tool, function: Callable[..., Any]) -> None:
        self.tool = tool
        self.function = function
        self.__name__ = getattr(function, "__name__", tool.name)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f"<tool {self.tool.id}>"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """Everything known about a tool. Durations are seconds; ``timeout`` counts from dispatch, ``max_wait`` over all waiting.

    ``version`` is part of every receipt's key: raising it makes earlier results unusable. ``cache``: who shares its results. ``stale_after``: results
    that were older than that when a run started do not serve the run (None: they serve for ever). ``definition``: the class or `FunctionTool`.
    """

    id: str
    name: str
    provider: Provider
    kind: Literal["http", "function"]
    effect: Effect
    input_type: Any
    output_type: Any
    cost: Cost = Decimal(0)
    actual_cost: Callable[[Any], Decimal] | None = None
    batch: Batch | None = None
    method: str = "POST"
    path: str = "/"
    extract: Extract = field(default_factory=dict)
    no_result: frozenset[int] = frozenset()
    timeout: float = 900.0
    max_wait: float = 3600.0
    rate: Rate | None = None
    retry_5xx: bool = True
    blocking: bool = False
    version: str = "1"
    cache: Cache = "org"
    stale_after: float | None = None
    function: Callable[..., Any] | None = None
    definition: Any = None

    def __post_init__(self) -> None:
        if self.kind == "http" and self.batch is not None and self.effect == "idempotent" and self.batch.item_key is None:
            raise DefinitionError(
                f"tool {self.id!r} is idempotent and takes batches, so each item must carry its key: give Batch(item_key='...'), "
                "or make it a function that sends call.keys"
            )
        if self.blocking and inspect.iscoroutinefunction(self.function):
            raise DefinitionError(f"tool {self.id!r} is async, so it cannot be blocking: write it with def, or leave blocking out")

    @cached_property
    def input_adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.input_type)

    @cached_property
    def output_adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.output_type)

    def encode_input(self, value: Any) -> Any:
        """The input as JSON values, as it is sent and as it stands in the receipt's key. Raises `InputInvalid` naming field and value.

        HTTP tools are sent the fields' aliases, functions read their own field names.
        """
        try:
            checked = self.input_adapter.validate_python(value, by_name=True, by_alias=True)
            return self.input_adapter.dump_python(checked, mode="json", by_alias=self.kind == "http")
        except ValidationError as error:
            raise InputInvalid(f"input of tool {self.id!r}: {explain(error)}") from error

    def decode_input(self, encoded: Any) -> Any:
        """The input, from what `encode_input` gave. Raises `InputInvalid`."""
        try:
            return self.input_adapter.validate_python(encoded, by_name=True, by_alias=True)
        except ValidationError as error:
            raise InputInvalid(f"input of tool {self.id!r}: {explain(error)}") from error

    def encode_output(self, value: Any) -> Any:
        """What a tool function returned for one input, as JSON values. Raises `OutputInvalid`."""
        try:
            return self.output_adapter.dump_python(self.output_adapter.validate_python(value), mode="json")
        except ValidationError as error:
            raise OutputInvalid(f"answer of tool {self.id!r}: {explain(error)}") from error

    def result(
        self,
        raw: Any,
        *,
        http_status: int | None = None,
        execution: Execution | None = None,
        job_id: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> ToolResult[Any]:
        """The typed result of one call, from its JSON. Raises `OutputInvalid` where it does not fit the output type.

        No result: the status is listed in ``no_result``, or every declared extractor is null. The body need not fit where the status is listed,
        or where it is null.
        """
        listed = http_status is not None and http_status in self.no_result
        status: ResultStatus = "no_result" if listed or self._found_nothing(raw) else "completed"
        try:
            data = self.output_adapter.validate_python(raw)
        except ValidationError as error:
            if not listed and not (raw is None and status == "no_result"):
                raise OutputInvalid(f"answer of tool {self.id!r}: {explain(error)}") from error
            data = None
        return ToolResult(
            tool=self.id,
            status=status,
            raw=raw,
            data=data,
            meta=meta or {},
            job_id=job_id,
            execution=execution or Execution(),
            extract=self.extract,
        )

    def _found_nothing(self, raw: Any) -> bool:
        if not self.extract:
            return False
        return all(value is None for paths in self.extract.values() for path in paths for value in values_at(raw, path))

    def cost_of(self, value: Any) -> Decimal:
        """What a call with this input costs at most."""
        return self._money(self.cost(value) if callable(self.cost) else self.cost)

    def actual_cost_of(self, result: ToolResult[Any], reserved: Decimal) -> Decimal:
        """What a call did cost, from its result; ``reserved`` where the tool does not say."""
        return reserved if self.actual_cost is None else self._money(self.actual_cost(result))

    def _money(self, amount: Any) -> Decimal:
        if isinstance(amount, bool) or not isinstance(amount, Decimal | int) or not is_amount(Decimal(amount)):
            raise DefinitionError(
                f"tool {self.id!r}: a cost is a Decimal from 0 to below 10^15 with at most 18 digits after its point, not {amount!r:.60}"
            )
        return Decimal(amount)


ToolReference = type[HttpTool[Any, Any]] | FunctionTool[Any, Any] | Tool | str
"""How author code names a tool: its class, its function, or its id."""


def tool_of(reference: Any) -> Tool:
    """The description of a tool class, tool function or tool id.

    Raises `UnknownName` for an id that nothing has, `DefinitionError` for what is no tool.
    """
    if isinstance(reference, str):
        return registry.tool_named(reference)
    if isinstance(reference, Tool):
        return reference
    if isinstance(reference, FunctionTool):
        return reference.tool
    if isinstance(reference, type) and issubclass(reference, HttpTool):
        tool = reference.__dict__.get("__rowmill_tool__")
        if isinstance(tool, Tool):
            return tool
        raise DefinitionError(f"{reference.__name__} is not attached to a provider: decorate it with, say, @provider.post('/path', effect='read')")
    raise DefinitionError(f"{reference!r} is not a tool: give a tool class, a tool function or a tool's id")
