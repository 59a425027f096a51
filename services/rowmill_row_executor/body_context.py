"""``ctx`` in a play's body: datasets, tool calls and reads of handles, each on record."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import structlog
from pydantic import BaseModel

from rowmill.columns import ColumnSpec
from rowmill.context import Context, DatasetSource, Tools
from rowmill.datasets import DatasetBuilder, DatasetProgram
from rowmill.durations import Duration, optional_seconds
from rowmill.errors import DefinitionError, RunFailed
from rowmill.handles import Handle
from rowmill.paged_handle import PagedHandle
from rowmill.rows import Rows
from rowmill.runtime.clock import Clock
from rowmill.tool_results import ToolResult
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.envelope import NULL
from rowmill_contracts.runs import ColumnInfo, DatasetOpened, OpenDataset, RunOptions
from rowmill_contracts.tools import CallOutcome
from rowmill_row_executor.body_calls import BodyCalls
from rowmill_row_executor.ports import Admission, Asker, CallDesk, RowSource
from rowmill_row_executor.replay import MetCall
from rowmill_row_executor.row_context import Run, RunBudget
from rowmill_row_executor.staging import rows_of, seal_rows
from rowmill_row_executor.tool_calling import PreparedCall, prepare, result_of

log = structlog.get_logger()

RowModel = TypeVar("RowModel", bound=BaseModel)

_RECORDED_PAGE_BYTES = 256 * 1024
"""A larger page of rows that a body reads is on record by its digest, and read again in a replay."""

_encode = msgspec.json.Encoder(order="sorted").encode


class DatasetFailed(RunFailed):
    """A dataset could not be run: every row failed, or its input is unusable. ``problem`` is what admission says."""

    code = "dataset_failed"

    def __init__(self, dataset: str, problem: Problem) -> None:
        super().__init__(f"dataset {dataset!r}: {problem.message}")
        self.problem = problem


class _Closed(msgspec.Struct, omit_defaults=True):
    """How a dataset ended, as it is on record."""

    counts: Counts = Counts()
    error: Problem | None = None


class _Opened(msgspec.Struct):
    """What a dataset was opened over, as it is on record."""

    input_id: str


class _PageRead(msgspec.Struct, omit_defaults=True):
    """A page of rows that a body read, as it is on record: the rows, or (where they are many bytes) their digest."""

    digest: str
    rows: msgspec.Raw = NULL


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
        clock: Clock,
        options: RunOptions,
        code_digest: str,
        wanted: str | None = None,
    ) -> None:
        self.calls = calls
        self.asker = asker
        self.desk = desk
        self.clock = clock
        self.captured: DatasetProgram | None = None
        self._admission = admission
        self._sheets = sheets
        self._options = options
        self._code_digest = code_digest
        self._wanted = wanted
        self._tools = BodyTools(self)
        self._run = Run(asker.run_id)
        self._budget = RunBudget(options.budget)
        self._datasets: set[str] = set()
        self._calls_in_hand: set[str] = set()

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
        return DatasetBuilder(key, source, self, row=row)

    # ---- datasets ---------------------------------------------------------------------------------------------------------------------

    async def run_dataset(self, program: DatasetProgram) -> Handle:
        """Open the dataset, or meet it on record. Returns once it is closed; until then the body waits."""
        key = program.key
        if key in self._datasets:
            raise DefinitionError(f"dataset {key!r} is run twice in this play; its key names one sheet, so give each dataset its own key")
        self._datasets.add(key)
        if key == self._wanted:
            self.captured = program
            await self.calls.captured()
        opened = await self.calls.meet("dataset", key, _request_of(program))
        if opened.recorded is not None:
            closed = self.calls.find("closed", key)
            if closed is not None and closed.recorded is not None:
                return self._handle_of(key, msgspec.json.decode(closed.recorded.result, type=_Closed))
            if self.calls.read_only:
                await self.calls.never()
            input_id = msgspec.json.decode(opened.recorded.result, type=_Opened).input_id
        else:
            input_id = await self._input_of(program)
            with self.calls.under_way():
                await self.calls.write()  # capture needs what came before; this call itself may be stored while the dataset opens
            self.calls.keep(opened, msgspec.Raw(_encode(_Opened(input_id))))
        with self.calls.under_way():
            _, answer = await asyncio.gather(self.calls.write(), self._admission.open_dataset(self._open_request(program, input_id)))
        return await self._answered(key, answer)

    async def _answered(self, key: str, answer: DatasetOpened) -> Handle:
        if answer.outcome == "stale":
            self.calls.lose()
        if answer.outcome == "open":
            await self.calls.wait_for(f"dataset:{key}")
        closed = _Closed(answer.counts, answer.error)
        counts = answer.counts
        if closed.error is None and 0 < counts.admitted == counts.failed:
            closed.error = Problem(code="all_rows_failed", message=f"all {counts.failed} rows failed")
        self.calls.keep(MetCall("closed", key, ""), msgspec.Raw(_encode(closed)))
        return self._handle_of(key, closed)

    def _handle_of(self, key: str, closed: _Closed) -> Handle:
        if closed.error is not None:
            raise DatasetFailed(key, closed.error)
        return PagedHandle(self._run.id, key, _BodyPages(self, closed.counts.admitted))

    async def _input_of(self, program: DatasetProgram) -> str:
        """The input that the rows come from; rows that are not staged yet are sealed now, under this term."""
        if isinstance(program.source, Rows):
            return program.source.input_id
        input_id = f"{self._run.id}/{program.key}/{self.calls.term}"
        with self.calls.under_way():
            await seal_rows(self._admission, input_id, rows_of(program, self._sheets))
        return input_id

    def _open_request(self, program: DatasetProgram, input_id: str) -> OpenDataset:
        key = program.key_spec
        return OpenDataset(
            run_id=self._run.id,
            term=self.calls.term,
            dataset=program.key,
            input_id=input_id,
            columns=[_info_of(column) for column in program.columns],
            code_digest=self._code_digest,
            key=list(key) if isinstance(key, tuple) else None,
            key_function=callable(key),
            source_row_identity=program.row_identity == "source_row",
            mode=program.mode or self._options.mode or "all",
            on_error=program.on_error,
            concurrency=program.concurrency or self._options.concurrency,
        )

    # ---- tools ------------------------------------------------------------------------------------------------------------------------

    async def call_tool(self, call: PreparedCall) -> ToolResult[Any]:
        """Make a tool call, or meet it on record."""
        if call.name in self._calls_in_hand:
            raise DefinitionError(f"call id {call.name!r} is used twice at once in this body; give each call its own id=")
        self._calls_in_hand.add(call.name)
        try:
            request = hashlib.sha256(f"{call.item.receipt_key} {call.item.force}".encode()).hexdigest()
            met = await self.calls.meet("call", call.name, request)
            if met.recorded is not None:
                return result_of(call, msgspec.json.decode(met.recorded.result, type=CallOutcome))
            with self.calls.under_way():
                await self.calls.write()
                outcome = await self.desk.ask(self.asker, call.shard, call.item)
            if outcome.outcome in {"deferred", "halted"}:
                await self._wait(call, outcome)
            if outcome.outcome != "unknown":  # an operator may settle that, and the run be resumed
                self.calls.keep(met, msgspec.Raw(_encode(outcome)))
            return result_of(call, outcome)
        finally:
            self._calls_in_hand.discard(call.name)

    async def _wait(self, call: PreparedCall, outcome: CallOutcome) -> NoReturn:
        if outcome.outcome == "deferred":
            self.calls.again_in(outcome.wait_ms)
        await self.calls.wait_for(f"tool:{call.tool.id}" if outcome.outcome == "deferred" else f"halted:{outcome.reason}")

    # ---- reads ------------------------------------------------------------------------------------------------------------------------

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        """Rows of a handle, as stored; the same ones in every replay."""
        met = await self.calls.meet("read", f"{run_id}/{dataset}", f"{page_number}*{size}")
        recorded = None if met.recorded is None else msgspec.json.decode(met.recorded.result, type=_PageRead)
        if recorded is not None and recorded.rows != NULL:
            rows: list[dict[str, Any]] = msgspec.json.decode(recorded.rows)
            return rows
        with self.calls.under_way():
            await self.calls.write()
            rows = await self._sheets.read_page(run_id, dataset, page_number, size)
        text = msgspec.json.encode(rows)
        digest = hashlib.sha256(text).hexdigest()
        if recorded is None:
            kept = msgspec.Raw(text) if len(text) <= _RECORDED_PAGE_BYTES else NULL
            self.calls.keep(met, msgspec.Raw(msgspec.json.encode(_PageRead(digest, kept))))
        elif recorded.digest != digest:
            raise self.calls.changed(f"rows {page_number * size} onwards of dataset {dataset!r} are not those that the body read before")
        return rows


class _BodyPages:
    """`PageReader` of the handles that a body is given. The count is that of the dataset's end, which is on record."""

    def __init__(self, body: BodyContext, count: int) -> None:
        self._body = body
        self._count = count

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        return await self._body.read_page(run_id, dataset, page_number, size)

    async def count(self, run_id: str, dataset: str) -> int:
        del run_id, dataset  # a handle has one
        return self._count


def _info_of(column: ColumnSpec) -> ColumnInfo:
    return ColumnInfo(
        name=column.name,
        version=column.version,
        recompute=column.recompute,
        recompute_on_error=column.recompute_on_error,
        persisted=column.persisted,
    )


def _request_of(program: DatasetProgram) -> str:
    """A digest of what a replay must ask for again: source, key and columns, not the code behind them."""
    source = program.source
    kind: Literal["input", "handle", "rows"] = "input" if isinstance(source, Rows) else "handle" if isinstance(source, Handle) else "rows"
    named: Sequence[str] = (source.input_id,) if isinstance(source, Rows) else (source.run_id, source.dataset) if isinstance(source, Handle) else ()
    key: Any = list(program.key_spec) if isinstance(program.key_spec, tuple) else "function" if program.key_spec is not None else None
    facts = [kind, *named, key, [column.name for column in program.columns], program.mode, program.on_error, program.row_identity]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
