"""JSON Lines, Parquet, Arrow streams, frames, lists and iterators give the same kind of pages."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import AliasChoices, BaseModel, Field

from rowmill.encoding.values import encode_value
from rowmill.errors import BadText, InputError, MissingColumns
from rowmill.inputs import check_columns, open_source
from rowmill.row_shapes import shape_of
from rowmill.row_views import OpenRow, ReadSet


def rows(source: Any, **options: Any) -> list[dict[str, Any]]:
    return [row for page in open_source(source, **options).pages() for row in page]


def write(folder: Path, content: str | bytes, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# JSON Lines


def test_json_lines_keep_their_types_and_skip_blank_lines(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, '\ufeff{"a":1,"b":1.0}\n\n  \r\n{"a":null,"c":[{"x":"é"}]}'))
    assert list(source.pages()) == [[{"a": 1, "b": 1.0}, {"a": None, "c": [{"x": "é"}]}]]
    assert source.columns == ["a", "b", "c"]
    assert (source.stats.records, source.stats.blank_lines) == (2, 2)


def test_numbers_in_json_lines_are_not_changed(tmp_path: Path) -> None:
    (row,) = rows(write(tmp_path, '{"big":123456789012345678901234567890,"one":1,"oneish":1.0}'))
    assert row["big"] == encode_value(123456789012345678901234567890, "big")
    assert [type(row[name]) for name in ("one", "oneish")] == [int, float]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "found an array"),
        ("3", "found a number"),
        ("{'a':1}", "not JSON"),
        ('{"a":1', "not JSON"),
        ('{"a":1e999}', "too large"),
        ("[" * 5000, ""),
    ],
)
def test_a_broken_line_is_found_before_the_first_page(tmp_path: Path, line: str, words: str) -> None:
    source = open_source(write(tmp_path, '{"a":1}\n\n{"a":2}\n' + line + "\n"))
    with pytest.raises(BadText, match=rf"record 3 \(line 4\): .*{words}"):
        next(source.pages())


def test_bytes_that_do_not_decode_are_located_in_json_lines(tmp_path: Path) -> None:
    content = b'{"a":1}\n{"a":"\xff"}\n'
    with pytest.raises(BadText) as caught:
        open_source(write(tmp_path, content)).check()
    assert (caught.value.record, caught.value.line, caught.value.offset) == (2, 2, 14)


def test_empty_json_lines_have_no_rows(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "", "in.ndjson")) == []


def test_utf16_json_lines_are_read(tmp_path: Path) -> None:
    assert rows(write(tmp_path, '{"a":"é"}\n'.encode("utf-16"))) == [{"a": "é"}]


# Arrow


TABLE = pa.table(
    {
        "name": ["Zoë", None],
        "n": pa.array([1, 2], pa.int64()),
        "day": [dt.date(2024, 2, 29), None],
        "price": [Decimal("1.10"), Decimal("2.00")],
        "raw": [b"\x00\xff", b""],
        "tags": [["a"], []],
    }
)


def encoded_table() -> list[dict[str, Any]]:
    return [{name: encode_value(value, name) for name, value in row.items()} for row in TABLE.to_pylist()]


def test_parquet_rows_keep_their_meaning(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE, path)
    source = open_source(path)
    assert (source.columns, source.stats.records) == (TABLE.column_names, 2)
    assert [row for page in source.pages() for row in page] == encoded_table()
    assert [row for page in source.pages() for row in page] == encoded_table()


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable Parquet file"):
        open_source(write(tmp_path, b"PAR1 nothing", "in.parquet"))


@pytest.mark.parametrize("stream", [TABLE, TABLE.to_reader(), pl.DataFrame(TABLE)], ids=["table", "reader", "polars"])
def test_arrow_streams_are_read(stream: Any) -> None:
    source = open_source(stream)
    assert source.columns == TABLE.column_names
    assert [row for page in source.pages() for row in page] == encoded_table()
    assert source.stats.records == 2


def test_pandas_frame_without_its_unnamed_index() -> None:
    frame = pd.DataFrame({"a": ["x", None, "z"], "n": [1.5, None, 3.0]})
    assert rows(frame[frame["n"] != 1.5]) == [{"a": None, "n": None}, {"a": "z", "n": 3.0}]


def test_nanoseconds_are_not_cut() -> None:
    exact = pa.array([1_700_000_000_000_000_000], pa.timestamp("ns", tz="UTC"))
    finer = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns", tz="UTC"))
    (row,) = rows(pa.table({"exact": exact, "finer": finer}))
    assert row["exact"] == encode_value(dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=ZoneInfo("UTC")), "exact")
    assert row["finer"] == "2023-11-14 22:13:20.000000001Z"


def test_repeated_arrow_columns_get_names() -> None:
    assert rows(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])) == [{"a": 1, "a_2": 2}]


def test_an_arrow_stream_is_asked_for_no_more_than_a_page_needs() -> None:
    given: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(100):
            given.append(number)
            yield pa.record_batch({"n": list(range(100))})

    reader = pa.RecordBatchReader.from_batches(pa.schema({"n": pa.int64()}), batches())
    pages = open_source(reader).pages(max_rows=100)
    next(pages)
    next(pages)
    assert len(given) <= 4


# Lists and iterators


@dataclass
class Lead:
    domain: str


class Company(BaseModel):
    domain: str
    founded: dt.date | None = None


def test_lists_take_dicts_models_and_dataclasses() -> None:
    day = dt.date(1999, 1, 1)
    source = open_source([{"domain": "a.com"}, Lead("b.com"), Company(domain="c.com", founded=day)])
    assert source.columns == ["domain", "founded"]
    assert list(source.pages()) == [[{"domain": "a.com"}, {"domain": "b.com"}, {"domain": "c.com", "founded": encode_value(day, "founded")}]]
    assert source.stats.records == 3


def test_iterators_are_asked_only_for_what_a_page_needs() -> None:
    given = 0

    def leads() -> Iterator[dict[str, int]]:
        nonlocal given
        for number in range(10_000):
            given += 1
            yield {"n": number}

    pages = open_source(leads()).pages(max_rows=50)
    assert [row["n"] for row in next(pages)] == list(range(50))
    assert given <= 51


def test_an_iterator_is_read_once() -> None:
    source = open_source(iter([{"a": 1}]))
    assert list(source.pages()) == [[{"a": 1}]]
    with pytest.raises(InputError, match="only once"):
        list(source.pages())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"a": 1}, "cannot read rows from a dict"),
        (3, "cannot read rows from a int"),
        (b"a", "cannot read rows from a bytes"),
        (["a"], "record 1 is a str"),
        ([{"a": 1}, {2: 1}], "record 2: column names must be text"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        rows(source)


def test_a_value_that_cannot_be_stored_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InputError, match="record 2: column 'b'"):
        rows([{"a": 1}, {"b": loop}])


def test_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.csv, \.tsv, \.jsonl"):
        open_source(write(tmp_path, "a", "in.xlsx"))


def test_csv_options_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="options for CSV"):
        open_source(write(tmp_path, "{}"), delimiter=";")


# Required columns


class Row(BaseModel):
    domain: str
    name: str | None = None
    size: int = Field(validation_alias=AliasChoices("employees", "headcount"))


def test_missing_columns_and_those_found_are_named(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "Domain,name\nx,y\n", "in.csv"))
    with pytest.raises(MissingColumns, match="missing required columns 'domain', 'size'; found: 'Domain', 'name'") as caught:
        check_columns(source, Row)
    assert caught.value.missing == ["domain", "size"]


class Firm(BaseModel):
    company_name: str
    website: str


def test_a_column_that_is_only_spelt_in_another_way_is_named_with_what_takes_it(tmp_path: Path) -> None:
    near, far = write(tmp_path, "Company-Name, WEB SITE\nA,x\n", "near.csv"), write(tmp_path, "company,Web\nA,x\n", "far.csv")
    with pytest.raises(MissingColumns) as caught:
        check_columns(open_source(near), Firm)
    assert str(caught.value).endswith(
        "; rename it in the file, or name the column in the model: "
        "company_name: ... = Field(alias='Company-Name'), website: ... = Field(alias=' WEB SITE')"
    )
    with pytest.raises(MissingColumns, match=r"found: 'company', 'Web'$"):
        check_columns(open_source(far), Firm)


def test_columns_that_are_no_text_are_found_and_take_nothing() -> None:
    """As `csv.DictReader` makes of records that are too long."""
    with pytest.raises(MissingColumns, match="missing required column"):
        check_columns(open_source([{None: ["more"], "x": "b"}]), Firm)


class Taken(BaseModel):
    name: str
    Name: str


def test_a_column_that_another_field_takes_is_no_other_spelling(tmp_path: Path) -> None:
    with pytest.raises(MissingColumns, match=r"missing required column 'Name'; found: 'name'$"):
        check_columns(open_source(write(tmp_path, "name\nA\n", "in.csv")), Taken)


def test_a_field_whose_alias_is_the_column_takes_it(tmp_path: Path) -> None:
    class Named(BaseModel):
        company_name: str = Field(alias="Company Name")

    source = open_source(write(tmp_path, "Company Name\nAcme\n", "named.csv"))
    check_columns(source, Named)
    [page] = source.pages()
    view = OpenRow(page[0], shape_of(Named)).view(ReadSet())
    assert (view.company_name, view["Company Name"]) == ("Acme", "Acme")


@pytest.mark.parametrize(
    "source",
    [
        [{"domain": "x", "headcount": 1}],
        pa.table({"domain": ["x"], "employees": [1]}),
        iter([{"nothing": 1}]),
        [],
    ],
    ids=["list", "arrow", "iterator", "empty"],
)
def test_sources_that_may_have_the_columns_pass(source: Any) -> None:
    check_columns(open_source(source), Row)


def test_json_lines_need_a_column_in_some_row(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, '{"domain":"x"}\n{"employees":3}\n'))
    check_columns(source, Row)
    check_columns(source, None)
    with pytest.raises(MissingColumns, match="'size'"):
        check_columns(open_source(write(tmp_path, '{"domain":"x"}\n')), Row)
