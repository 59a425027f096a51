"""Which names are allowed where, and how long. Names of plays, datasets, providers and tools are words of routing keys."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from rowmill.errors import DefinitionError

_ROUTING_WORD = re.compile(r"[a-z0-9_-]{1,64}")
_WORD_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

RESERVED_COLUMNS = frozenset({"_status", "_error"})
"""Columns that exports add themselves."""

LONGEST_ID: Final = 200
"""Characters of a run's or an input's id at most, as messages are checked."""


def routing_word(kind: str, name: object) -> str:
    """The name, if it is one. Raises `DefinitionError` for anything but 1 to 64 of ``a-z 0-9 _ -``."""
    if not isinstance(name, str) or _ROUTING_WORD.fullmatch(name) is None:
        raise DefinitionError(f"{kind} name {name!r} is not allowed: use 1 to 64 of the characters a-z, 0-9, _ and -")
    return name


def column_name(name: object) -> str:
    """The column's name, if it is one. Raises `DefinitionError` for an empty, reserved or unprintable one."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise DefinitionError(f"column name {name!r} is not allowed: it must be printable text")
    if name in RESERVED_COLUMNS or name.startswith("$"):
        raise DefinitionError(f"column name {name!r} is reserved; reserved are {', '.join(sorted(RESERVED_COLUMNS))} and names that start with $")
    return name


def snake_case(name: str) -> str:
    """``FindEmail`` → ``find_email``, ``HTTPLookup`` → ``http_lookup``."""
    return _WORD_BREAKS.sub("_", name).lower()


def input_id_of(run_id: str, what: str) -> str:
    """The id of an input that is staged for a run, the same each time.

    A run's id may be as long as an input's may be, so a digest stands for what is longer.
    """
    whole = f"{run_id}{what}"
    return whole if len(whole) <= LONGEST_ID else f"sha256:{hashlib.sha256(whole.encode()).hexdigest()}"
