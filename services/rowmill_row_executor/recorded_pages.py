"""Reads of handles in a body: on record, so that a replay reads what the body read before."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from rowmill_contracts.envelope import NULL
from rowmill_row_executor.body_calls import BodyCalls
from rowmill_row_executor.ports import RowSource

_RECORDED_BYTES = 256 * 1024
"""A larger page of rows is on record by its digest, and read again in a replay."""


class PageRead(msgspec.Struct, omit_defaults=True):
    """A page of rows that a body read, as it is on record: the rows, or (where they are many bytes) only their digest."""

    digest: str
    rows: msgspec.Raw = NULL


class RecordedPages:
    """`PageReader` of the handles that a body is given. ``count``: rows at the dataset's end, which is on record."""

    def __init__(self, calls: BodyCalls, sheets: RowSource, count: int) -> None:
        self._calls = calls
        self._sheets = sheets
        self._count = count

    async def count(self, run_id: str, dataset: str) -> int:
        del run_id, dataset  # a handle has one
        return self._count

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        """Rows as stored; the same ones in every replay. Raises `NonDeterministicPlay` for rows that are not there any more."""
        met = await self._calls.meet("read", f"{run_id}/{dataset}", f"{page_number}*{size}")
        recorded = None if met.recorded is None else msgspec.json.decode(met.recorded.result, type=PageRead)
        if recorded is not None and recorded.rows != NULL:
            rows: list[dict[str, Any]] = msgspec.json.decode(recorded.rows)
            return rows
        with self._calls.under_way():
            await self._calls.write()
            rows = await self._sheets.read_page(run_id, dataset, page_number, size)
        text = msgspec.json.encode(rows)
        digest = hashlib.sha256(text).hexdigest()
        if recorded is None:
            kept = msgspec.Raw(text) if len(text) <= _RECORDED_BYTES else NULL
            self._calls.keep(met, msgspec.Raw(msgspec.json.encode(PageRead(digest, kept))))
        elif recorded.digest != digest:
            raise self._calls.changed(f"rows {page_number * size} onwards of dataset {dataset!r} are not those that the body read before")
        return rows
