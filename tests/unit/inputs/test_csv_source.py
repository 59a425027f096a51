"""CSV files as people have them: in other encodings and dialects, damaged, and larger than memory."""

# ruff: noqa: RUF001 - names in other scripts are the point

import csv
import io
import json
import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill.errors import BadRecords, BadText, InputError
from rowmill.inputs import lines, open_source
from rowmill.inputs.csv_source import CsvSource


def write(folder: Path, content: str | bytes, name: str = "in.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [row for page in open_source(path, **options).pages() for row in page]


def opened(path: Path, **options: Any) -> CsvSource:
    source = open_source(path, **options)
    assert isinstance(source, CsvSource)
    return source


def test_cells_are_text_and_empty_cells_empty_text(tmp_path: Path) -> None:
    path = write(tmp_path, "id,name,n\n1,Ana,007\n2,,1.0\n")
    assert rows(path) == [{"id": "1", "name": "Ana", "n": "007"}, {"id": "2", "name": "", "n": "1.0"}]


def test_header_without_records_has_columns_and_no_rows(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "domain,name\n"))
    assert (source.columns, list(source.pages())) == (["domain", "name"], [])


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"  \n"])
def test_file_without_header_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="empty"):
        open_source(write(tmp_path, content))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file: .*nowhere\.csv"):
        open_source(tmp_path / "nowhere.csv")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a regular file"):
        open_source(tmp_path)


def test_duplicate_and_empty_headers_get_names(tmp_path: Path) -> None:
    path = write(tmp_path, "name,name,,a_2,a,a\n1,2,3,4,5,6\n")
    assert open_source(path).columns == ["name", "name_2", "column_3", "a_2", "a", "a_3"]
    assert list(rows(path)[0].values()) == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("name\nZoë\n".encode("utf-8-sig"), "utf-8"),
        (b"\xff\xfe" + "name\nZoë\n".encode("utf-16-le"), "utf-16-le"),
        (b"\xfe\xff" + "name\nZoë\n".encode("utf-16-be"), "utf-16-be"),
        ("name\nZoë\n".encode("utf-16-le"), "utf-16-le"),
        (b"\xff\xfe\x00\x00" + "name\nZoë\n".encode("utf-32-le"), "utf-32-le"),
        ("name\nZoë\n".encode(), "utf-8"),
        ("name\nZoë\n".encode("cp1252"), "cp1252"),
    ],
)
def test_encoding_is_detected_and_its_mark_dropped(tmp_path: Path, content: bytes, encoding: str) -> None:
    path = write(tmp_path, content)
    assert opened(path).encoding == encoding
    assert rows(path) == [{"name": "Zoë"}]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("name,n\nLefèvre,€5\nO’Brien,6\n", "cp1252"),
        ("имя,город\nАнна,Москва\nПётр,Казань\nОлена,Київ\n", "cp1251"),
        ("名前,都市\n田中,東京\n美咲,大阪\n", "cp932"),
    ],
)
def test_legacy_text_is_read_as_it_was_written(tmp_path: Path, text: str, encoding: str) -> None:
    path = write(tmp_path, text.encode(encoding))
    expected = list(csv.DictReader(io.StringIO(text)))
    assert rows(path) == expected


def test_given_encoding_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, "name\nŁukasz\n".encode("cp1250"))
    assert rows(path, encoding="cp1250") == [{"name": "Łukasz"}]


def test_unknown_encoding_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown encoding 'klingon'"):
        open_source(write(tmp_path, "a\n1\n"), encoding="klingon")


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("a;b\n1,5;2\n2,5;3\n", ";"),
        ("a\tb\n1\t2\n", "\t"),
        ("a|b|c\n1|2|3\n", "|"),
        ("a,b\n1;2,x\n3;4,y\n", ","),
        ("only\none;two\nthree\n", ","),
        ('id,text\n1,"x;y;z"\n', ","),
    ],
)
def test_delimiter_is_detected(tmp_path: Path, content: str, delimiter: str) -> None:
    assert opened(write(tmp_path, content)).dialect.delimiter == delimiter


def test_tsv_prefers_the_tab(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a,x\tb\n1\t2\n", "in.tsv")) == [{"a,x": "1", "b": "2"}]


@pytest.mark.parametrize("spelt", ["\t", "tab", r"\t"])
def test_given_delimiter_is_used(tmp_path: Path, spelt: str) -> None:
    assert rows(write(tmp_path, "a,b\tc\n1\t2\n"), delimiter=spelt) == [{"a,b": "1", "c": "2"}]


def test_delimiter_of_several_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="delimiter must be one character"):
        open_source(write(tmp_path, "a\n"), delimiter="||")


def test_single_quotes_are_detected(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "'a','b'\n'1,5','x'\n'2','y'\n")) == [{"a": "1,5", "b": "x"}, {"a": "2", "b": "y"}]


