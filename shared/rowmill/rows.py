"""Staged inputs: the `Rows` field type of a play's input model, and its form in messages.

`Row`, the view that resolvers are given, lives in `rowmill.row_views` and is exported here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rowmill.row_views import OpenRow, ReadSet, Row

__all__ = ["ROWS", "OpenRow", "ReadSet", "Row", "Rows", "rows_fields", "rows_json"]

T = TypeVar("T", bound=BaseModel)

ROWS = "$rows"
"""The one member of a staged input's JSON form, ``{"$rows": {"input_id": ...}}``."""


class Rows(Generic[T]):
    """A staged input, as a field of a play's input model: ``leads: Rows[Lead]``.

    In a play's body it says which input it is, and is passed to ``ctx.dataset``; its rows are not in memory. ``field``: the model's field;
    ``input_id``: the staged input.
    """

    __slots__ = ("field", "input_id")

    def __init__(self, field: str, input_id: str) -> None:
        self.field = field
        self.input_id = input_id

    def __repr__(self) -> str:
        return f"Rows(field={self.field!r}, input_id={self.input_id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.input_id == other.input_id

    def __hash__(self) -> int:
        return hash(self.input_id)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _validated,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda rows: rows_json(rows.input_id)),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = {"type": "object", "properties": {"input_id": {"type": "string"}}, "required": ["input_id"]}
        return {"type": "object", "properties": {ROWS: reference}, "required": [ROWS], "description": "A staged input"}


def rows_json(input_id: str) -> dict[str, Any]:
    """The JSON form of a staged input."""
    return {ROWS: {"input_id": input_id}}


def _validated(value: Any, info: core_schema.ValidationInfo) -> Rows[Any]:
    if isinstance(value, Rows):
        return value
    inner = value.get(ROWS) if isinstance(value, Mapping) and len(value) == 1 else None
    input_id = inner.get("input_id") if isinstance(inner, Mapping) else None
    if not isinstance(input_id, str) or not input_id:
        raise ValueError('a staged input is {"$rows": {"input_id": "..."}}; stage the rows first (from Python: pass the play itself, not its name)')
    return Rows(info.field_name or "", input_id)


def rows_fields(model: type[BaseModel]) -> list[str]:
    """Names of the model's fields that are staged inputs, in order."""
    return [name for name, info in model.model_fields.items() if any(_is_rows(kind) for kind in (info.annotation, *get_args(info.annotation)))]


def row_model_of(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The model of a staged input's rows: ``Lead`` of ``Rows[Lead]``; None for plain ``Rows``."""
    annotation = model.model_fields[field].annotation
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Rows:
            argument = get_args(kind)[0]
            return argument if isinstance(argument, type) and issubclass(argument, BaseModel) else None
    return None


def _is_rows(kind: Any) -> bool:
    return kind is Rows or get_origin(kind) is Rows
