"""``ctx`` in a play's body, and its tool calls, each on record."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog
from pydantic import BaseModel

from rowmill.context import Context, DatasetSource, Tools
from rowmill.datasets import DatasetBuilder
from rowmill.durations import Duration, optional_seconds
from rowmill.errors import DefinitionError
from rowmill.paged_handle import PagedHandle
from rowmill.runtime.clock import Clock
from rowmill.runtime.rest import goes_on
from rowmill.tool_results import ToolResult
from rowmill_contracts.runs import RunOptions
from rowmill_contracts.tools import CallOutcome, Effect
from rowmill_row_executor.body_calls import BodyCalls
from rowmill_row_executor.dataset_calls import DatasetCalls
from rowmill_row_executor.ports import Admission, Asker, CallDesk, RowSource
from rowmill_row_executor.row_context import Run, RunBudget
from rowmill_row_executor.step_calling import StepIds, value_of
from rowmill_row_executor.step_runner import StepRunner
from rowmill_row_executor.tool_calling import PreparedCall, prepare, result_of

log = structlog.get_logger()

RowModel = TypeVar("RowModel", bound=BaseModel)

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(CallOutcome).decode


class BodyTools(Tools):
    """``ctx.tools`` of a body."""

    def __init__(self, body: BodyContext) -> None:
        self._body = body

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
        call = prepare(
            self._body.asker,
            self._body.desk.new_call_id(),
            tool=tool,
            input=input,
            caller="",
            asked=self._body.clock.now(),
            id=id,
            force=force,
            stale_after=stale_after,
            timeout=timeout,
            max_wait=optional_seconds(wait),
        )
        return await self._body.call_tool(call)


class BodyContext(Context):
    """One run of a body. ``wanted``: in a read-only replay, the dataset whose program is to be captured."""

    def __init__(
        self,
        calls: BodyCalls,
        asker: Asker,
        *,
        desk: CallDesk,
        admission: Admission,
        sheets: RowSource,
        steps: StepRunner,
        clock: Clock,
        options: RunOptions,
        code_digest: str,
        wanted: str | None = None,
    ) -> None:
        self.calls = calls
        self.asker = asker
        self.desk = desk
        self.clock = clock
        self.datasets = DatasetCalls(calls, admission, sheets, options=options, code_digest=code_digest, wanted=wanted)
        self._tools = BodyTools(self)
        self._run = Run(asker.run_id)
        self._budget = RunBudget(options.budget)
        self._calls_in_hand: set[str] = set()
        self._sheets = sheets
        self._steps = steps
        self._step_ids = StepIds("this body")

    @property
    def tools(self) -> Tools:
        return self._tools

    @property
    def run(self) -> Run:
        return self._run

    @property
    def budget(self) -> RunBudget:
        return self._budget

    def log(self, message: str, **fields: Any) -> None:
        log.info("play_log", run_id=self._run.id, message=message, fields=fields)

    def dataset(self, key: str, source: DatasetSource, *, row: type[RowModel] | None = None) -> DatasetBuilder:
        return DatasetBuilder(key, source, self.datasets, row=row)

    async def call_tool(self, call: PreparedCall) -> ToolResult[Any]:
        """Make a tool call, or meet it on record."""
        if call.name in self._calls_in_hand:
            raise DefinitionError(f"call id {call.name!r} is used twice at once in this body; give each call its own id=")
        self._calls_in_hand.add(call.name)
        try:
            request = hashlib.sha256(f"{call.item.receipt_key} {call.item.force}".encode()).hexdigest()
            outcome = await self._outcome(
                "call", call.name, request, lambda: self.desk.ask(self.asker, call.shard, call.item), what=f"tool:{call.tool.id}"
            )
            return result_of(call, outcome)
        finally:
            self._calls_in_hand.discard(call.name)

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
        step = self._step_ids.prepare(self.asker, id, fn, semantic_key=semantic_key, stale_after=stale_after, blocking=blocking, effect=effect)
        with self._step_ids.in_hand("", step):
            outcome = await self._outcome(
                "step", step.id, step.request, lambda: self._steps.run(self.asker, step, run_term=self.calls.term), what=step.tool
            )
            return value_of(step, outcome, self._handle)

    async def _outcome(self, kind: str, name: str, request: str, ask: Callable[[], Awaitable[CallOutcome]], *, what: str) -> CallOutcome:
        """How a call or step ended: as is on record, or else as ``ask`` says, which is put there. Ends the body where it must wait for ``what``."""
        met = await self.calls.meet(kind, name, request)
        if met.recorded is not None:
            return _decode(met.recorded.result)
        with self.calls.under_way():
            await self.calls.write()
            outcome = await ask()
            await goes_on()
        if outcome.outcome in {"deferred", "halted"}:
            await self._wait(what, outcome)
        if outcome.outcome != "unknown":  # an operator may settle that, and the run be resumed
            self.calls.keep(met, msgspec.Raw(_encode(outcome)))
        return outcome

    def _handle(self, run_id: str, dataset: str) -> PagedHandle:
        return PagedHandle(run_id, dataset, self._sheets)

    async def _wait(self, what: str, outcome: CallOutcome) -> NoReturn:
        if outcome.outcome == "deferred":
            self.calls.again_in(outcome.wait_ms)
        await self.calls.wait_for(what if outcome.outcome == "deferred" else f"halted:{outcome.reason}")
