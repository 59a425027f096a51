"""Every error a person or another service can meet, in one hierarchy.

Each class has a stable ``code`` that appears in rows, events and dead letters; messages say what happened, to which row or value, and
what to do. Control flow that author code must not swallow (suspension, parking, cancellation) derives from ``BaseException`` on purpose:
an author's ``except Exception`` around a tool call must not turn a parked row into a finished one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rowmill_contracts.tools import ToolFailure


class RowmillError(Exception):
    """Anything that rowmill raises on purpose."""

    code: ClassVar[str] = "rowmill_error"


class UsageError(RowmillError):
    """A person asked for something that cannot be done as asked; the message says how to ask."""

    code = "usage"


class ProjectError(UsageError):
    """`rowmill.toml`, a play or a tool could not be loaded."""

    code = "project"


class UnknownName(ProjectError):
    """A play, tool, service or queue of that name does not exist; the message lists the known ones."""

    code = "unknown_name"

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(f"unknown {kind} {name!r}; known: {listed}")
        self.kind = kind
        self.name = name
        self.known = known


class DefinitionError(RowmillError):
    """Author code declares something that cannot work (a play, column, tool or provider); raised when it is defined or called."""

    code = "definition"


class NonDeterministicPlay(RowmillError):
    """A replay of a play's body met another call than the one on record."""

    code = "non_deterministic_play"


class CodeChanged(RowmillError):
    """No executor has the code that a run's dataset was opened with."""

    code = "code_changed"


class ValueNotStorable(RowmillError):
    """A value cannot be carried as JSON without changing it; the message names the column."""

    code = "value_not_storable"


class KeyPartMissing(RowmillError):
    """A row's key has a null or empty part; the message names the part, and the row as a person counts it."""

    code = "key_part_missing"


class InputError(RowmillError):
    """An input file or staged input is unusable; the message names file, record and line."""

    code = "input"


class MalformedMessage(RowmillError):
    """A message cannot be decoded strictly; it is dead-lettered at once with this reason."""

    code = "malformed_message"


class MessageTooLarge(RowmillError):
    """A message or item is over its documented limit."""

    code = "too_large"


class UnavailableError(RowmillError):
    """A broker, database or service cannot be reached now; trying again later may help."""

    code = "unavailable"


class AskTimeout(UnavailableError):
    """No reply came to a request within its deadline; whether it was carried out is unknown."""

    code = "ask_timeout"


class AskDied(RowmillError):
    """A request was dead-lettered: it was not carried out, and asking again will not help until a person has acted."""

    code = "ask_died"


class RunFailed(RowmillError):
    """A run ended as failed; the message carries the run's own error."""

    code = "run_failed"


