"""Stored values as plain JSON for people and other programs: events, files, tables. It needs no author code."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from rowmill.encoding.values import TAG, has_tag


def export_value(stored: Any) -> Any:
    """What `rowmill.encoding.values.encode_value` gave, in the form that others expect; plain JSON values are returned as they are.

    A tool result is its data; sets and tuples are lists; Decimals, times, UUIDs, bytes (base64) and what JSON's numbers and strings lack are
    text; a timedelta is seconds. A handle stays ``{"$handle": ...}``.
    """
    return _exported(stored) if has_tag(stored) else stored


def _exported(stored: Any) -> Any:
    if isinstance(stored, list):
        return [_exported(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    if TAG not in stored:
        return {name: _exported(member) for name, member in stored.items()}
    return _EXPORTS.get(stored[TAG], _as_is)(stored["v"])


def _as_is(encoded: Any) -> Any:
    return encoded


def _pairs(encoded: Any) -> Any:
    """An object where every key is text, else a list of pairs."""
    pairs = [(_exported(name), _exported(member)) for name, member in encoded]
    return dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else [list(pair) for pair in pairs]


def _float(encoded: str) -> Any:
    number = float(encoded)
    return encoded if number != number or number in (float("inf"), float("-inf")) else number  # noqa: PLR0124 - only NaN differs from itself


def _iso(encoded: Any) -> Any:
    return encoded if isinstance(encoded, str) else encoded["iso"]


_EXPORTS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": _float,
    "dict": _pairs,
    "tuple": _exported,
    "set": _exported,
    "frozenset": _exported,
    "datetime": _iso,
    "time": _iso,
    "timedelta": lambda encoded: dt.timedelta(*encoded).total_seconds(),
    "tool_result": lambda encoded: _exported(encoded.get("data", encoded["raw"])),
}
