"""Rows of any origin made JSON-ready by the documented encoding of values (SPEC 2.11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from rowmill.encoding.values import encode_value
from rowmill.errors import InputError, ValueNotStorable
from rowmill.inputs.sources import Row


def storable_row(row: Mapping[Any, Any], *, name: str, record: int) -> Row:
    """`row` with every value encoded. Raises `InputError` naming record and column for a name or value that cannot be stored."""
    stored: Row = {}
    for column, value in row.items():
        if not isinstance(column, str):
            raise InputError(f"{name}: record {record}: column names must be text, not {column!r}")
        try:
            stored[column] = encode_value(value, column)
        except ValueNotStorable as error:
            raise InputError(f"{name}: record {record}: {error}") from error
    return stored


def as_mapping(item: object, *, name: str, record: int) -> Mapping[Any, Any]:
    """A dict, pydantic model or dataclass instance as a mapping; `InputError` for anything else."""
    if isinstance(item, Mapping):
        return item
    if is_dataclass(item) and not isinstance(item, type):
        return asdict(item)
    dump = getattr(item, "model_dump", None)
    if callable(dump) and not isinstance(item, type):
        dumped: dict[str, Any] = dump()
        return dumped
    raise InputError(f"{name}: record {record} is a {type(item).__name__}; a row is a dict, a pydantic model or a dataclass instance")
