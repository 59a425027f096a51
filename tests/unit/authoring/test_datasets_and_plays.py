"""Datasets, plays and staged inputs: what a body builds, and what is refused with advice."""

# ruff: noqa: A002, A006 - plays name their input so

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rowmill import Context, RowContext, Rows, play, registry
from rowmill.datasets import DatasetBuilder, DatasetProgram, source_rows
from rowmill.errors import DefinitionError, InputInvalid, UnknownName
from rowmill.handles import Handle
from rowmill.rows import row_model_of, rows_fields


class Lead(BaseModel):
    domain: str


class LeadsInput(BaseModel):
    leads: Rows[Lead]
    min_score: int = 50


class TwoInputs(BaseModel):
    leads: Rows[Lead]
    blocked: Rows[Any] | None = None


@dataclass
class Driver:
    """Keeps the programs that it was to run."""

    programs: list[DatasetProgram] = field(default_factory=list)

    async def run_dataset(self, program: DatasetProgram) -> Handle:
        self.programs.append(program)
        return None  # type: ignore[return-value]


def builder(source: Any = (), **options: Any) -> DatasetBuilder:
    return DatasetBuilder("leads", source, Driver(), **options)


async def test_a_dataset_is_built_column_by_column_and_handed_to_its_driver() -> None:
    driver = Driver()
    source: Rows[Lead] = Rows("leads", "in-1")
    begun = DatasetBuilder("leads", source, driver, row=Lead).with_column("a", lambda row: 1)
    await begun.with_column("_b", lambda row: 2, run_if=lambda row: row["a"], else_value=0).run(
        key="domain", concurrency=5, mode="net_new", on_error="fail"
    )
    await begun.run()
    first, second = driver.programs
    assert (first.key, first.source, first.row_model) == ("leads", source, Lead)
    assert [column.name for column in first.columns] == ["a", "_b"]
    assert first.persisted == ("a",)
    assert (first.key_spec, first.concurrency, first.mode, first.on_error) == (("domain",), 5, "net_new", "fail")
    assert list(first.column_versions) == ["a", "_b"]
    assert ([column.name for column in second.columns], second.key_spec, second.mode, second.on_error) == (["a"], None, None, "isolate")


def test_keys_are_a_column_columns_or_a_function() -> None:
    assert builder().program(key=["a", "b"]).key_spec == ("a", "b")
    function = lambda row: row["a"]  # noqa: E731
    assert builder().program(key=function).key_spec is function
    assert builder().program(row_identity="source_row").row_identity == "source_row"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"key": []}, "key is a column, a list of columns or a function"),
        ({"key": ["a", ""]}, "key is a column"),
        ({"key": 5}, "key is a column"),
        ({"key": ["a", "a"]}, "names a column twice"),
        ({"key": "a", "row_identity": "source_row"}, "not both"),
        ({"mode": "new"}, "mode must be one of all, net_new"),
        ({"on_error": "ignore"}, "on_error must be one of isolate, fail"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=f"dataset 'leads'.*{told}"):
        builder().program(**options)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a", "two columns 'a'"),
        ("_status", "reserved"),
        ("_error", "reserved"),
        ("$x", "reserved"),
        ("", "not allowed"),
        ("x\ny", "not allowed"),
        (3, "not allowed"),
    ],
)
def test_column_names_that_are_taken_or_reserved_are_refused(name: Any, told: str) -> None:
    with pytest.raises(DefinitionError, match=told):
        builder().with_column("a", lambda row: 1).with_column(name, lambda row: 1)


@pytest.mark.parametrize("source", ["leads.csv", {"a": 1}, 5, None, b"x"])
def test_a_source_that_is_no_table_is_refused(source: Any) -> None:
    with pytest.raises(DefinitionError, match="its rows come from a Rows field of the input, a handle or a list of rows"):
        builder(source)


def test_a_dataset_name_is_a_routing_word() -> None:
    with pytest.raises(DefinitionError, match="dataset name 'My Leads'"):
        DatasetBuilder("My Leads", [], Driver())


def test_rows_in_memory_are_mappings_or_models() -> None:
    assert list(source_rows([{"a": 1}, Lead(domain="x")])) == [{"a": 1}, {"domain": "x"}]
    with pytest.raises(DefinitionError, match="row 1 is a int"):
        list(source_rows([{}, 5]))


