"""Reading rows back, for handles: in a body (where what was read is on record), in a resolver, and as the source of another dataset."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rowmill.errors import RowmillError, UnavailableError
from rowmill.runtime.asking import AskBus, ReplyT
from rowmill_contracts.envelope import Message
from rowmill_contracts.rows import ReadCounts, ReadRow, ReadRows, RowsRead
from rowmill_contracts.runs import RowsCommitted
from rowmill_contracts.topology import SHEETS_ASKS
from rowmill_row_executor.endings import NeighbourAway

READ_ROWS = 1000
"""Rows asked for at once."""

_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


class SheetsUnreadable(RowmillError):
    """The sheet writer answered that the rows cannot be read."""

    code = "sheets_unreadable"


@dataclass(frozen=True, slots=True)
class SheetPages:
    """`PageReader` over the sheet writer."""

    bus: AskBus

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        """Rows ``page_number * size`` onwards in input order, at most ``size``."""
        return [_decode_row(row.data) async for row in self.rows(run_id, dataset, page_number * size, size)]

    async def count(self, run_id: str, dataset: str) -> int:
        """Rows of the dataset in this run, duplicates and failed ones included."""
        committed = await self._ask(ReadCounts(run_id=run_id, dataset=dataset), RowsCommitted)
        return max(committed.counts.admitted, committed.counts.terminal)

    async def rows(self, run_id: str, dataset: str, offset: int, limit: int | None) -> AsyncIterator[ReadRow]:
        """Rows from ``offset`` on, at most ``limit``."""
        position: int | None = offset
        left = limit
        while position is not None and (left is None or left > 0):
            read = await self._read(run_id, dataset, position, READ_ROWS if left is None else min(left, READ_ROWS))
            for row in read.rows:
                yield row
            left = None if left is None else left - len(read.rows)
            position = read.next_offset

    async def _read(self, run_id: str, dataset: str, offset: int, limit: int) -> RowsRead:
        read = await self._ask(ReadRows(run_id=run_id, dataset=dataset, offset=offset, limit=limit), RowsRead)
        if read.error is not None:
            raise SheetsUnreadable(f"rows of dataset {dataset!r} of run {run_id} cannot be read: {read.error.message}")
        return read

    async def _ask(self, question: Message, answer: type[ReplyT]) -> ReplyT:
        try:
            return await self.bus.ask(question, SHEETS_ASKS, answer)
        except UnavailableError as error:
            raise NeighbourAway(str(error)) from error