def test_apostrophes_in_text_are_not_quotes(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "name,n\n'Tis,1\nO'Brien,2\n")) == [{"name": "'Tis", "n": "1"}, {"name": "O'Brien", "n": "2"}]


def test_quoting_can_be_switched_off(tmp_path: Path) -> None:
    assert rows(write(tmp_path, 'size,n\n"5,1\n'), quote="") == [{"size": '"5', "n": "1"}]


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "\na,b\n\n1,2\n   \n\n3,4\n\n"))
    assert [row for page in source.pages() for row in page] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert (source.stats.records, source.stats.blank_lines) == (2, 5)


def test_spaces_are_data_in_a_file_of_one_column(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a\n  \n\nx\n")) == [{"a": "  "}, {"a": "x"}]


def test_newlines_inside_quotes_are_kept(tmp_path: Path) -> None:
    assert rows(write(tmp_path, b'a,b\r\n"x\r\ny\rz\n",2\r\n3,4\r\n')) == [{"a": "x\r\ny\rz\n", "b": "2"}, {"a": "3", "b": "4"}]


def test_every_line_end_is_understood(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        assert rows(write(tmp_path, end.join(["a,b", "1,2", "3,4"]))) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_field_over_the_csv_modules_own_limit_is_read(tmp_path: Path) -> None:
    long = "x" * 1_500_000
    assert rows(write(tmp_path, f'a,b\n"{long}",1\n')) == [{"a": long, "b": "1"}]


def test_wrong_width_stops_before_the_first_page_and_lists_twenty(tmp_path: Path) -> None:
    good = "".join(f"{n},x\n" for n in range(500))
    bad = "".join(f"{n}\n" for n in range(25))
    source = open_source(write(tmp_path, f'a,b\n"two\nlines",1\n\n{good}{bad}'))
    with pytest.raises(BadRecords) as caught:
        next(source.pages())
    error = caught.value
    assert error.total == 25
    assert len(error.records) == 20
    first = error.records[0]
    assert (first.record, first.line, first.fields) == (502, 505, 1)
    assert "record 502 (line 505): 1 field\n" in str(error)
    assert "and 5 more" in str(error)
    assert "--bad-rows" in str(error)


def test_bad_rows_are_set_aside_with_record_and_line(tmp_path: Path) -> None:
    aside = tmp_path / "bad.csv"
    source = open_source(write(tmp_path, "a,b\n1,2\n\n3\n4,5\n6,7,8\n"), bad_rows=aside)
    assert [row["a"] for page in source.pages() for row in page] == ["1", "4"]
    assert (source.stats.records, source.stats.set_aside) == (2, 2)
    assert list(csv.reader(aside.read_text().splitlines())) == [
        ["_record", "_line", "_why", "a", "b"],
        ["2", "4", "1 field", "3"],
        ["4", "6", "3 fields", "6", "7", "8"],
    ]


def test_records_with_nothing_in_a_required_column_stop_before_the_first_page_and_say_which(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "a,b,c\n1,,x\n,2,x\n\n3,4\n5,6,\n"), require=["b", "a"])
    with pytest.raises(BadRecords) as caught:
        next(source.pages())
    assert [(bad.record, bad.line, bad.empty) for bad in caught.value.records] == [(1, 2, "b"), (2, 3, "a"), (3, 5, None)]
    assert "3 records cannot be used" in str(caught.value)
    assert "record 1 (line 2): column 'b' is empty" in str(caught.value)
    assert "record 3 (line 5): 2 fields" in str(caught.value)


def test_records_with_nothing_in_a_required_column_are_set_aside_with_the_reason(tmp_path: Path) -> None:
    aside = tmp_path / "bad.csv"
    source = open_source(write(tmp_path, "a,b\n1,\n ,2\n3,4\n"), require=["a", "b"], bad_rows=aside)
    assert [row["a"] for page in source.pages() for row in page] == [" ", "3"], "a space is something, as it is in a key"
    assert (source.stats.records, source.stats.set_aside) == (2, 1)
    assert list(csv.reader(aside.read_text().splitlines()))[1:] == [["1", "2", "column 'b' is empty", "1", ""]]


def test_a_required_column_that_is_not_there_is_named_beside_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no column 'domian' .*; columns: domain, name"):
        open_source(write(tmp_path, "domain,name\n1,2\n"), require=["domain", "domian"])
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="required columns are options for CSV files"):
        open_source(tmp_path / "rows.jsonl", require=["domain"])


def test_undecodable_bytes_are_located(tmp_path: Path) -> None:
    content = "a,b\nZoë,1\nÅsa,2\n".encode() + b'"x\ny\xff",3\n'
    source = open_source(write(tmp_path, content))
    with pytest.raises(BadText) as caught:
        next(source.pages())
    error = caught.value
    assert (error.record, error.line, error.offset) == (3, 5, content.index(b"\xff"))
    assert "record 3 (line 5, byte offset" in str(error)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "shift_jis", "gb18030", "cp1252"])
