"""What a resolver reads of its row is recorded, however it reads it."""

from __future__ import annotations

import copy
import datetime as dt
import json
import pickle
from decimal import Decimal
from functools import cached_property
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationInfo, field_validator, model_validator

from rowmill.encoding.values import encode_value
from rowmill.errors import DefinitionError, RowInvalid
from rowmill.row_shapes import RowShape, shape_of
from rowmill.row_views import OpenRow, ReadSet, with_outputs


class Lead(BaseModel):
    domain: str
    name: str | None = None
    employees: int = 0

    @property
    def site(self) -> str:
        return f"https://{self.domain}"


VALUES = {"domain": "a.com", "name": "A", "employees": "12", "country": "FR"}


def plain_row(values: dict[str, Any] | None = None) -> tuple[Any, ReadSet, OpenRow]:
    opened, reads = OpenRow(values or dict(VALUES)), ReadSet()
    return opened.view(reads), reads, opened


def model_row(model: type[BaseModel] = Lead, values: dict[str, Any] | None = None) -> tuple[Any, ReadSet, OpenRow]:
    opened, reads = OpenRow(values or dict(VALUES), RowShape(model)), ReadSet()
    return opened.view(reads), reads, opened


# A row without a model


@given(st.dictionaries(st.text(), st.integers(), min_size=1), st.data())
def test_exactly_the_columns_that_were_read_are_recorded(values: dict[str, int], data: Any) -> None:
    row, reads, _ = plain_row(values)
    read = data.draw(st.lists(st.sampled_from(sorted(values))))
    assert [row[name] for name in read] == [values[name] for name in read]
    assert reads.columns == sorted(set(read))


def test_asking_for_a_column_that_is_absent_is_a_read_of_it() -> None:
    row, reads, _ = plain_row()
    assert row.get("phone") is None
    assert row.get("fax", "-") == "-"
    assert "mail" not in row
    with pytest.raises(KeyError, match="no column 'web'; it has domain, name, employees, country"):
        row["web"]
    assert reads.columns == ["fax", "mail", "phone", "web"]


@pytest.mark.parametrize(
    "read",
    [
        dict,
        list,
        len,
        repr,
        str,
        lambda row: {**row},
        lambda row: row.items(),
        lambda row: row == {},
        lambda row: row | {},
        lambda row: {} | row,
        lambda row: row.copy(),
    ],
)
def test_reading_the_row_as_a_whole_reads_everything(read: Any) -> None:
    row, reads, _ = plain_row()
    result = read(row)
    if not isinstance(result, bool | int | str):
        list(result)
    assert reads.columns == "*"


def test_a_row_is_a_mapping_that_cannot_be_changed() -> None:
    row, _, _ = plain_row()
    assert dict(row) == VALUES
    with pytest.raises(TypeError):
        row["domain"] = "b.com"


def test_outputs_of_earlier_columns_are_there_and_win_over_input_columns() -> None:
    row, reads, opened = plain_row()
    opened.put("contact", "x@a.com")
    opened.put("name", "B")
    assert (row["contact"], row["name"]) == ("x@a.com", "B")
    assert reads.columns == ["contact", "name"]


def test_outputs_of_steps_are_no_columns() -> None:
    row, reads, _ = plain_row()
    inner = with_outputs(with_outputs(row, {"hunter": None}), {"apollo": "x", "name": "step"})
    assert (inner["hunter"], inner.get("apollo"), inner["name"], inner["domain"]) == (None, "x", "step", "a.com")
    assert "hunter" in inner
    assert reads.columns == ["domain"]
    assert row["name"] == "A"


