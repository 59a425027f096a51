"""One step, from what the author wrote to its receipt's key, and from how it ended to what the author gets. Bodies and rows share it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from rowmill.durations import Duration, optional_seconds
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key, scope_of, short_digest
from rowmill.encoding.values import HandleFactory, decode_value, encode_value
from rowmill.errors import AskDied, DefinitionError, StepFailed, UsageError, ValueNotStorable
from rowmill.said import named, printable
from rowmill.versions import code_version
from rowmill_contracts.tools import CallOutcome, Effect, ToolFailure
from rowmill_row_executor.endings import OutcomeUnknown, Parked
from rowmill_row_executor.ports import Asker

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
"""A receipt's output (SPEC 2.11)."""

_LONGEST_ID = 200

_within: ContextVar[str | None] = ContextVar("rowmill_step", default=None)
"""The step whose function is running here."""


class _Document(msgspec.Struct):
    """What is stored of a step's result, as of a tool's."""

    raw: Any = None


_decode_document = msgspec.json.Decoder(_Document).decode


@dataclass(frozen=True, slots=True)
class StepCall:
    """A step that was checked and can be run. ``caller``: ``<dataset>/<row key>``, or empty for a body. ``shared``: with other runs of its play.
    ``request``: what a body's record knows it by, whatever its code is.
    """

    id: str
    key: str
    request: str
    function: Callable[[], Any]
    caller: str
    blocking: bool
    effect: Effect
    shared: bool
    stale_after: float | None
    force: bool

    @property
    def tool(self) -> str:
        """What its receipt says that it is for."""
        return f"step:{self.id}"


class StepIds:
    """The steps of one pass of a body or of one row: which are under way, and how often each name was used.

    The second step of a name is another one than the first. ``where``: for errors, such as "this body".
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._used: Counter[tuple[str, str, bytes]] = Counter()
        self._in_hand: set[tuple[str, str]] = set()

    def prepare(
        self,
        asker: Asker,
        id: str,  # noqa: A002 - the authoring surface names it so
        fn: Callable[[], Any],
        *,
        caller: str = "",
        column: str = "",
        semantic_key: Any,
        stale_after: Duration | None,
        blocking: bool,
        effect: Effect,
    ) -> StepCall:
        """Check a step and give it its receipt's key. Raises `DefinitionError` naming what is wrong."""
        _check(id, fn)
        if (column, id) in self._in_hand:
            raise UsageError(f"step id {id!r} is used twice at once in {self._where}; give each step its own id")
        try:
            meaning = canonical(encode_value(semantic_key, "semantic_key"))
        except ValueNotStorable as error:
            raise DefinitionError(f"step {id!r}: semantic_key: {error.__cause__ or error}") from error
        shared = stale_after is not None
        nth = self._used[column, id, meaning]
        self._used[column, id, meaning] += 1
        scope = scope_of("play" if shared else "run", play=asker.play, run_id=asker.run_id, caller=caller, call=id)
        # Another run, and a retry of this one, may have other code, whose result is another one; but no effect of a run is repeated for that.
        version = code_version(fn) if shared or effect != "non_idempotent" else ""
        place = canonical([caller, column, nth]) + b"\n" + meaning
        return StepCall(
            id=id,
            key=receipt_key(asker.org, scope, f"step:{id}", version, place, ""),
            request=hashlib.sha256(receipt_key(asker.org, scope, f"step:{id}", "", place, "").encode()).hexdigest(),
            function=fn,
            caller=caller,
            blocking=blocking,
            effect=effect,
            shared=shared,
            stale_after=optional_seconds(stale_after),
            force=asker.force in {"steps", "all"},
        )

    @contextmanager
    def in_hand(self, column: str, step: StepCall) -> Iterator[None]:
        """While the step is run or waited for."""
        self._in_hand.add((column, step.id))
        try:
            yield
        finally:
            self._in_hand.discard((column, step.id))