def test_rows_from_an_iterator_are_taken_once() -> None:
    begun = builder(iter([{"a": 1}]))
    assert begun.program().source == begun.with_column("a", lambda row: 1).program().source == [{"a": 1}]


def test_a_dataset_inside_a_row_is_refused_with_advice() -> None:
    with pytest.raises(DefinitionError, match="open it in the play's body"):
        RowContext.dataset(None)  # type: ignore[arg-type]


# Plays and their inputs


def test_a_play_knows_its_input_and_its_staged_fields() -> None:
    @play("leads", description="Find them")
    async def leads(ctx: Context, input: LeadsInput) -> int:
        return input.min_score

    assert (leads.name, leads.description, leads.input_model, leads.rows_fields, leads.module) == (
        "leads",
        "Find them",
        LeadsInput,
        ["leads"],
        __name__,
    )
    assert registry.play_named("leads") is leads
    assert registry.known_plays() == ["leads"]


def test_a_plays_input_is_filled_from_json_and_staged_inputs() -> None:
    @play("leads")
    async def leads(ctx: Context, input: LeadsInput) -> None: ...

    for inputs in ({"": "in-1"}, {"leads": "in-1"}):
        filled = leads.read_input({"min_score": "60"}, inputs)
        assert (filled.leads.field, filled.leads.input_id, filled.min_score) == ("leads", "in-1", 60)
    assert leads.read_input({"leads": {"$rows": {"input_id": "in-1"}}}) == leads.read_input({}, {"": "in-1"})
    assert filled.model_dump(mode="json") == {"leads": {"$rows": {"input_id": "in-1"}}, "min_score": 60}


@pytest.mark.parametrize(
    ("document", "inputs", "told"),
    [
        ({}, {}, "input of play 'two': leads: Field required"),
        ({"leads": [1, 2]}, {}, "a staged input is"),
        ({}, {"": "in-1"}, "say which staged input is meant; its Rows fields: leads, blocked"),
        ({}, {"other": "in-1"}, "has no staged input 'other'; its Rows fields: leads, blocked"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_by_name(document: dict[str, Any], inputs: dict[str, str], told: str) -> None:
    @play("two")
    async def two(ctx: Context, input: TwoInputs) -> None: ...

    with pytest.raises(InputInvalid, match=told):
        two.read_input(document, inputs)


async def test_a_play_may_take_no_input() -> None:
    @play("nothing")
    async def nothing(ctx: Context) -> int:
        return 5

    assert await nothing.start(None, nothing.read_input({})) == 5  # type: ignore[arg-type]
    assert await nothing(None) == 5  # type: ignore[arg-type]


def test_plays_that_cannot_work_are_refused_when_defined() -> None:
    with pytest.raises(DefinitionError, match="play name 'My Play'"):
        play("My Play")
    with pytest.raises(DefinitionError, match="async def"):
        play("a")(lambda ctx, input: None)  # type: ignore[arg-type, return-value]

    async def untyped(ctx, input): ...  # type: ignore[no-untyped-def]

    async def dictionary(ctx: Context, input: dict[str, Any]) -> None: ...

    async def three(ctx: Context, input: LeadsInput, more: int) -> None: ...

    cases: list[tuple[Any, str]] = [
        (untyped, "annotate 'input' with a pydantic model"),
        (dictionary, "annotate 'input'"),
        (three, "takes 3 arguments"),
    ]
    for function, told in cases:
        with pytest.raises(DefinitionError, match=told):
            play("a")(function)


def test_two_plays_of_one_name_are_refused_naming_both_places() -> None:
    @play("leads")
    async def one(ctx: Context) -> None: ...

    with pytest.raises(DefinitionError, match=r"play 'leads' is defined twice: at .*one \(.*\) and at .*other \("):

        @play("leads")
        async def other(ctx: Context) -> None: ...

    with pytest.raises(UnknownName, match="unknown play 'laeds'; known: leads"):
        registry.play_named("laeds")


def test_staged_fields_are_found_with_their_row_models() -> None:
    assert rows_fields(TwoInputs) == ["leads", "blocked"]
    assert row_model_of(TwoInputs, "leads") is Lead
    assert row_model_of(TwoInputs, "blocked") is None
    assert LeadsInput.model_json_schema()["properties"]["leads"]["required"] == ["$rows"]
    with pytest.raises(ValidationError):
        LeadsInput.model_validate({"leads": {"$rows": {"input_id": ""}}})
