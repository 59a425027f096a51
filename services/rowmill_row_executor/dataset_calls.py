"""Datasets of a body: opened once, waited for, ended; each step on record."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rowmill.columns import ColumnSpec
from rowmill.datasets import DatasetProgram
from rowmill.errors import DefinitionError, RunFailed
from rowmill.handles import Handle
from rowmill.names import input_id_of
from rowmill.paged_handle import PagedHandle
from rowmill.rows import Rows
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.runs import ColumnInfo, DatasetOpened, OpenDataset, RunOptions
from rowmill_row_executor.body_calls import BodyCalls
from rowmill_row_executor.ports import Admission, RowSource
from rowmill_row_executor.recorded_pages import RecordedPages
from rowmill_row_executor.replay import MetCall
from rowmill_row_executor.staging import rows_of, seal_rows

_encode = msgspec.json.Encoder(order="sorted").encode


class DatasetFailed(RunFailed):
    """A dataset could not be run: every row failed, or its input is unusable. ``problem`` is what admission says."""

    code = "dataset_failed"

    def __init__(self, dataset: str, problem: Problem) -> None:
        super().__init__(f"dataset {dataset!r}: {problem.message}")
        self.problem = problem


class Opened(msgspec.Struct):
    """What a dataset was opened over, as it is on record."""

    input_id: str


class Closed(msgspec.Struct, omit_defaults=True):
    """How a dataset ended, as it is on record."""

    counts: Counts = Counts()
    error: Problem | None = None


class DatasetCalls:
    """`DatasetDriver` of one run of a body. ``wanted``: in a read-only replay, the dataset whose program is to be ``captured``."""

    def __init__(
        self, calls: BodyCalls, admission: Admission, sheets: RowSource, *, options: RunOptions, code_digest: str, wanted: str | None
    ) -> None:
        self.captured: DatasetProgram | None = None
        self._calls = calls
        self._admission = admission
        self._sheets = sheets
        self._options = options
        self._code_digest = code_digest
        self._wanted = wanted
        self._datasets: set[str] = set()

    async def run_dataset(self, program: DatasetProgram) -> Handle:
        """Open the dataset, or meet it on record. Returns once it is closed; until then the body waits."""
        key = program.key
        if key in self._datasets:
            raise DefinitionError(f"dataset {key!r} is run twice in this play; its key names one sheet, so give each dataset its own key")
        self._datasets.add(key)
        if key == self._wanted:
            self.captured = program
            await self._calls.captured()
        opened = await self._calls.meet("dataset", key, _request_of(program))
        if opened.recorded is not None:
            closed = self._calls.find("closed", key)
            if closed is not None and closed.recorded is not None:
                return self._handle_of(key, msgspec.json.decode(closed.recorded.result, type=Closed))
            if self._calls.read_only:
                await self._calls.never()
            input_id = msgspec.json.decode(opened.recorded.result, type=Opened).input_id
        else:
            input_id = await self._input_of(program)
            with self._calls.under_way():
                await self._calls.write()  # capture needs what came before; this call itself may be stored while the dataset opens
            self._calls.keep(opened, msgspec.Raw(_encode(Opened(input_id))))
        with self._calls.under_way():
            _, answer = await asyncio.gather(self._calls.write(), self._admission.open_dataset(self._open_request(program, input_id)))
        return await self._answered(key, answer)

    async def _answered(self, key: str, answer: DatasetOpened) -> Handle:
        if answer.outcome == "stale":
            self._calls.lose()
        if answer.outcome == "open":
            await self._calls.wait_for(f"dataset:{key}")
        closed = Closed(answer.counts, answer.error)
        counts = answer.counts
        if closed.error is None and 0 < counts.admitted == counts.failed:
            closed.error = Problem(code="all_rows_failed", message=f"all {counts.failed} rows failed")
        self._calls.keep(MetCall("closed", key, ""), msgspec.Raw(_encode(closed)))
        return self._handle_of(key, closed)

    def _handle_of(self, key: str, closed: Closed) -> Handle:
        if closed.error is not None:
            raise DatasetFailed(key, closed.error)
        return PagedHandle(self._calls.run_id, key, RecordedPages(self._calls, self._sheets, closed.counts.admitted))

    async def _input_of(self, program: DatasetProgram) -> str:
        """The input that the rows come from; rows that are not staged yet are sealed now, under this term."""
        if isinstance(program.source, Rows):
            return program.source.input_id
        input_id = input_id_of(self._calls.run_id, f"/{program.key}/{self._calls.term}")
        with self._calls.under_way():
            await seal_rows(self._admission, input_id, rows_of(program, self._sheets))
        return input_id

    def _open_request(self, program: DatasetProgram, input_id: str) -> OpenDataset:
        key = program.key_spec
        return OpenDataset(
            run_id=self._calls.run_id,
            term=self._calls.term,
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
