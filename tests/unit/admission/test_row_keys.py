"""Keys of input rows, and which rows are duplicates."""

from __future__ import annotations

import hashlib
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.encoding.canonical import row_key
from rowmill.errors import KeyPartMissing
from rowmill_admission.row_keys import DIGEST_BYTES, SeenKeys, duplicates_among, keys_of
from rowmill_contracts.runs import OpenDataset


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def dataset(**fields: object) -> OpenDataset:
    return msgspec.convert({"run_id": "r", "term": 1, "dataset": "d", "input_id": "i", "columns": [], "code_digest": "c", **fields}, OpenDataset)


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def test_the_whole_row_is_the_key_whatever_its_spelling() -> None:
    first, second, other = keys_of([raw('{"b":1,"a":"x"}'), raw('{ "a" : "\\u0078", "b":1 }'), raw('{"b":1.0,"a":"x"}')], 0, dataset())
    assert first == second == row_key({"a": "x", "b": 1})
    assert first != other


def test_key_columns_make_the_key() -> None:
    first, second = keys_of([raw('{"a":1,"b":2}'), raw('{"a":1,"b":3}')], 0, dataset(key=["a"]))
    assert first == second == row_key({"a": 1}, ["a"])


def test_a_key_part_that_is_missing_names_the_row_as_a_person_counts_it_and_says_what_to_do() -> None:
    named = r"row 403 of the input \(counted from 1, the header not counted\): key column 'a' is null; every row needs a key: fill it in"
    with pytest.raises(KeyPartMissing, match=named):
        keys_of([raw('{"a":1}'), raw('{"a":2}'), raw('{"a":null}')], 400, dataset(key=["a"]))


def test_equal_records_differ_by_their_place() -> None:
    keys = keys_of([raw('{"a":1}')] * 3, 0, dataset(source_row_identity=True))
    assert len(set(keys)) == 3
    assert keys[2:] == keys_of([raw('{"a":1}')], 2, dataset(source_row_identity=True))


@given(st.lists(st.integers(0, 300), max_size=400))
def test_digests_are_seen_as_by_a_set(numbers: list[int]) -> None:
    seen, known = SeenKeys(), set[bytes]()
    for number in numbers:
        short = digest(number)[:DIGEST_BYTES]
        assert seen.add(short) is (short not in known)
        known.add(short)
    assert len(seen) == len(known)


@given(st.lists(st.binary(min_size=DIGEST_BYTES - 2, max_size=DIGEST_BYTES - 2), max_size=30))
def test_a_digest_that_lies_across_two_others_is_new(ends: list[bytes]) -> None:
    seen, known = SeenKeys(), set[bytes]()
    for end in [bytes(14), b"\x01" * 14, bytes(7) + b"\x01" * 7, *ends]:
        short = b"\0\0" + end
        assert seen.add(short) is (short not in known)
        known.add(short)


def test_duplicates_are_found_within_a_page_and_over_pages() -> None:
    seen = SeenKeys()
    first, digests = duplicates_among([digest(1), digest(2), digest(1)], seen)
    assert (first, digests) == ({2}, digest(1)[:16] + digest(2)[:16])
    again = SeenKeys()
    again.restore(digests)
    second, more = duplicates_among([digest(2), digest(3)], again)
    assert (second, more) == ({0}, digest(3)[:16])


def test_seen_keys_take_little_memory() -> None:
    digests = [digest(number)[:DIGEST_BYTES] for number in range(200_000)]
    tracemalloc.start()
    seen = SeenKeys()
    for short in digests:
        seen.add(short)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(digests) < 100
