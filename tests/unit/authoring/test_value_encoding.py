"""Values that JSON cannot carry round-trip, or fail naming the column; nothing is silently changed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import zoneinfo
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rowmill.encoding.canonical import canonical
from rowmill.encoding.exports import export_value
from rowmill.encoding.values import decode_value, encode_value
from rowmill.errors import ValueNotStorable
from rowmill.handles import HandleReference
from rowmill.rows import Rows
from rowmill.tool_results import Execution, ToolResult

texts = st.text()  # with NUL and lone surrogates
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary() | st.decimals(allow_nan=False) | st.dates(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
leaves = (
    hashables
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(dt.UTC))
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.sets(hashables, max_size=3)
    | st.binary().map(bytearray)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.sampled_from(["$rowmill", "$handle", "$rows"]), inner, max_size=4),
    max_leaves=12,
)


def through_storage(value: Any) -> Any:
    """As a value comes back from messages and the database."""
    return decode_value(msgspec.json.decode(msgspec.json.encode(encode_value(value, "c"))), "c")


def same(one: Any, other: Any) -> bool:
    """Equal in type and value at every level; sets by their members."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else ()
        return len(one) == len(other) and all(same(left, right) for pair in pairs for left, right in zip(*pair, strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(left, right) for left, right in zip(one, other, strict=True))
    if isinstance(one, dt.datetime):
        return repr(one) == repr(other)
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


@given(values)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(through_storage(value), value)


@given(values)
def test_an_encoded_value_is_canonical_json_that_a_database_can_hold(value: Any) -> None:
    text = canonical(encode_value(value, "c")).decode()
    assert "\\u0000" not in text


@given(values)
def test_exports_are_plain_json(value: Any) -> None:
    json.dumps(export_value(encode_value(value, "c")), allow_nan=False)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e15, 1e15)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
)


@given(plain_values.filter(lambda value: "-0.0" not in repr(value)))
def test_plain_json_values_pass_without_a_copy(value: Any) -> None:
    encoded = encode_value(value, "c")
    assert encoded is value
    assert decode_value(encoded, "c") is value


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (Decimal("1.10"), {"$rowmill": "decimal", "v": "1.10"}),
        (float("nan"), {"$rowmill": "float", "v": "nan"}),
        (-0.0, {"$rowmill": "float", "v": "-0.0"}),
        (1e16, {"$rowmill": "float", "v": "1e+16"}),
        (2**64, {"$rowmill": "int", "v": "18446744073709551616"}),
        ("a\x00b", {"$rowmill": "str", "v": "a\\x00b"}),
        ("\ud800", {"$rowmill": "str", "v": "\\ud800"}),
        (b"\xff", {"$rowmill": "bytes", "v": "/w=="}),
        (dt.date(2024, 2, 29), {"$rowmill": "date", "v": "2024-02-29"}),
        ({3, 1}, {"$rowmill": "set", "v": [1, 3]}),
        ({1: "a"}, {"$rowmill": "dict", "v": [[1, "a"]]}),
        ({"$rowmill": "decimal", "v": "1"}, {"$rowmill": "dict", "v": [["$rowmill", "decimal"], ["v", "1"]]}),
        ({"$handle": {"run_id": "r", "dataset": "d"}}, {"$rowmill": "dict", "v": [["$handle", {"run_id": "r", "dataset": "d"}]]}),
    ],
)
def test_encodings_are_as_documented(value: Any, encoded: Any) -> None:
    assert encode_value(value, "c") == encoded


def test_a_repeated_hour_and_a_named_zone_come_back() -> None:
    moment = dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris"))
    back = through_storage(moment)
    assert (back, back.fold, back.tzinfo.key) == (moment, 1, "Europe/Paris")


class Level(enum.Enum):
    HIGH = "high"


class Point(BaseModel):
    x: Decimal
    label: str = "p"


@dataclasses.dataclass
class Pair:
    left: int
    right: Point


class Marked(msgspec.Struct):
    at: dt.date


