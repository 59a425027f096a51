"""Canonical JSON and row keys: one value has one text, and different values have different keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.encoding.canonical import canonical, read_digest, row_key, row_key_of, source_row_key
from rowmill.errors import KeyPartMissing, ValueNotStorable

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20)


@given(json_values)
def test_canonical_text_reads_back_as_the_same_value(value: Any) -> None:
    assert repr(_sorted(json.loads(canonical(value)))) == repr(_sorted(value))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(texts, json_values), st.randoms())
def test_the_order_of_members_makes_no_difference(row: dict[str, Any], random: Any) -> None:
    shuffled = list(row.items())
    random.shuffle(shuffled)
    assert canonical(dict(shuffled)) == canonical(row)
    assert row_key(dict(shuffled)) == row_key(row)


@given(json_values, json_values)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (repr(_sorted(one)) == repr(_sorted(other)))


def test_members_are_sorted_at_every_level_without_spaces() -> None:
    assert canonical({"b": [{"z": 1, "a": None}], "a": "é"}) == '{"a":"é","b":[{"a":null,"z":1}]}'.encode()


def test_a_whole_number_and_a_float_differ_and_so_do_a_number_and_its_text() -> None:
    assert len({canonical(value) for value in (1, 1.0, "1", True, [1])}) == 5


def test_composed_and_decomposed_letters_differ() -> None:
    assert canonical("\u00e9") != canonical("e\u0301")


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**40, -(10**40)])
def test_integers_of_any_size_keep_every_digit(number: int) -> None:
    assert canonical([number]) == f"[{number}]".encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {1: "a"}, {"a": {2}}, (1,), "\ud800", {"\udfff": 1}, [object()]])
def test_what_json_lacks_is_refused_instead_of_changed(value: Any) -> None:
    with pytest.raises(ValueNotStorable):
        canonical(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(ValueNotStorable, match="contains itself"):
        canonical(loop)


def test_the_key_of_a_whole_row_is_the_digest_of_its_canonical_text() -> None:
    row = {"domain": "a.com", "name": None}
    assert row_key(row) == hashlib.sha256(b'{"domain":"a.com","name":null}').digest()


def test_key_columns_count_alone_and_in_any_order() -> None:
    row = {"domain": "a.com", "country": "FR", "name": "A"}
    assert row_key(row, ["domain", "country"]) == row_key({**row, "name": "B"}, ["country", "domain"])
    assert row_key(row, ["domain"]) != row_key(row, ["country"])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"domain": None}, "row 8 of the input (counted from 1, the header not counted): key column 'domain' is null"),
        ({"domain": ""}, "row 8 of the input (counted from 1, the header not counted): key column 'domain' is empty"),
        ({"domain": []}, "row 8 of the input (counted from 1, the header not counted): key column 'domain' is empty"),
        ({"site": "a"}, "row 8 of the input (counted from 1, the header not counted): there is no key column 'domain'; the row has site"),
    ],
)
def test_a_missing_key_part_names_the_row_and_the_part(row: dict[str, Any], named: str) -> None:
    with pytest.raises(KeyPartMissing) as raised:
        row_key(row, ["domain"], index=7)
    assert str(raised.value).startswith(named)


@pytest.mark.parametrize("part", [0, False, 0.0])
def test_zero_and_false_are_key_parts(part: Any) -> None:
    assert row_key({"id": part}, ["id"]) != row_key({"id": "x"}, ["id"])


def test_a_key_function_gives_a_value_or_parts() -> None:
    assert row_key_of(("a", 1)) == row_key_of(["a", 1]) != row_key_of("a")
    missing: list[Any] = [None, "", [], ("a", None)]
    for value in missing:
        with pytest.raises(KeyPartMissing, match=r"row 4 of the input.* of key function 'by_name' is .*let the function give something else there"):
            row_key_of(value, index=3, function="by_name")


def test_who_has_no_value_for_a_key_column_is_told_of_functions_too() -> None:
    with pytest.raises(KeyPartMissing, match="take another key=, such as a function of the row that gives something else there"):
        row_key({"domain": ""}, ["domain"])


def test_equal_records_at_different_places_have_different_source_row_keys() -> None:
    keys = {source_row_key("in-1", 0, b"{}"), source_row_key("in-1", 1, b"{}"), source_row_key("in-2", 0, b"{}"), source_row_key("in-1", 0, b"[]")}
    assert len(keys) == 4


def test_a_read_set_speaks_of_the_columns_read_alone() -> None:
    assert read_digest({"a": 1, "b": 2}, ["a"]) == read_digest({"a": 1, "b": 3}, ["a"])
    assert read_digest({"a": None}, ["a"]) != read_digest({}, ["a"])