class ToolFailed(RowmillError):
    """A tool call failed for good; `failure` is the typed record (SPEC 4.4)."""

    code = "tool_failed"

    def __init__(self, message: str, failure: ToolFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class StepFailed(RowmillError):
    """The function of a `ctx.step` raised, or gave what cannot be stored; `failure` is the record that its run keeps. The same at every replay."""

    code = "step_failed"

    def __init__(self, message: str, failure: ToolFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class Suspended(BaseException):
    """A play body or row must wait for something longer than a coroutine may; it is dropped and replayed later.

    Not an ``Exception``: author code must not be able to swallow it.
    """


class Cancelled(BaseException):
    """The run was stopped; the row or body ends here. Not an ``Exception``: author code must not be able to swallow it."""


# Starting and finding the two servers (rowmill.dev)


class ServersUnavailable(UnavailableError):
    """No broker or database could be found or started; the message says what was tried and how to start one."""

    code = "servers_unavailable"


class PackagesMissing(UsageError):
    """Software that must be installed first is not there; the message holds the one command to run."""

    code = "packages_missing"


# Defining and running author code (plays, columns, tools, rows)


class SecretMissing(UsageError):
    """A secret has no value where it was looked for; the message names the secret and the places, never a value."""

    code = "secret_missing"


class RowInvalid(RowmillError):
    """An input row does not fit the row model; the message names the field and the value."""

    code = "row_invalid"


class InputInvalid(UsageError):
    """A run's or a call's input does not fit its model; the message names the field and the value."""

    code = "input_invalid"


class OutputInvalid(RowmillError):
    """A provider's answer does not fit the tool's output type; the message names the field and the value."""

    code = "output_invalid"


class ToolError(RowmillError):
    """What a tool function raises, or returns in an item's place, when a call failed.

    Raised, it fails every call of the batch; returned at an index, it fails that call alone. ``retryable``: the call may be sent again
    (5 attempts, SPEC 4.4). ``status``: the provider's HTTP status. ``retry_after``: seconds.
    """

    code = "tool_error"

    def __init__(
        self,
        message: str,
        *,
        failure_code: str = "tool_error",
        category: str = "rejected",
        retryable: bool = False,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.failure_code = failure_code
        self.category = category
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after


# Inputs and outputs: files and other sources of rows


@dataclass(frozen=True)
class BadRecord:
    """A record of a CSV file whose number of fields is not the header's, or that has nothing in a column that every record must fill."""

    record: int
    """Counted from 1 after the header, without blank lines."""
    line: int
    """The line it starts on, counted from 1."""
    fields: int
    empty: str | None = None
    """The column with nothing in it; None: the number of fields is what is wrong."""

    @property
    def why(self) -> str:
        """To a person."""
        return f"{self.fields} field{'' if self.fields == 1 else 's'}" if self.empty is None else f"column {self.empty!r} is empty"


class BadRecords(InputError):
    """Records of a CSV file have more or fewer fields than its header, or nothing where they must; `records` holds the first 20 of `total`."""

    code = "bad_records"

    def __init__(self, name: str, columns: int, records: list[BadRecord], total: int) -> None:
        listed = "\n".join(f"  record {bad.record} (line {bad.line}): {bad.why}" for bad in records)
        more = f"\n  and {total - len(records)} more" if total > len(records) else ""
        what = "have the wrong number of fields" if total != 1 else "has the wrong number of fields"
        if any(bad.empty is not None for bad in records):
            what = "cannot be used"
        super().__init__(
            f"{name}: {total} record{'' if total == 1 else 's'} {what}; the header has {columns}:\n"
            f"{listed}{more}\nRepair the file, or use --bad-rows FILE to set such records aside."
        )
        self.records = records
        self.total = total


class BadText(InputError):
    """Bytes or characters of a file cannot be read as text of its encoding."""

    code = "bad_text"

    def __init__(self, name: str, what: str, *, record: int, line: int, offset: int | None = None) -> None:
        where = f"record {record} (line {line}" if record else f"the header (line {line}"
        where += ")" if offset is None else f", byte offset {offset})"
        super().__init__(f"{name}: {where}: {what}")
        self.record = record
        self.line = line
        self.offset = offset


class MissingColumns(InputError):
    """An input lacks columns that the play's rows require. ``near``: by field, a column that is only spelt in another way."""

    code = "missing_columns"

    def __init__(self, name: str, missing: list[str], found: list[str], near: dict[str, str] | None = None) -> None:
        plural = "s" if len(missing) > 1 else ""
        listed = ", ".join(map(repr, found)) or "none"
        named = ", ".join(f"{field}: ... = Field(alias={column!r})" for field, column in (near or {}).items())
        advice = f"; rename it in the file, or name the column in the model: {named}" if named else ""
        super().__init__(f"{name}: missing required column{plural} {', '.join(map(repr, missing))}; found: {listed}{advice}")
        self.missing = missing
        self.found = found


class OutputError(RowmillError):
    """An output file cannot be written; the message names the file and what stands in the way."""

    code = "output"


# Dead letters


class ReplayStopped(RowmillError):
    """The broker did not take a dead letter that was to be replayed; the message says how far the replay came."""

    code = "replay_stopped"
