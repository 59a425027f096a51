"""Staging a source: its rows published as the pages of an input, then sealed. Flat in memory: a window of pages is in flight at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from rowmill.inputs import Source
from rowmill.runtime.bus import Bus
from rowmill_contracts.digests import input_digest, page_digest
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS
from rowmill_contracts.runs import InputPage, InputSealed
from rowmill_contracts.topology import INPUTS

WINDOW: Final = 32
"""Pages published and not confirmed at once."""


@dataclass(frozen=True)
class Staged:
    """A sealed input: its id, and how many rows it holds."""

    input_id: str
    rows: int


def sealed(source: Source, input_id: str) -> InputSealed:
    """The seal that staging this source would end with: reads it through, and publishes nothing. For a source that can be paged again."""
    digests: list[bytes] = []
    total = 0
    for encoded in source.encoded_pages(max_rows=PAGE_ROWS, max_bytes=PAGE_BYTES):
        digests.append(page_digest(encoded))
        total += len(encoded)
    return InputSealed(input_id=input_id, pages=len(digests), rows=total, digest=input_digest(digests))


async def stage(bus: Bus, source: Source, input_id: str, *, on_progress: Callable[[int], None] | None = None) -> Staged:
    """Publish every row of ``source`` in order and seal the input; returns after the broker confirmed all of it.

    ``on_progress`` is told how many rows were published so far. Reading runs in a thread, so that a slow disk or parser does not hold the loop.
    Raises what the source raises; then nothing is sealed, and no run can start on it.
    """
    pages = source.encoded_pages(max_rows=PAGE_ROWS, max_bytes=PAGE_BYTES)
    digests: list[bytes] = []
    total = 0
    under_way: set[asyncio.Task[None]] = set()
    try:
        while (encoded := await asyncio.to_thread(next, pages, None)) is not None:
            digests.append(page_digest(encoded))
            total += len(encoded)
            page = InputPage(input_id=input_id, page=len(digests) - 1, rows=[msgspec.Raw(row) for row in encoded])
            under_way.add(asyncio.create_task(bus.publish(page, INPUTS, correlation_id=input_id)))
            if len(under_way) >= WINDOW:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if on_progress is not None:
                on_progress(total)
        await asyncio.gather(*under_way)
    except BaseException:
        for task in under_way:
            task.cancel()
        raise
    seal = InputSealed(input_id=input_id, pages=len(digests), rows=total, digest=input_digest(digests))
    await bus.publish(seal, INPUTS, correlation_id=input_id)
    return Staged(input_id, total)
