"""What a pydantic error says, in one sentence that names field and value."""

from __future__ import annotations

from pydantic import ValidationError

_SHOWN_ERRORS = 3
_SHOWN_CHARACTERS = 80


def explain(error: ValidationError) -> str:
    """The first problems of a validation, each with its field and the value that was given."""
    problems = error.errors(include_url=False, include_context=False)
    told = []
    for problem in problems[:_SHOWN_ERRORS]:
        where = ".".join(str(part) for part in problem["loc"])
        given = "" if problem["type"] == "missing" else f" (given: {_short(problem['input'])})"
        told.append(f"{where}: {problem['msg']}{given}" if where else f"{problem['msg']}{given}")
    more = len(problems) - _SHOWN_ERRORS
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