@pytest.mark.parametrize("position", [300_000, 262_143, 262_144, 1_100_000])
def test_the_byte_offset_holds_across_chunks(tmp_path: Path, encoding: str, position: int) -> None:
    bad = {"utf-8": b"\xff", "utf-16-le": b"\x00\xdc\x00\xdc", "shift_jis": b"\xff", "gb18030": b"\xff", "cp1252": b"\x81"}[encoding]
    line = "aé\n" if encoding in {"utf-8", "utf-16-le", "cp1252"} else "a美\n"
    width = len(line.encode(encoding))
    lines = position // width
    start = "a\n".encode(encoding) + line.encode(encoding) * lines
    source = open_source(write(tmp_path, start + bad + "\n".encode(encoding)), encoding=encoding)
    with pytest.raises(BadText) as caught:
        source.check()
    assert (caught.value.record, caught.value.line, caught.value.offset) == (lines + 1, lines + 2, len(start))


def test_a_few_strange_bytes_are_reported_and_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(BadText, match=r"record 2 \(line 3, byte offset 14\)"):
        open_source(write(tmp_path, b"a,b\nx,1\nb.com,\xff\xfe\n")).check()


def test_nul_is_located(tmp_path: Path) -> None:
    with pytest.raises(BadText, match=r"record 2 \(line 3\): a NUL character"):
        open_source(write(tmp_path, "a,b\n1,2\nx\0y,3\n" + "1,2\n" * 50)).check()


@pytest.mark.parametrize(("tail", "words"), [('"open,2\n3,4\n', "never ends"), ('"x"y,2\n', "broken quoting")])
def test_broken_quoting_is_located(tmp_path: Path, tail: str, words: str) -> None:
    with pytest.raises(BadText, match=rf"record 2 \(line 3\): .*{words}"):
        open_source(write(tmp_path, "a,b\n1,2\n" + tail)).check()


def test_an_open_quote_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    with path.open("w") as file:
        file.write('a,b\n"open,1\n')
        for _ in range(300):
            file.write("x" * 99_999 + "\n")
    with pytest.raises(BadText, match=r"record 1 \(line 2\): a field is over"):
        open_source(path).check()


def test_an_endless_line_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    with path.open("w") as file:
        file.write("a,b\n")
        for _ in range(300):
            file.write("x" * 100_000)
    with pytest.raises(BadText, match=r"record 1 \(line 2\): a line over"):
        open_source(path).check()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    with path.open("w") as file:
        file.write("a,b\n")
        for n in range(40_000):
            file.write(f"{n},{'x' * 500}\n")
    source = open_source(path)
    tracemalloc.start()
    try:
        count = sum(len(page) for page in source.pages())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 40_000
    assert peak < path.stat().st_size / 4


def test_pages_keep_to_rows_and_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "a\n" + "".join(f"{'x' * size}\n" for size in [10] * 450 + [700, 700, 5000, 10]))
    sizes = [[len(row["a"]) for row in page] for page in open_source(path).pages(max_rows=200, max_bytes=1000 * 5)]
    assert list(chain.from_iterable(sizes)) == [10] * 450 + [700, 700, 5000, 10]
    assert all(len(page) <= 200 for page in sizes)
    assert [5000] in sizes  # over the budget: alone
    encoded = open_source(path).encoded_pages(max_rows=200, max_bytes=1000 * 5)
    assert [[len(json.loads(row)["a"]) for row in page] for page in encoded] == sizes


def test_a_file_can_be_paged_again(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "a\n1\n2\n"))
    assert list(source.pages()) == list(source.pages())
    assert source.stats.records == 2


cell = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
tables = st.integers(2, 5).flatmap(lambda width: st.lists(st.lists(cell, min_size=width, max_size=width), min_size=1, max_size=20))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables, delimiter=st.sampled_from(",;\t|"), end=st.sampled_from(["\n", "\r\n"]))
def test_what_the_csv_module_writes_comes_back(tmp_path: Path, table: list[list[str]], delimiter: str, end: str) -> None:
    header = [f"c{n}" for n in range(len(table[0]))]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([header, *table])
    path = write(tmp_path, text.getvalue())
    assert rows(path) == [dict(zip(header, cells, strict=True)) for cells in table]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables, chunk=st.integers(1, 7))
def test_chunk_borders_change_nothing(tmp_path: Path, table: list[list[str]], chunk: int) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n", quoting=csv.QUOTE_ALL).writerows([["a"] * len(table[0]), *table])
    content = text.getvalue()
    batches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", chunk)
        for batch in lines.line_batches(io.BytesIO(content.encode()), "utf-8", newline="", refuse_nul=True):
            batches += batch
    assert batches == list(io.StringIO(content, newline=""))
