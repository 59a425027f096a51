"""Cutting an input into pages: whoever goes on from any page's end cuts as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rowmill_admission.page_cutting import CutPage, Cutting
from rowmill_admission.store.feeding import Place


def raws(lengths: list[int]) -> list[msgspec.Raw]:
    return [msgspec.Raw(f'{{"n":{place},"a":"{"x" * length}"}}'.encode()) for place, length in enumerate(lengths)]


def cut_all(staged: list[list[msgspec.Raw]], cutting: Cutting, place: Place) -> Iterator[CutPage]:
    for number in range(place.input_page, len(staged)):
        for page in cutting.pages(number, staged[number], place):
            yield page
            place = page.following
        if place.input_page == number:
            place = Place(page=place.page, index=place.index, input_page=number + 1)


@given(
    lengths=st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=6),
    page_rows=st.integers(1, 6),
    page_bytes=st.integers(20, 300),
    limit=st.none() | st.integers(0, 40),
)
def test_every_row_is_in_one_page_in_order_from_wherever_it_is_taken_up(
    lengths: list[list[int]], page_rows: int, page_bytes: int, limit: int | None
) -> None:
    staged = [raws(page) for page in lengths]
    cutting = Cutting(page_rows, page_bytes, limit)
    pages = list(cut_all(staged, cutting, Place()))
    rows = [row for page in staged for row in page]
    assert [row for page in pages for row in page.rows] == rows[:limit]
    assert [page.place.page for page in pages] == list(range(len(pages)))
    for before, page in enumerate(pages, start=1):
        assert staged[page.place.input_page][page.place.input_offset :][: len(page.rows)] == page.rows
        rest = list(cut_all(staged, cutting, page.following)) if limit is None or page.following.index < limit else []
        assert [(each.place, each.rows) for each in rest] == [(each.place, each.rows) for each in pages[before:]]