def _check(id: str, fn: Any) -> None:  # noqa: A002 - likewise
    if not isinstance(id, str) or not 0 < len(id) <= _LONGEST_ID:
        raise DefinitionError(f"a step's id is text of 1 to {_LONGEST_ID} characters, not {id!r}")
    if not id.strip() or not id.isprintable():
        raise DefinitionError(f"step id {id!r} is not allowed: it must be printable text; what tells one use from another can go into semantic_key=")
    if callable(fn):
        return
    if hasattr(fn, "close") and hasattr(fn, "__await__"):
        fn.close()
    raise DefinitionError(f"step {id!r}: give it a function without arguments, such as lambda: work(row), not {type(fn).__name__!r}")


# ---- what the function gave -------------------------------------------------------------------------------------------------------------


def enter(step: StepCall) -> None:
    """From here on, in this task, the step's function runs."""
    _within.set(step.id)


def refuse_within_step() -> None:
    """Raise `UsageError` where a step's function uses ``ctx``: a replay would not meet that call, since it does not run the function again."""
    if (step := _within.get()) is not None:
        raise UsageError(f"the function of step {step!r} uses ctx; make that call outside of the step and hand its result in")


def encoded(step: StepCall, value: Any) -> bytes:
    """What is stored of the function's result. Raises `StepFailed`, naming the step, for what cannot be."""
    try:
        text = b'{"raw":%s}' % msgspec.json.encode(encode_value(value, step.id))
    except ValueNotStorable as error:
        message = f"the result of step {step.id!r} cannot be stored: {error.__cause__ or error}"
        raise StepFailed(message, failure_of(step, error.code, message)) from error
    if len(text) > MAX_OUTPUT_BYTES:
        message = f"the result of step {step.id!r} is {len(text)} bytes long; at most {MAX_OUTPUT_BYTES} can be stored"
        raise StepFailed(message, failure_of(step, "too_large", message))
    return text


def failure_of(step: StepCall, code: str, message: str) -> ToolFailure:
    return ToolFailure(tool=step.tool, code=code, message=printable(message), origin="step", category="step")


def not_begun(tool: str, error: Exception) -> ToolFailure:
    """Nobody survives what a step asks before it is begun, so it failed; nothing was claimed, or that is given back."""
    if isinstance(error, AskDied):
        return ToolFailure(tool=tool, code="dead_lettered", message=str(error), origin="receipts", category="dead_lettered")
    message = f"{tool} could not be claimed: {error!r}"
    return ToolFailure(tool=tool, code="claim_failed", message=printable(message), origin="receipts", category="step")


def raised(step: StepCall, error: BaseException) -> ToolFailure:
    """The record of what the function raised."""
    if isinstance(error, StepFailed) and error.failure is not None and error.failure.tool == step.tool:
        return error.failure
    return failure_of(step, StepFailed.code, f"step {step.id!r} failed: {named(error)}")


def value_of(step: StepCall, outcome: CallOutcome, make_handle: HandleFactory, *, asked: float | None = None) -> Any:
    """What the author gets: the value as it is stored, also where it was computed just now, so that a replay gets the same.

    Raises:
        StepFailed: with the failure's record.
        OutcomeUnknown: a step that must not be repeated was cut off.
        Parked: another executor runs the step for longer than a coroutine may wait, or the run was halted.

    """
    match outcome.outcome:
        case "completed" | "no_result":
            return decode_value(_decode_document(outcome.result).raw, f"step {step.id}", handle=make_handle)
        case "failed":
            failure = outcome.failure or failure_of(step, StepFailed.code, outcome.reason or f"step {step.id!r} failed")
            raise StepFailed(failure.message, failure)
        case "deferred":
            raise Parked(outcome.reason, wait_ms=outcome.wait_ms, asked=asked)
        case "halted":
            raise Parked(outcome.reason or "halted", halted=True, asked=asked)
        case "unknown":
            raise OutcomeUnknown(
                f"step {step.id!r} was cut off and must not be repeated, so its outcome is not known; "
                f"settle or replay receipt {outcome.receipt or short_digest(step.key)} (rowmill receipts)"
            )
