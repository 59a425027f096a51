"""What author code raised, as the problem that travels with its row or run."""

from __future__ import annotations

import hashlib
import traceback

from rowmill.errors import RowmillError, StepFailed, ToolFailed
from rowmill.said import named, printable, said_by
from rowmill_contracts.counts import Problem


class RowTooLarge(RowmillError):
    """A row's input and output columns are together over 1 MiB."""

    code = "row_too_large"


class RowTimeout(RowmillError):
    """A row took longer than a row may be worked at a time."""

    code = "row_timeout"


class RowFailure(Exception):
    """Carries the error of a column (None: of the row itself) to where the row is settled; authors never see it. ``row``: index in the input."""

    def __init__(self, column: str | None, error: BaseException, *, row: int | None = None) -> None:
        super().__init__(column)
        self.column = column
        self.error = error
        self.row = row


def problem_of(error: BaseException, *, column: str | None = None, row: int | None = None, code: str = "resolver_failed") -> Problem:
    """The error in words. ``code`` is for errors that have none of their own. ``row``: index in the input."""
    tool = None
    if isinstance(error, RowmillError):
        code, text = error.code, said_by(error)
        if isinstance(error, ToolFailed) and error.failure is not None:
            code, tool = error.failure.code, error.failure.tool
        elif isinstance(error, StepFailed) and error.failure is not None:
            code = error.failure.code
    else:
        text = named(error)
    return Problem(
        code=printable(said_by(code)), message=printable(text), column=column, row=row, tool=tool, traceback_digest=traceback_digest(error)
    )


def traceback_digest(error: BaseException) -> str:
    """Short digest over the places that the error passed through: equal for equal failures of different rows."""
    digest = hashlib.sha256(type(error).__qualname__.encode())
    for frame in traceback.extract_tb(error.__traceback__):
        digest.update(f"{frame.filename}:{frame.name}:{frame.lineno}\n".encode("utf-8", "replace"))
    return digest.hexdigest()[:16]
