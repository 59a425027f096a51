"""Cutting an input's stored pages into the dataset's pages. Every feeder, now or later, cuts alike from the same place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import msgspec

from rowmill.runtime.db import Database
from rowmill_admission import inputs
from rowmill_admission.store import inputs as input_store
from rowmill_admission.store.feeding import Place, SentPage


@dataclass(frozen=True, slots=True)
class CutPage:
    """Rows ``place.index`` to ``place.index + len(rows) - 1`` of the run's input, and where the page after it begins.

    ``size``: bytes of the rows' JSON.
    """

    place: Place
    rows: list[msgspec.Raw]
    following: Place
    size: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """How an input is cut: rows and bytes of a page at most, and the index at which the run's limit ends it (None: none)."""

    page_rows: int
    page_bytes: int
    limit: int | None = None

    def pages(self, input_page: int, rows: list[msgspec.Raw], place: Place) -> Iterator[CutPage]:
        """The pages cut from one input page, from ``place`` on."""
        rest = rows[place.input_offset :] if place.input_page == input_page else rows
        if self.limit is not None:
            rest = rest[: max(0, self.limit - place.index)]
        offset = place.input_offset if place.input_page == input_page else 0
        number, index = place.page, place.index
        for part in inputs.cut(rest, self.page_rows, self.page_bytes):
            begin = Place(page=number, index=index, input_page=input_page, input_offset=offset)
            number, index, offset = number + 1, index + len(part), offset + len(part)
            end = (input_page + 1, 0) if offset == len(rows) else (input_page, offset)
            size = sum(memoryview(row).nbytes for row in part)
            yield CutPage(begin, list(part), Place(page=number, index=index, input_page=end[0], input_offset=end[1]), size)


async def pages_from(
    database: Database, input_id: str, place: Place, cutting: Cutting, *, read_pages: int, read_bytes: int
) -> AsyncIterator[CutPage]:
    """All pages from ``place`` to the input's end, or to the limit. Holds about ``read_bytes`` of the input at a time."""
    while cutting.limit is None or place.index < cutting.limit:
        stored = await input_store.pages_from(database, input_id, place.input_page, read_pages, read_bytes)
        if not stored:
            return
        for number, body in stored:
            for page in cutting.pages(number, inputs.rows_of(body), place):
                yield page
                place = page.following
            if place.input_page == number:  # the input page had no rows, or the limit ended it
                place = Place(page=place.page, index=place.index, input_page=number + 1)
            if cutting.limit is not None and place.index >= cutting.limit:
                return


async def page_again(database: Database, input_id: str, sent: SentPage) -> CutPage:
    """A page that was published before."""
    [(_, body)] = await input_store.pages_from(database, input_id, sent.input_page, 1, 1)
    rows = inputs.rows_of(body)[sent.input_offset : sent.input_offset + sent.rows]
    place = Place(page=sent.page, index=sent.first_index, input_page=sent.input_page, input_offset=sent.input_offset)
    return CutPage(place, rows, place, sent.size)
