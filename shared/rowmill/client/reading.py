"""Reading a run's rows back from the sheet-writer, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rowmill.errors import RowmillError
from rowmill.runtime.asking import AskBus
from rowmill_contracts.rows import ReadCounts, ReadRow, ReadRows, RowsRead
from rowmill_contracts.runs import RowsCommitted
from rowmill_contracts.topology import SHEETS_ASKS

READ_ROWS = 1000


class SheetReader:
    """Rows of runs in input order. Serves handles as their `PageReader`."""

    def __init__(self, bus: AskBus) -> None:
        self._bus = bus

    async def page(self, run_id: str, dataset: str, offset: int, limit: int, *, meta: bool = False) -> RowsRead:
        """Rows from ``offset`` on, ``limit`` (≤ 1 000) at most; may be fewer (see `RowsRead`).

        Raises:
            RowmillError: the writer says that it cannot.

        """
        read = await self._bus.ask(ReadRows(run_id=run_id, dataset=dataset, offset=offset, limit=limit, meta=meta), SHEETS_ASKS, RowsRead)
        if read.error is not None:
            raise RowmillError(read.error.message)
        return read

    async def rows(self, run_id: str, dataset: str, *, offset: int = 0, limit: int | None = None, meta: bool = False) -> AsyncIterator[ReadRow]:
        """All rows from ``offset`` on, ``limit`` at most."""
        position: int | None = offset
        left = limit
        while position is not None and (left is None or left > 0):
            read = await self.page(run_id, dataset, position, min(READ_ROWS, left or READ_ROWS), meta=meta)
            for row in read.rows:
                yield row
            if left is not None:
                left -= len(read.rows)
            position = read.next_offset

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        """Rows ``page_number * size`` onwards, ``size`` at most, fewer only at the end; as stored (see `rowmill.encoding.values`)."""
        decode = msgspec.json.decode
        return [decode(row.data) async for row in self.rows(run_id, dataset, offset=page_number * size, limit=size)]

    async def count(self, run_id: str, dataset: str) -> int:
        """How many rows the run admitted to the dataset, duplicates included."""
        return (await self._bus.ask(ReadCounts(run_id=run_id, dataset=dataset), SHEETS_ASKS, RowsCommitted)).counts.admitted
