"""Sealing the rows that a body hands to a dataset, before its first row runs: rows in memory, or another dataset's rows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from rowmill.datasets import DatasetProgram, source_rows
from rowmill.encoding.values import encode_value
from rowmill.errors import DefinitionError
from rowmill.handles import Handle
from rowmill.rows import Rows
from rowmill_contracts.digests import input_digest, page_digest
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS
from rowmill_row_executor.ports import Admission, RowSource

MAX_INPUT_ROW_BYTES = 1024 * 1024


async def seal_rows(admission: Admission, input_id: str, rows: AsyncIterator[msgspec.Raw]) -> None:
    """Store the rows as the pages of an input and seal it, each confirmed. The same rows under the same id may be sealed again."""
    digests: list[bytes] = []
    total = 0
    page: list[msgspec.Raw] = []
    size = 0

    async def send() -> None:
        nonlocal page, size, total
        await admission.stage(input_id, len(digests), page)
        digests.append(page_digest(memoryview(row) for row in page))
        total += len(page)
        page, size = [], 0

    async for row in rows:
        length = len(memoryview(row))
        if page and (len(page) == PAGE_ROWS or size + length > PAGE_BYTES):
            await send()
        page.append(row)
        size += length
    if page:
        await send()
    await admission.seal(input_id, pages=len(digests), rows=total, digest=input_digest(digests))


async def rows_of(program: DatasetProgram, sheets: RowSource) -> AsyncIterator[msgspec.Raw]:
    """The rows of a source that is not staged yet, as JSON objects. Raises `DefinitionError` or `ValueNotStorable` naming row or column."""
    source = program.source
    if isinstance(source, Handle):
        async for read in sheets.rows(source.run_id, source.dataset, 0, None):
            yield read.data
    elif not isinstance(source, Rows):
        for index, row in enumerate(source_rows(source)):
            text = msgspec.json.encode({name: encode_value(value, name) for name, value in row.items()})
            if len(text) > MAX_INPUT_ROW_BYTES:
                raise DefinitionError(f"dataset {program.key!r}: row {index} has {len(text)} bytes; a row has at most {MAX_INPUT_ROW_BYTES}")
            yield msgspec.Raw(text)
