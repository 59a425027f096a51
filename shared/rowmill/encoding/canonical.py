"""Canonical JSON and the row keys made from it (SPEC 2.2).

One value has one text: members sorted by name, no spaces, UTF-8, strings as they are (NFC is not applied), numbers as JSON values, so that
1 and 1.0 differ. The text is also what travels, so that a row is encoded once.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rowmill.errors import KeyPartMissing, ValueNotStorable

_encode = msgspec.json.Encoder(order="sorted").encode
_SCALARS = frozenset({str, int, bool, type(None)})

_ADVICE = (
    "; every row needs a key: fill it in, leave the row out, or take another key=, such as a function of the row that gives something else there"
)
_ADVICE_OF_FUNCTIONS = "; every row needs a key: let the function give something else there, or leave the row out"

MAX_DEPTH = 200
"""Levels of lists and objects that a value may have."""


def canonical(value: Any) -> bytes:
    """The canonical JSON text of JSON values: dicts with text keys, lists, strings, numbers, booleans, None.

    Raises `ValueNotStorable` for anything else, for NaN and infinities, for lone surrogates and for more than `MAX_DEPTH` levels; values
    that JSON lacks go through `rowmill.encoding.values.encode_value` first.
    """
    _check(value, 0)
    try:
        return _encode(value)
    except UnicodeEncodeError as error:
        raise ValueNotStorable("text with a lone surrogate has no canonical form; encode the value first") from error


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if depth > MAX_DEPTH:
        raise ValueNotStorable(f"the value has more than {MAX_DEPTH} levels, or contains itself")
    if kind is dict:
        for name, member in value.items():
            if type(name) is not str:
                raise ValueNotStorable(f"an object's member name must be text, not {name!r}")
            if type(member) not in _SCALARS:
                _check(member, depth + 1)
    elif kind is list:
        for item in value:
            if type(item) not in _SCALARS:
                _check(item, depth + 1)
    elif kind is not float or not math.isfinite(value):
        raise ValueNotStorable(f"{value!r} is no JSON value; encode it first")


def row_key(row: Mapping[str, Any], key_columns: Sequence[str] | None = None, *, index: int | None = None) -> bytes:
    """The row's key: SHA-256 (32 bytes) over the canonical JSON of the whole row, or of the object of its key columns.

    The order of ``key_columns`` makes no difference. ``index`` is the row's place in the input, for errors.

    Raises `KeyPartMissing`, naming row and part, where a key column is absent, null or empty.
    """
    if key_columns is None:
        return hashlib.sha256(canonical(row)).digest()
    parts = {}
    for column in key_columns:
        part = row.get(column)
        if part is None or part in ("", [], {}):
            raise _missing(row, column, index)
        parts[column] = part
    return hashlib.sha256(canonical(parts)).digest()


def row_key_of(value: Any, *, index: int | None = None, function: str = "") -> bytes:
    """The key of a row whose author's key function, called ``function``, gave ``value``.

    Raises `KeyPartMissing` for null or empty, or a part of it that is so.
    """
    parts = value if isinstance(value, list | tuple) else (value,)
    giver = f"key function {function!r}" if function else "the key function"
    for position, part in enumerate(parts):
        if part is None or part in ("", [], {}):
            where = f"part {position} of the value" if isinstance(value, list | tuple) and value else "the value"
            raise KeyPartMissing(f"{_row(index)}: {where} of {giver} is {_kind(part)}{_ADVICE_OF_FUNCTIONS}")
    if not parts:
        raise KeyPartMissing(f"{_row(index)}: the value of {giver} is empty{_ADVICE_OF_FUNCTIONS}")
    return hashlib.sha256(canonical(list(value) if isinstance(value, tuple) else value)).digest()


def _missing(row: Mapping[str, Any], column: str, index: int | None) -> KeyPartMissing:
    if column not in row:
        return KeyPartMissing(f"{_row(index)}: there is no key column {column!r}; the row has {', '.join(row) or 'no columns'}")
    return KeyPartMissing(
        f"{_row(index)}: key column {column!r} is {_kind(row[column])}{_ADVICE}; of a CSV file, "
        f"`rowmill run --require {shlex.quote(column)} --bad-rows FILE` leaves such rows out"
    )


def _row(index: int | None) -> str:
    return "the row" if index is None else f"row {index + 1} of the input (counted from 1, the header not counted)"


def _kind(part: Any) -> str:
    return "null" if part is None else "empty"


def source_row_key(input_id: str, index: int, row_json: bytes) -> bytes:
    """The key of a record of a file whose equal records are different rows: over input id, row index and the row's digest."""
    return hashlib.sha256(canonical(["source_row", input_id, index, hashlib.sha256(row_json).hexdigest()])).digest()


def read_digest(values: Mapping[str, Any], columns: Iterable[str]) -> str:
    """A hexadecimal digest of the values of a read set; a column that the row lacks differs from one that is null."""
    return hashlib.sha256(canonical({column: values[column] for column in columns if column in values})).hexdigest()
