"""What author code and providers say, as words that can travel and be stored."""

from __future__ import annotations

from typing import Any, Final

LONGEST: Final = 2000
"""Characters of such words at most."""


def printable(text: str) -> str:
    """The text as it can travel and be stored: no NUL, no lone surrogates, not longer than `LONGEST`."""
    return text[:LONGEST].encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def on_one_line(text: str, most: int) -> str:
    """What a person is shown of it: no line's end, nothing that moves a terminal, not longer than ``most`` characters."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= most else f"{line[:most]}…"


def named(error: BaseException) -> str:
    """The error's type and what it says, if anything."""
    said = said_by(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def said_by(error: Any) -> str:
    """What an error says, whole and as it is. Never raises: one whose ``str()`` does says so."""
    try:
        return str(error)
    except BaseException as failed:  # author code may raise anything
        return f"({type(error).__name__} cannot be put in words: its str() raised {type(failed).__name__})"
