"""How values look in an output file, and how nested ones are taken apart.

Text is written as it is. In particular a cell that begins with `=`, `+`, `-` or `@` is left alone: a spreadsheet may take it for a formula,
so import files with data from strangers as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rowmill.errors import OutputError

_encode = msgspec.json.Encoder().encode


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
