"""What people type in options, read: each error is a wrong usage, and names the option."""

from __future__ import annotations

from pathlib import Path

from rowmill.errors import DefinitionError, UsageError


def seconds_typed(option: str, text: str) -> float:
    """Seconds of a duration such as ``30s``."""
    from rowmill.durations import seconds  # noqa: PLC0415 - commands load what they need

    try:
        return seconds(text)
    except DefinitionError as error:
        raise UsageError(f"{option}: {error}") from None


def rate_typed(option: str, text: str) -> float:
    """How many a second, of a rate such as ``50/s``."""
    from rowmill.durations import Rate  # noqa: PLC0415 - commands load what they need

    try:
        rate = Rate.parse(text)
    except DefinitionError as error:
        raise UsageError(f"{option}: {error}") from None
    return rate.requests / rate.window_seconds


def text_typed(option: str, text: str) -> str:
    """The text, or what is in the file that ``@FILE`` names."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{option}: {text[1:]} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option}: {text[1:]} is not text: {error}") from None
