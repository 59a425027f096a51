"""What play bodies and row resolvers are given. The executor implements both; tests may too.

Calls are keyed and on record: a body is replayed after each wait, and a call that has an answer on record gives it at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, NoReturn, Protocol, TypeVar, overload

from pydantic import BaseModel

from rowmill.datasets import DatasetBuilder
from rowmill.durations import Duration
from rowmill.errors import DefinitionError
from rowmill.handles import Handle
from rowmill.rows import Rows
from rowmill.tools import FunctionTool, HttpTool, In, Out, Tool, ToolResult

RowModel = TypeVar("RowModel", bound=BaseModel)
Value = TypeVar("Value")

DatasetSource = Rows[Any] | Handle | Iterable[Mapping[str, Any] | BaseModel]
"""Where a dataset's rows come from: a staged input, another dataset of this play, or rows in memory (sealed before the first one runs)."""


class RunFacts(Protocol):
    """The run that is going on."""

    @property
    def id(self) -> str:
        """The run's id, the same in every replay."""


class Budget(Protocol):
    """The run's money."""

    @property
    def limit(self) -> Decimal | None:
        """What the run may spend; None: not limited."""


class Tools(ABC):
    """``ctx.tools``: the long form of ``ctx.call``."""

    @abstractmethod
    async def execute(
        self,
        *,
        tool: type[HttpTool[Any, Any]] | FunctionTool[Any, Any] | Tool | str,
        input: Any,  # noqa: A002 - API.md's name
        id: str | None = None,  # noqa: A002 - API.md's name
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Any]:
        """Call a tool; see `Calling.call`."""


class Calling(ABC):
    """What a play's body and a row's resolver have in common."""

    @property
    @abstractmethod
    def tools(self) -> Tools:
        """The long form of ``call``."""

    @property
    @abstractmethod
    def run(self) -> RunFacts:
        """The run that is going on."""

    @property
    @abstractmethod
    def budget(self) -> Budget:
        """The run's money."""

    @abstractmethod
    def log(self, message: str, **fields: Any) -> None:
        """Keep a line with the run, apart from its output. Repeated by replays; the engine keeps it once per call position."""

    @overload
    async def step(
        self,
        id: str,
        fn: Callable[[], Awaitable[Value]],
        *,
        semantic_key: Any = None,
        stale_after: Duration | None = None,
        blocking: bool = False,
        effect: Literal["idempotent", "non_idempotent"] = "idempotent",
    ) -> Value: ...

    @overload
    async def step(
        self,
        id: str,
        fn: Callable[[], Value],
        *,
        semantic_key: Any = None,
        stale_after: Duration | None = None,
        blocking: bool = False,
        effect: Literal["idempotent", "non_idempotent"] = "idempotent",
    ) -> Value: ...

    @abstractmethod
    async def step(
        self,
        id: str,  # noqa: A002 - API.md's name
        fn: Callable[[], Any],
        *,
        semantic_key: Any = None,
        stale_after: Duration | None = None,
        blocking: bool = False,
        effect: Literal["idempotent", "non_idempotent"] = "idempotent",
    ) -> Any:
        """The result of ``fn()``, which may be async. Once it is stored the same code never computes it again, whatever dies: not by a replay, a
        redelivery or a retry.

        ``id`` names the step in its body, or in its column (or step of a program) of its row; used again there, it is the next step of that name, and
        two at once are refused. The result belongs to the run, or, with ``stale_after``, to the play: later runs take one that was no older than that
        at their start and was computed by the same code (in a row, for the same row key). ``semantic_key``: whatever else makes the result another
        one; the values that ``fn`` closes over are not looked at. ``blocking``: a sync ``fn`` runs in a thread.

        A step that is cut off (a crash, a lost lease, a row's time) runs again, from its beginning. With ``effect="non_idempotent"`` it does not: its
        outcome is unknown then, until an operator settles its receipt. ``fn`` gets no ``ctx``, and must not use one.

        Raises `StepFailed` where ``fn`` raised or its result cannot be stored; the run keeps that and does not call ``fn`` again, another run does.
        """

    @overload
    async def call(
        self,
        tool: type[HttpTool[In, Out]],
        input: In | Mapping[str, Any],
        *,
        id: str | None = None,
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Out]: ...

    @overload
    async def call(
        self,
        tool: FunctionTool[In, Out],
        input: In | Mapping[str, Any],
        *,
        id: str | None = None,
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Out]: ...

    @overload
    async def call(
        self,
        tool: Tool | str,
        input: Any,
        *,
        id: str | None = None,
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Any]: ...

    async def call(
        self,
        tool: Any,
        input: Any,  # noqa: A002 - API.md's name
        *,
        id: str | None = None,  # noqa: A002 - API.md's name
        force: bool = False,
        stale_after: Duration | None = None,
        timeout: Duration | None = None,
        wait: Duration | None = None,
    ) -> ToolResult[Any]:
        """Call a tool, once per paid-for unit of work: an equal call that is fresh enough is answered from its receipt.

        ``id`` names the call in its row or body (default: the tool's id); two calls at once under one id are refused. ``force``: not from a
        receipt older than this run. ``stale_after``: accept receipts that are no older (default: of any age). ``timeout``: of the request,
        from dispatch. ``wait``: how long to wait for a provider that does not serve (default: the tool's ``max_wait``; in a leg of a waterfall 60 s).

        Raises `InputInvalid` for an input that does not fit, `UnknownName` for an id that no tool has, `ToolFailed` where the call failed
        for good. Suspension passes through as a ``BaseException``: do not catch those.
        """
        return await self.tools.execute(tool=tool, input=input, id=id, force=force, stale_after=stale_after, timeout=timeout, wait=wait)


class Context(Calling):
    """``ctx`` in a play's body."""

    @abstractmethod
    def dataset(self, key: str, source: DatasetSource, *, row: type[RowModel] | None = None) -> DatasetBuilder:
        """Begin a dataset: add columns with ``with_column``, then ``await ....run()``.

        ``key`` names the sheet that the rows are kept in over all runs (``a-z 0-9 _ -``, once per play). ``row``: a model that each input row
        is read by; rows that do not fit fail one by one.
        """


class RowContext(Calling):
    """``ctx`` in a column's resolver."""

    def dataset(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a dataset belongs into the play's body."""
        raise DefinitionError("a dataset cannot be opened inside a row's resolver; open it in the play's body and pass its handle on, or use steps")
