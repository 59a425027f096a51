"""Staged inputs: what a page holds, and when an input is whole."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.runtime.deliveries import Rejected
from rowmill_admission import inputs
from rowmill_admission.inputs import Input
from rowmill_contracts.digests import input_digest, page_digest
from rowmill_contracts.runs import InputSealed

PAGES = [(0, 2, b"a" * 32), (1, 3, b"b" * 32)]
WHOLE = Input("i", "open", pages=2, rows=5, seal_pages=2, seal_rows=5, seal_digest=input_digest([b"a" * 32, b"b" * 32]))


def raws(*texts: str) -> list[msgspec.Raw]:
    return [msgspec.Raw(text.encode()) for text in texts]


def test_a_page_keeps_its_rows_as_they_came() -> None:
    rows = raws('{"a": 1}', '{"b":[1, 2.0]}')
    page = inputs.page_of("i", 3, rows)
    assert (page.input_id, page.page, page.rows) == ("i", 3, 2)
    assert page.digest == page_digest(map(memoryview, rows))
    assert inputs.rows_of(page.body) == rows
    assert inputs.rows_of(inputs.page_of("i", 0, []).body) == []


@pytest.mark.parametrize("text", ["3", "null", "[]", '"a"'])
def test_rows_must_be_objects(text: str) -> None:
    with pytest.raises(Rejected, match=r"page 3 of input 'i'.*\$\[1\]"):
        inputs.page_of("i", 3, raws("{}", text))


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 10), st.integers(10, 120))
def test_pages_are_cut_by_rows_and_bytes_and_lose_nothing(lengths: list[int], max_rows: int, max_bytes: int) -> None:
    rows = raws(*('{"a":"' + "x" * length + '"}' for length in lengths))
    parts = list(inputs.cut(rows, max_rows, max_bytes))
    assert [row for part in parts for row in part] == rows
    for part in parts:
        assert 0 < len(part) <= max_rows
        assert len(part) == 1 or sum(memoryview(row).nbytes for row in part) <= max_bytes


def test_an_input_is_looked_at_when_the_seal_and_as_many_pages_are_here() -> None:
    assert inputs.may_be_whole(WHOLE)
    assert not inputs.may_be_whole(replace(WHOLE, seal_pages=None))
    assert not inputs.may_be_whole(replace(WHOLE, pages=1))
    assert inputs.may_be_whole(replace(WHOLE, pages=3))


def test_what_agrees_is_sealed() -> None:
    assert inputs.verdict(WHOLE, PAGES) is None
    assert inputs.verdict(replace(WHOLE, seal_digest=None), PAGES) is None
    assert inputs.verdict(Input("i", "open", seal_pages=0, seal_rows=0), []) is None


@pytest.mark.parametrize(
    ("known", "pages", "said"),
    [
        (WHOLE, [(0, 2, b"a" * 32), (2, 3, b"b" * 32)], "pages numbered up to 2"),
        (WHOLE, [*PAGES, (2, 1, b"c" * 32)], "sealed with 2 pages"),
        (replace(WHOLE, seal_rows=6), PAGES, "sealed with 6 rows, but its pages hold 5"),
        (WHOLE, [(0, 2, b"a" * 32), (1, 3, b"c" * 32)], "digest"),
    ],
)
def test_what_contradicts_fails_and_says_why(known: Input, pages: list[tuple[int, int, bytes]], said: str) -> None:
    problem = inputs.verdict(known, pages)
    assert problem is not None
    assert problem.code == "input"
    assert said in problem.message


def test_a_second_seal_must_say_the_same() -> None:
    assert inputs.sealed_twice(WHOLE, InputSealed(input_id="i", pages=2, rows=5)) is None
    assert inputs.sealed_twice(replace(WHOLE, seal_pages=None), InputSealed(input_id="i", pages=9, rows=9)) is None
    problem = inputs.sealed_twice(WHOLE, InputSealed(input_id="i", pages=2, rows=6))
    assert problem is not None
    assert "2 pages of 5 rows, then as 2 of 6" in problem.message
