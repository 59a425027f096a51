"""Which texts of a message can be stored: what names something goes to columns and statements, and Postgres takes no NUL there.

Looked at once, where messages are decoded, so that no owner of a table needs to. JSON that is passed on as it is may hold the escape, and so may the
words of an error, which are kept within JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, get_args

import msgspec

NUL: Final = "\x00"
_ESCAPED: Final = b"\\u0000"

WORDS: Final = frozenset({"message", "code", "category", "request_id"})
"""Fields of `Problem` and `ToolFailure` that may be an author's or a provider's words."""


def unstorable_text(message: msgspec.Struct, body: bytes) -> str | None:
    """Where a text of the message, whose JSON is ``body``, holds a NUL, such as ``$.run_id``; None: nowhere."""
    if _ESCAPED not in body:  # JSON has no other way to write one
        return None
    return next(_in_struct(message, "$"), None)


def _in_struct(struct: msgspec.Struct, at: str) -> Iterator[str]:
    for name in _texts_of(type(struct)):
        yield from _in_value(getattr(struct, name), f"{at}.{name}")


def _in_value(value: Any, at: str) -> Iterator[str]:
    match value:
        case str():
            if NUL in value:
                yield at
        case msgspec.Struct():
            yield from _in_struct(value, at)
        case list() | tuple():
            for place, each in enumerate(value):
                yield from _in_value(each, f"{at}[{place}]")
        case dict():
            for key, each in value.items():
                yield from _in_value(key, f"{at}: a key")
                yield from _in_value(each, f"{at}.{key}")


@cache
def _texts_of(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields that are looked at: not words, and not what may be any JSON."""
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.name not in WORDS and not _is_any_json(field.type))


def _is_any_json(annotation: Any) -> bool:
    return annotation is Any or annotation is msgspec.Raw or any(_is_any_json(part) for part in get_args(annotation))
