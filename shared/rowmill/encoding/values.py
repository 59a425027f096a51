"""Values that JSON cannot carry, as JSON values, and back (SPEC 2.11).

Plain JSON values pass unchanged and uncopied. Everything else becomes ``{"$rowmill": kind, "v": ...}``:

======================  =======================================================================================================
kind                    ``v``
======================  =======================================================================================================
``float``               text: ``nan``, ``inf``, ``-inf``, ``-0.0``, and whole floats from 1e16 (which a database would make integers)
``int``                 decimal text, for integers of more than 64 bits
``str``                 text with Python's ``unicode_escape``, for strings with NUL or lone surrogates
``bytes``, ``bytearray``  base64
``decimal``             text, digits kept: ``"1.10"``
``datetime``, ``time``  ISO text, or ``{"iso", "zone", "fold"}`` with a named zone or a fold
``date``                ISO text
``timedelta``           ``[days, seconds, microseconds]``
``uuid``                text
``tuple``               list of values
``set``, ``frozenset``  list of values, sorted by their canonical JSON
``dict``                list of [key, value], for a dict with keys that are no text, or with a member ``$rowmill``, ``$handle`` or ``$rows``
``tool_result``         what `ToolResult.to_json` gives, its ``raw`` and ``meta`` encoded
======================  =======================================================================================================

A handle is ``{"$handle": {...}}``. Author types that are only a view of plain values are stored as those: models, dataclasses and
msgspec structs as dicts, enum members as their values, numpy scalars as Python's. Anything else raises `ValueNotStorable`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from rowmill import registry
from rowmill.encoding.canonical import MAX_DEPTH, canonical
from rowmill.errors import ValueNotStorable
from rowmill.handles import HANDLE, Handle, HandleReference, handle_reference
from rowmill.rows import ROWS, Row, Rows, rows_json
from rowmill.tool_results import ToolResult

TAG = "$rowmill"
_RESERVED = frozenset({TAG, HANDLE, ROWS})
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_WHOLE_FLOAT = 1e16
"""From here on every float is whole and written with an exponent."""

HandleFactory = Callable[[str, str], Any]
"""Makes a handle of (run id, dataset)."""


def encode_value(value: Any, column: str) -> Any:
    """The value as JSON values; plain JSON values are returned as they are.

    Raises `ValueNotStorable`, naming the column, for what has no encoding, contains itself or is nested over `MAX_DEPTH` levels.
    """
    try:
        return _as_far_as_needed(value, 0)
    except ValueNotStorable as error:
        raise ValueNotStorable(f"column {column!r}: {error}") from error


def _is_plain(value: Any, depth: int) -> bool:
    kind: Any = type(value)
    if kind is str:
        return _is_plain_text(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(_INT_MIN <= value <= _INT_MAX)
    if kind is float:
        return _is_plain_float(value)
    if depth > MAX_DEPTH:
        raise ValueNotStorable(f"the value has more than {MAX_DEPTH} levels, or contains itself")
    if kind is dict:
        for name, member in value.items():
            if type(name) is not str or name in _RESERVED or not _is_plain_text(name) or not _is_plain(member, depth + 1):
                return False
        return True
    return kind is list and all(_is_plain(item, depth + 1) for item in value)


def _is_plain_text(text: str) -> bool:
    if "\x00" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain_float(number: float) -> bool:
    return -_WHOLE_FLOAT < number < _WHOLE_FLOAT and (number != 0 or str(number) == "0.0")


def _tagged(kind: str, encoded: Any) -> dict[str, Any]:
    return {TAG: kind, "v": encoded}


def _encoded(value: Any, depth: int) -> Any:
    """The value's encoding, whatever it is. Exact types first, then what is a kind of them."""
    if depth > MAX_DEPTH:
        raise ValueNotStorable(f"the value has more than {MAX_DEPTH} levels, or contains itself")
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, depth)
    for kind, plainer in _VIEWS:
        if isinstance(value, kind):
            return _encoded(plainer(value), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encoded({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth + 1)
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", None) == 0:
        return _encoded(value.item(), depth + 1)
    for kind, encoder in _ENCODERS.items():
        if isinstance(value, kind):
            return encoder(value, depth)
    advice = "; it was not awaited" if hasattr(value, "__await__") else ""
    raise ValueNotStorable(f"a value of type {type(value).__qualname__} cannot be stored{advice}")


def _as_far_as_needed(value: Any, depth: int) -> Any:
    return value if _is_plain(value, depth) else _encoded(value, depth)


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    if all(type(name) is str and name not in _RESERVED and _is_plain_text(name) for name in value):
        return {name: _encoded(member, depth + 1) for name, member in value.items()}
    return _tagged("dict", [[_encoded(name, depth + 1), _encoded(member, depth + 1)] for name, member in value.items()])


def _encode_items(value: Any, depth: int) -> list[Any]:
    return [_encoded(item, depth + 1) for item in value]


def _encode_text(value: str, _: int) -> Any:
    text = str.__str__(value)
    return text if _is_plain_text(text) else _tagged("str", text.encode("unicode_escape").decode("ascii"))


def _encode_int(value: int, _: int) -> Any:
    number = int(value)
    if _INT_MIN <= number <= _INT_MAX:
        return number
    try:
        return _tagged("int", str(number))
    except ValueError as error:  # Python refuses to write integers of more than 4300 digits
        raise ValueNotStorable(f"an integer of {number.bit_length()} bits is too large to be stored") from error


def _encode_float(value: float, _: int) -> Any:
    number = float(value)
    return number if _is_plain_float(number) else _tagged("float", repr(number))


def _encode_datetime(value: dt.datetime, _: int) -> Any:
    if value != value or getattr(value, "nanosecond", False):  # noqa: PLR0124 - pandas' "not a time" is a datetime that differs from itself
        raise ValueNotStorable(f"{value!r} cannot be stored: times have a date and whole microseconds")
    return _tagged("datetime", _moment(value))


def _moment(value: dt.datetime | dt.time) -> str | dict[str, Any]:
    zone = value.tzinfo.key if isinstance(value.tzinfo, zoneinfo.ZoneInfo) else None
    if value.tzinfo is not None and zone is None and not isinstance(value.tzinfo, dt.timezone):
        raise ValueNotStorable(f"a time in zone {value.tzinfo!r} cannot be stored; use zoneinfo.ZoneInfo or a fixed offset")
    if zone is None and value.fold == 0:
        return value.isoformat()
    return {"iso": value.isoformat(), "zone": zone, "fold": value.fold}


def _encode_set(kind: str) -> Callable[[Any, int], Any]:
    return lambda value, depth: _tagged(kind, sorted(_encode_items(value, depth), key=canonical))


_ENCODERS: dict[type, Callable[[Any, int], Any]] = {
    str: _encode_text,
    bool: lambda value, _: value,
    type(None): lambda value, _: value,
    int: _encode_int,
    float: _encode_float,
    dict: _encode_dict,
    list: _encode_items,
    tuple: lambda value, depth: _tagged("tuple", _encode_items(value, depth)),
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    bytes: lambda value, _: _tagged("bytes", base64.b64encode(value).decode("ascii")),
    bytearray: lambda value, _: _tagged("bytearray", base64.b64encode(value).decode("ascii")),
    decimal.Decimal: lambda value, _: _tagged("decimal", str(value)),
    dt.datetime: _encode_datetime,
    dt.date: lambda value, _: _tagged("date", value.isoformat()),
    dt.time: lambda value, _: _tagged("time", _moment(value)),
    dt.timedelta: lambda value, _: _tagged("timedelta", [value.days, value.seconds, value.microseconds]),
    uuid.UUID: lambda value, _: _tagged("uuid", str(value)),
    ToolResult: lambda value, depth: _tagged("tool_result", _as_far_as_needed(value.to_json(), depth + 1)),
    Handle: lambda value, _: value.to_json(),
    HandleReference: lambda value, _: value.to_json(),
    Rows: lambda value, _: rows_json(value.input_id),
}

_VIEWS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (BaseModel, lambda value: value.model_dump()),
    (enum.Enum, lambda value: value.value),
    (msgspec.Struct, msgspec.structs.asdict),
    (Row, dict),
)


def decode_value(value: Any, column: str, *, handle: HandleFactory | None = None) -> Any:
    """The value that `encode_value` was given; plain JSON values are returned as they are.

    A tool result's ``data`` is the tool's output type again where the tool is loaded and the data still fits it. A handle becomes
    ``handle(run_id, dataset)``, or a `HandleReference`. Raises `ValueNotStorable`, naming the column, for an encoding that is not known.
    """
    if not has_tag(value):
        return value
    try:
        return _decoded(value, handle or HandleReference)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueNotStorable(f"column {column!r}: the stored value cannot be read: {type(error).__name__}: {error}") from error


def has_tag(value: Any) -> bool:
    """Whether anything in JSON values may be an encoding rather than itself."""
    kind = type(value)
    if kind is dict:
        return not _RESERVED.isdisjoint(value) or any(has_tag(member) for member in value.values() if type(member) in _CONTAINERS)
    return kind is list and any(has_tag(item) for item in value if type(item) in _CONTAINERS)


_CONTAINERS = frozenset({dict, list})


def _decoded(value: Any, handle: HandleFactory) -> Any:
    if type(value) is list:
        return [_decoded(item, handle) for item in value]
    if type(value) is not dict:
        return value
    if TAG in value:
        return _DECODERS[value[TAG]](value["v"], handle)
    reference = handle_reference(value)
    if reference is not None:
        return handle(*reference)
    if len(value) == 1 and ROWS in value:
        return Rows("", value[ROWS]["input_id"])
    return {name: _decoded(member, handle) for name, member in value.items()}


Moment = TypeVar("Moment", dt.datetime, dt.time)


def _read_moment(kind: type[Moment], encoded: Any) -> Moment:
    if isinstance(encoded, str):
        return kind.fromisoformat(encoded)
    moment = kind.fromisoformat(encoded["iso"]).replace(fold=encoded["fold"])
    return moment if encoded["zone"] is None else moment.replace(tzinfo=zoneinfo.ZoneInfo(encoded["zone"]))


def _decode_tool_result(encoded: Any, handle: HandleFactory) -> ToolResult[Any]:
    document = _decoded(encoded, handle)
    tool = registry.find_tool(document["tool"])
    try:
        return ToolResult.from_json(document, None if tool is None else tool.output_adapter)
    except ValidationError:  # the output type has changed since; what was stored is still what the provider said
        return ToolResult.from_json(document)


_DECODERS: dict[str, Callable[[Any, HandleFactory], Any]] = {
    "str": lambda v, _: v.encode("ascii").decode("unicode_escape"),
    "int": lambda v, _: int(v),
    "float": lambda v, _: float(v),
    "dict": lambda v, handle: {_decoded(name, handle): _decoded(member, handle) for name, member in v},
    "tuple": lambda v, handle: tuple(_decoded(v, handle)),
    "set": lambda v, handle: set(_decoded(v, handle)),
    "frozenset": lambda v, handle: frozenset(_decoded(v, handle)),
    "bytes": lambda v, _: base64.b64decode(v, validate=True),
    "bytearray": lambda v, _: bytearray(base64.b64decode(v, validate=True)),
    "decimal": lambda v, _: decimal.Decimal(v),
    "datetime": lambda v, _: _read_moment(dt.datetime, v),
    "date": lambda v, _: dt.date.fromisoformat(v),
    "time": lambda v, _: _read_moment(dt.time, v),
    "timedelta": lambda v, _: dt.timedelta(*v),
    "uuid": lambda v, _: uuid.UUID(v),
    "tool_result": _decode_tool_result,
}
