"""How values look in an output file, and how nested ones are taken apart.

Text is written as it is. In particular a cell that begins with `=`, `+`, `-` or `@` is left alone: a spreadsheet may take it for a formula,
so import files with data from strangers as text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from rowmill.errors import OutputError
from rowmill.handles import Handle, HandleReference
from rowmill.tool_results import ToolResult

_encode = msgspec.json.Encoder().encode


def exported(value: Any) -> Any:
    """`value` as JSON can show it: a tool's result is its data, times are ISO 8601, decimals are text, bytes are base64, sets are sorted lists,
    a handle is its run and dataset.

    For people and their tools; it is not read back. Keys of objects become text.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates have no UTF-8
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # NaN and infinities have no JSON
    if isinstance(value, ToolResult):
        return exported(value.data)
    if isinstance(value, (Handle, HandleReference)):
        return {"run_id": value.run_id, "dataset": value.dataset}
    if isinstance(value, Mapping):
        return {str(name): exported(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [exported(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((exported(inner) for inner in value), key=_encode)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if callable(dump := getattr(value, "model_dump", None)):
        return exported(dump())
    return str(value)


def cell_text(value: Any) -> str:
    """An exported value as the text of one cell: None is empty, text is itself, everything else is JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return _encode(value).decode("utf-8")


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with every object's members as columns of their own (`contact.email`); lists and empty objects stay values.

    Raises `OutputError` when a dotted name is also a column's own name.
    """
    flat: dict[str, Any] = {}
    for name, value in _members("", row):
        if name in flat:
            raise OutputError(f"flattening gives two columns the name {name!r}; rename one of them or write without --flatten")
        flat[name] = value
    return flat


def _members(prefix: str, members: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in members.items():
        if isinstance(value, dict) and value:
            yield from _members(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