def test_a_plain_mapping_takes_step_outputs_too() -> None:
    assert with_outputs({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}


# A row with a model


def test_a_row_with_a_model_is_an_instance_of_it_with_the_models_types() -> None:
    row, _, _ = model_row()
    assert (isinstance(row, Lead), type(row).__name__) == (True, "Lead")
    assert (row.domain, row.employees, row["employees"]) == ("a.com", 12, 12)


@pytest.mark.parametrize(
    ("read", "columns"),
    [
        (lambda row: row.domain, ["domain"]),
        (lambda row: row["domain"], ["domain"]),
        (lambda row: row["country"], ["country"]),
        (lambda row: row.get("country"), ["country"]),
        (lambda row: row.get("phone"), ["phone"]),
        (lambda row: "phone" in row, ["phone"]),
        (lambda row: row.site, ["domain"]),
        (lambda row: getattr(row, "name", None), ["name"]),
        (lambda row: (row.domain, row.employees), ["domain", "employees"]),
        (type, []),
    ],
)
def test_reads_of_fields_and_of_other_columns_are_recorded(read: Any, columns: list[str]) -> None:
    row, reads, _ = model_row()
    read(row)
    assert reads.columns == columns


class Wrapper(BaseModel):
    lead: Lead


@pytest.mark.parametrize(
    "read",
    [
        dict,
        repr,
        str,
        vars,
        lambda row: row.model_dump(),
        lambda row: row.model_dump_json(),
        lambda row: row.model_copy(update={"name": "x"}),
        lambda row: row == Lead(domain="a.com", name="A", employees=12),
        lambda row: Wrapper(lead=row).model_dump(),
        lambda row: TypeAdapter(Lead).dump_python(row, mode="json"),
        lambda row: Lead.model_validate(row).model_dump(),
        lambda row: row.model_fields_set,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda row: encode_value(row, "c"),
    ],
)
def test_no_way_of_reading_a_model_as_a_whole_goes_unrecorded(read: Any) -> None:
    row, reads, _ = model_row()
    read(row)
    assert reads.columns == "*"


def test_what_is_read_as_a_whole_is_right() -> None:
    row, _, _ = model_row()
    expected = Lead(domain="a.com", name="A", employees=12)
    assert row == expected
    assert expected == row.model_copy()
    assert row.model_dump() == expected.model_dump()
    assert json.loads(Wrapper(lead=row).model_dump_json()) == {"lead": expected.model_dump()}
    assert pickle.loads(pickle.dumps(row)) == copy.deepcopy(row) == expected  # noqa: S301 - our own bytes
    assert encode_value(row, "c") == expected.model_dump()


def test_a_row_with_a_model_cannot_be_changed() -> None:
    row, _, _ = model_row()
    for name in ("domain", "other"):
        with pytest.raises(TypeError, match="read-only"):
            setattr(row, name, "x")
    with pytest.raises(TypeError, match="read-only"):
        del row.domain


def test_a_column_that_is_no_field_of_the_model_is_no_attribute_and_the_error_says_how_it_is_read() -> None:
    row, _, opened = model_row()
    opened.put("contact", "x")
    for name in ("country", "contact"):
        with pytest.raises(AttributeError, match=rf"Lead has no field '{name}', but the row has such a column: write row\['{name}'\]"):
            getattr(row, name)
    with pytest.raises(AttributeError, match="'Lead' object has no attribute 'nothing'"):
        row.nothing  # noqa: B018 - reading it is the test
    assert (row["contact"], row["country"]) == ("x", "FR")


def test_a_row_without_a_model_says_how_its_columns_are_read() -> None:
    row, reads, opened = plain_row()
    opened.put("contact", "x")
    for name, seen in (("domain", row), ("contact", row), ("leg", with_outputs(row, {"leg": 1}))):
        with pytest.raises(AttributeError, match=rf"a row without a row model has no attributes: write row\['{name}'\]"):
            getattr(seen, name)
    with pytest.raises(AttributeError, match="a row has no attribute 'nothing'"):
        row.nothing  # noqa: B018 - reading it is the test
    assert reads.columns == []
    with pytest.raises(AttributeError):
        object.__new__(type(row)).domain  # noqa: B018 - as whoever copies it without its parts would


def test_an_output_named_like_a_field_wins_by_name_and_by_attribute() -> None:
    row, reads, opened = model_row()
    opened.put("name", "B")
    assert (row.name, row["name"]) == ("B", "B")
    assert reads.columns == ["name"]
    assert row.model_dump()["name"] == "B"


def test_steps_see_their_outputs_on_a_model_too() -> None:
    row, reads, _ = model_row()
    inner = with_outputs(row, {"hunter": "h", "name": "step"})
    assert (isinstance(inner, Lead), inner["hunter"], inner["name"], inner.name, inner.domain) == (True, "h", "step", "step", "a.com")
    assert reads.columns == ["domain"]


class Aliased(BaseModel):
    company: str = Field(validation_alias=AliasChoices("Company Name", "company"))
    size: int = Field(alias="Size", default=1)


def test_a_field_under_another_column_name_reads_that_column() -> None:
    row, reads, _ = model_row(Aliased, {"Company Name": "A", "Size": "3"})
    assert (row.company, row.size, row["Size"], row["Company Name"]) == ("A", 3, 3, "A")
    assert reads.columns == ["Company Name", "Size", "company"]


class Tidy(BaseModel):
    domain: str
    name: str = ""

    @field_validator("domain")
    @classmethod
    def _lower(cls, domain: str) -> str:
        return domain.lower()


class Dependent(Tidy):
    @field_validator("name")
    @classmethod
    def _default(cls, name: str, info: ValidationInfo) -> str:
        return name or str(info.data["domain"])


class Whole(Tidy):
    @model_validator(mode="after")
    def _join(self) -> Whole:
        self.name = f"{self.name}@{self.domain}"
        return self


@pytest.mark.parametrize(("model", "columns"), [(Tidy, ["name"]), (Dependent, ["domain", "name"]), (Whole, "*")])
def test_a_field_reads_what_its_validators_could_see(model: type[BaseModel], columns: Any) -> None:
    row, reads, _ = model_row(model, {"domain": "A.com", "name": "n", "extra": 1})
    assert row.name
    assert reads.columns == columns


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    domain: str


def test_extra_fields_of_an_open_model_are_read_one_by_one() -> None:
    row, reads, _ = model_row(Open)
    assert row.country == "FR"
    assert reads.columns == ["country"]


class Rich(BaseModel):
    domain: str
    _seen: int = PrivateAttr(default=3)

    @cached_property
    def parts(self) -> list[str]:
        return self.domain.split(".")


def test_cached_properties_and_private_attributes_work() -> None:
    row, reads, _ = model_row(Rich)
    assert (row.parts, row.parts, row._seen) == (["a", "com"], ["a", "com"], 3)
    assert reads.columns == "*"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    domain: str


def test_a_row_of_a_frozen_model_can_be_a_key() -> None:
    row, reads, _ = model_row(Frozen)
    assert {row: 1}[Frozen(domain="a.com")] == 1
    assert reads.columns == "*"


class Typed(BaseModel):
    amount: Decimal | None
    day: dt.date | None = None
    number: int = 5
    text: str | None = "t"


def test_empty_texts_are_null_or_the_default_where_no_text_fits() -> None:
    row, _, _ = model_row(Typed, {"amount": "", "day": "", "number": "", "text": ""})
    assert (row.amount, row.day, row.number, row.text) == (None, None, 5, "")


def test_texts_become_the_models_types() -> None:
    row, _, _ = model_row(Typed, {"amount": "1.10", "day": "2024-02-29", "number": "7"})
    assert (row.amount, row.day, row.number, row.text) == (Decimal("1.10"), dt.date(2024, 2, 29), 7, "t")


def test_a_row_that_does_not_fit_names_field_and_value() -> None:
    with pytest.raises(RowInvalid, match=r"no Lead: domain: Field required; employees: .*integer.* \(given: 'many'\)"):
        OpenRow({"employees": "many"}, RowShape(Lead))


def test_a_row_model_must_be_a_model() -> None:
    with pytest.raises(DefinitionError, match="pydantic model"):
        shape_of(dict)


def test_two_columns_of_one_row_record_apart() -> None:
    opened = OpenRow(dict(VALUES), RowShape(Lead))
    first, second = ReadSet(), ReadSet()
    one, other = opened.view(first), opened.view(second)
    assert (one.domain, other.name) == ("a.com", "A")
    assert (first.columns, second.columns) == (["domain"], ["name"])