@pytest.mark.parametrize(
    ("value", "stored_as"),
    [
        (Point(x=Decimal("1.5")), {"x": Decimal("1.5"), "label": "p"}),
        (Pair(1, Point(x=Decimal(2))), {"left": 1, "right": {"x": Decimal(2), "label": "p"}}),
        (Marked(dt.date(2024, 1, 1)), {"at": dt.date(2024, 1, 1)}),
        (Level.HIGH, "high"),
        (np.int64(3), 3),
        (np.float64("nan"), float("nan")),
        (np.bool_(True), True),
        (pd.Timestamp("2024-01-01T10:00:00"), dt.datetime(2024, 1, 1, 10)),  # noqa: DTZ001
    ],
)
def test_views_of_plain_values_are_stored_as_those(value: Any, stored_as: Any) -> None:
    assert same(through_storage([value]), [stored_as])


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, open, iter([1]), pd.NaT, pd.Timestamp("2024-01-01T00:00:00.000000001"), 10**5000, np.array([1, 2])],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_encoding_fails_naming_the_column(value: Any) -> None:
    with pytest.raises(ValueNotStorable, match="column 'email'"):
        encode_value({"deep": [value]}, "email")


def test_a_coroutine_that_was_not_awaited_is_named_so() -> None:
    coroutine = _coroutine()
    with pytest.raises(ValueNotStorable, match="not awaited"):
        encode_value(coroutine, "email")
    coroutine.close()


def test_cycles_fail_naming_the_column() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = [loop, Decimal(1)]
    for value in (loop, [{1: loop}]):
        with pytest.raises(ValueNotStorable, match=r"column 'c'.*contains itself"):
            encode_value(value, "c")


def test_a_value_that_stands_in_two_places_is_no_cycle() -> None:
    shared = [Decimal(1)]
    assert through_storage([shared, shared]) == [shared, shared]


def test_a_stored_value_of_an_unknown_kind_is_refused() -> None:
    for stored in ({"$rowmill": "future", "v": 1}, {"$rowmill": "decimal"}, {"$rowmill": "decimal", "v": "x"}):
        with pytest.raises(ValueNotStorable, match="column 'c'"):
            decode_value(stored, "c")


def test_handles_and_staged_inputs_keep_their_own_forms() -> None:
    reference = HandleReference("r1", "leads")
    assert encode_value([reference], "c") == [{"$handle": {"run_id": "r1", "dataset": "leads"}}]
    assert through_storage([reference]) == [reference]
    assert decode_value({"$handle": {"run_id": "r1", "dataset": "leads"}}, "c", handle=lambda *names: names) == ("r1", "leads")
    assert through_storage(Rows("leads", "in-1")) == Rows("leads", "in-1")


def test_a_tool_result_comes_back_whole_and_exports_its_data() -> None:
    result = ToolResult(
        tool="crm.find",
        status="completed",
        raw={"email": "a@b.c", "$rowmill": "x", "n": 2**70},
        data=Point(x=Decimal("0.5")),
        meta={"attempts": [1]},
        job_id="j1",
        execution=Execution(kind="cache", receipt="abc", cost=Decimal("0.010")),
        extract={"email": ["email"]},
    )
    back = through_storage({"cell": result})["cell"]
    assert back == msgspec.structs.replace(result, data={"x": "0.5", "label": "p"})
    assert back.get("email") == "a@b.c"
    assert export_value(encode_value({"cell": result}, "c")) == {"cell": {"x": "0.5", "label": "p"}}


def test_exports_of_what_json_lacks_are_texts_and_numbers() -> None:
    value = [Decimal("1.10"), dt.date(2024, 1, 2), (1, {2}), {1: "a"}, {"$rows": 1}, dt.timedelta(minutes=1), b"a", UUID(int=1), 1e300, float("inf")]
    assert export_value(encode_value(value, "c")) == [
        "1.10", "2024-01-02", [1, [2]], [[1, "a"]], {"$rows": 1}, 60.0, "YQ==", "00000000-0000-0000-0000-000000000001", 1e300, "inf",
    ]  # fmt: skip
