"""What `--out` writes: every row in order, columns in order, and a file that is there whole or not at all."""

import csv
import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rowmill.encoding.values import encode_value
from rowmill.errors import OutputError
from rowmill.handles import HandleReference
from rowmill.inputs import open_source
from rowmill.outputs import RowWriter, check_output
from rowmill.tool_results import ToolResult


def write(path: Path, *rows: dict[str, Any], inputs: list[str] | None, outputs: list[str], flatten: bool = False) -> None:
    with RowWriter(path, input_columns=inputs, output_columns=outputs, flatten=flatten) as writer:
        for row in rows:
            writer.write(row, "completed", None)


def table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_csv_has_input_then_output_columns_then_status_and_error(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with RowWriter(path, input_columns=["domain", "name"], output_columns=["score", "name"]) as writer:
        writer.write({"score": 80, "domain": "a.com", "name": "Zoë, ö"}, "completed", None)
        writer.write({"domain": "b.com"}, "failed", "no such domain\nat all")
        assert writer.rows == 2
    assert table(path) == [
        ["domain", "name", "score", "_status", "_error"],
        ["a.com", "Zoë, ö", "80", "completed", ""],
        ["b.com", "", "", "failed", "no such domain\nat all"],
    ]


class Contact(BaseModel):
    email: str


def test_stored_values_read_in_csv_as_people_expect(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    values: dict[str, Any] = {
        "object": {"email": "ü@a.com"},
        "list": [1, None],
        "true": True,
        "float": 0.1,
        "nan": float("nan"),
        "big": 2**70,
        "day": dt.date(2024, 2, 29),
        "money": Decimal("1.10"),
        "bytes": b"\x00\xff",
        "model": Contact(email="x"),
        "result": ToolResult(tool="t", status="completed", raw={"a": 1}, data=Contact(email="y")),
        "surrogate": "a\ud800",
        "nested": {"when": dt.timedelta(seconds=90), "tags": {"b", "a"}},
        "handle": HandleReference("r1", "leads"),
        "formula": "=1+1",
    }
    stored = {name: encode_value(value, name) for name, value in values.items()}
    write(path, stored, inputs=[], outputs=list(values))
    header, row = table(path)
    assert dict(zip(header, row, strict=True)) == {
        "object": '{"email":"ü@a.com"}',
        "list": "[1,null]",
        "true": "true",
        "float": "0.1",
        "nan": "nan",
        "big": str(2**70),
        "day": "2024-02-29",
        "money": "1.10",
        "bytes": "AP8=",
        "model": '{"email":"x"}',
        "result": '{"email":"y"}',
        "surrogate": "a\\ud800",
        "nested": '{"when":90.0,"tags":["a","b"]}',
        "handle": '{"$handle":{"run_id":"r1","dataset":"leads"}}',
        "formula": "=1+1",
        "_status": "completed",
        "_error": "",
    }


def test_tsv_is_cut_by_tabs(tmp_path: Path) -> None:
    write(tmp_path / "out.tsv", {"a": 1, "b": "x,y"}, inputs=["a"], outputs=["b"])
    assert (tmp_path / "out.tsv").read_text().splitlines()[1] == "1\tx,y\tcompleted\t"


def test_flatten_puts_members_where_their_object_was(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    rows: list[dict[str, Any]] = [
        {"domain": "a", "contact": None, "score": 1},
        {"domain": "b", "contact": {"email": "e", "name": {"first": "f"}, "tags": ["x"], "none": {}}, "score": 2},
        {"domain": "c", "contact": {"phone": "p"}, "score": 3},
    ]
    write(path, *rows, inputs=["domain"], outputs=["contact", "score"], flatten=True)
    assert table(path) == [
        ["domain", "contact.email", "contact.name.first", "contact.tags", "contact.none", "contact.phone", "score", "_status", "_error"],
        ["a", "", "", "", "", "", "1", "completed", ""],
        ["b", "e", "f", '["x"]', "{}", "", "2", "completed", ""],
        ["c", "", "", "", "", "p", "3", "completed", ""],
    ]


def test_flatten_keeps_a_column_that_also_holds_plain_values(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", {"c": "text"}, {"c": {"x": 1}}, inputs=[], outputs=["c"], flatten=True)
    assert table(tmp_path / "out.csv")[0] == ["c", "c.x", "_status", "_error"]


def test_flatten_refuses_two_columns_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"two columns the name 'a\.b'"):
        write(tmp_path / "out.csv", {"a": {"b": 1}, "a.b": 2}, inputs=["a.b"], outputs=["a"], flatten=True)


def test_unknown_input_columns_come_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, {"score": 1, "x": "p"}, {"y": "q", "score": 2}, inputs=None, outputs=["score"])
    assert table(path) == [
        ["x", "y", "score", "_status", "_error"],
        ["p", "", "1", "completed", ""],
        ["", "q", "2", "completed", ""],
    ]


def test_a_column_that_was_not_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not announced: 'surprise'"):
        write(tmp_path / "out.csv", {"a": 1, "surprise": 2}, inputs=["a"], outputs=[])
    assert list(tmp_path.iterdir()) == []


def test_a_former_output_can_be_an_input(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, {"a": 1, "_status": "failed", "_error": "old"}, inputs=["a", "_status", "_error"], outputs=["b"])
    assert table(path) == [["a", "b", "_status", "_error"], ["1", "", "completed", ""]]


def test_json_lines_keep_types(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RowWriter(path, input_columns=["a"], output_columns=["b"]) as writer:
        writer.write({"b": {"x": [1, None]}, "a": ""}, "completed", None)
        writer.write({"a": None}, "failed", "why")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"a": "", "b": {"x": [1, None]}, "_status": "completed", "_error": None},
        {"a": None, "_status": "failed", "_error": "why"},
    ]


def test_json_lines_flatten_too(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", {"a": {"x": 1}}, inputs=None, outputs=["a"], flatten=True)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"a.x": 1, "_status": "completed", "_error": None}


def test_parquet_types_a_column_by_all_of_its_values(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    rows: list[dict[str, Any]] = [
        {"int": 1, "float": 1, "bool": True, "mixed": 1, "text": "x", "object": {"a": 1}, "huge": 2**64, "none": None, "exact": 2**60},
        {"int": None, "float": 2.5, "bool": None, "mixed": "one", "text": None, "object": None, "huge": 1, "none": None, "exact": 0.5},
    ]
    write(path, *rows, inputs=["int"], outputs=list(rows[0])[1:])
    read = pq.read_table(path)
    assert {field.name: str(field.type) for field in read.schema} == {
        "int": "int64",
        "float": "double",
        "bool": "bool",
        "mixed": "string",
        "text": "string",
        "object": "string",
        "huge": "string",
        "none": "string",
        "exact": "string",
        "_status": "string",
        "_error": "string",
    }
    assert read.to_pylist()[0] | {"_error": None} == {
        "int": 1,
        "float": 1.0,
        "bool": True,
        "mixed": "1",
        "text": "x",
        "object": '{"a":1}',
        "huge": str(2**64),
        "none": None,
        "exact": str(2**60),
        "_status": "completed",
        "_error": None,
    }


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_no_rows_still_make_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, inputs=["a"], outputs=["b"])
    source = open_source(path)
    assert list(source.pages()) == []
    assert source.columns == ([] if name == "out.jsonl" else ["a", "b", "_status", "_error"])


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_the_former_file_stays_until_the_new_one_is_complete(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("former")
    writer = RowWriter(path, input_columns=["a"], output_columns=[])
    with pytest.raises(ZeroDivisionError), writer:  # noqa: PT012 - the block is what fails
        writer.write({"a": 1}, "completed")
        assert path.read_text() == "former"
        raise ZeroDivisionError
    assert path.read_text() == "former"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_link_keeps_pointing_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "real.csv"
    target.write_text("former")
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    write(link, {"a": 1}, inputs=["a"], outputs=[])
    assert link.is_symlink()
    assert table(target)[1][0] == "1"


def test_a_device_is_written_to_directly() -> None:
    path = Path("/dev/null")
    write(path, {"a": 1}, inputs=["a"], outputs=[])
    assert path.is_char_device()


@pytest.mark.parametrize(
    ("name", "words"),
    [("out.xlsx", r"known: \.csv, \.tsv"), ("out", "known"), ("nowhere/out.csv", "does not exist"), ("folder.csv", "it is a folder")],
)
def test_an_unusable_path_is_refused_before_anything_is_spent(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(OutputError, match=words):
        check_output(tmp_path / name)


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    path = Path("/dev/full")
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left"):
        write(path, {"a": 1}, inputs=["a"], outputs=[])


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"a": text, "b": text}), max_size=10))
def test_text_written_as_csv_is_read_back_unchanged(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    path = tmp_path / "out.csv"
    write(path, *rows, inputs=["a"], outputs=["b"])
    source = open_source(path, delimiter=",", encoding="utf-8", quote='"')
    read = [{"a": row["a"], "b": row["b"]} for page in source.pages() for row in page]
    assert read == rows
