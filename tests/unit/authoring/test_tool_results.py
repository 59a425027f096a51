"""Tool results: reading by declared paths, and surviving JSON."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from rowmill.errors import UsageError
from rowmill.tool_results import Execution, ToolResult, values_at


class Contact(BaseModel):
    email: str | None = None


RAW = {"email": None, "data": {"emails": [{"value": "a"}, {"value": None}, {"value": "b"}], "0": "zero"}, "tags": ["x", None, "y"]}


def result(**changes: Any) -> ToolResult[Any]:
    facts: dict[str, Any] = {
        "tool": "hunter.find",
        "status": "completed",
        "raw": RAW,
        "data": Contact(email="a"),
        "extract": {"email": ["email", "data.emails.0.value"], "all": ["data.emails.*.value", "tags"], "none": ["nope.0.x"]},
    }
    return ToolResult(**{**facts, **changes})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("email", [None]),
        ("data.emails.0.value", ["a"]),
        ("data.emails.-1.value", ["b"]),
        ("data.emails.9.value", []),
        ("data.emails.*.value", ["a", None, "b"]),
        ("data.0", ["zero"]),
        ("tags", [["x", None, "y"]]),
        ("tags.1", [None]),
        ("email.deeper", []),
        ("data.emails.value", []),
    ],
)
def test_paths_lead_through_objects_and_lists(path: str, found: list[Any]) -> None:
    assert list(values_at(RAW, path)) == found


def test_get_gives_the_first_value_that_is_not_null_and_list_gives_all() -> None:
    assert result().get("email") == "a"
    assert result().list("all") == ["a", "b", "x", "y"]
    assert (result().get("none"), result().list("none")) == (None, [])


def test_false_and_zero_are_values() -> None:
    found = result(raw={"a": False, "b": 0}, extract={"x": ["a", "b"]})
    assert found.get("x") is False
    assert found.list("x") == [False, 0]


def test_an_extractor_that_is_not_declared_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="declares no extractor 'phone'; declared: all, email, none"):
        result().get("phone")


def test_a_result_survives_json_with_and_without_its_tool() -> None:
    whole = result(meta={"a": 1}, job_id="j", execution=Execution(kind="in_flight", receipt="abc", cost=Decimal("0.10")))
    document = json.loads(json.dumps(whole.to_json()))
    assert ToolResult.from_json(document, TypeAdapter(Contact)) == whole
    plain = ToolResult.from_json(document)
    assert plain.data == {"email": "a"}
    assert (plain.get("email"), plain.execution, plain.job_id, plain.meta) == ("a", whole.execution, "j", {"a": 1})


def test_data_that_is_the_raw_answer_is_stored_once() -> None:
    same = result(raw={"email": "a"}, data=Contact(email="a"))
    assert "data" not in same.to_json()
    assert ToolResult.from_json(same.to_json(), TypeAdapter(Contact)).data == Contact(email="a")


def test_no_data_comes_back_as_no_data() -> None:
    missing = result(raw={"error": "not found"}, data=None, status="no_result")
    assert ToolResult.from_json(json.loads(json.dumps(missing.to_json())), TypeAdapter(Contact)) == missing
