"""One tool call, from what the author wrote to the item that travels, and from the answer to what the author gets.

Bodies and rows share it. Handing calls in and asking again is the call desk's; when a call may be made is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import ValidationError

from rowmill.durations import Duration, optional_seconds
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key, scope_of
from rowmill.errors import DefinitionError, InputInvalid, OutputInvalid, ToolFailed
from rowmill.tool_results import Execution, ToolResult
from rowmill.tools import Tool, tool_of
from rowmill.validation import explain
from rowmill_contracts.digests import shard_of
from rowmill_contracts.envelope import NULL
from rowmill_contracts.tools import CallItem, CallOutcome, ToolFailure
from rowmill_row_executor.endings import OutcomeUnknown, Parked
from rowmill_row_executor.ports import Asker

MAX_INPUT_BYTES = 1024 * 1024
"""A tool's input is part of a row's work, and a row is not over 1 MiB (SPEC 2.11)."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that was checked and can be handed in."""

    name: str
    tool: Tool
    shard: int
    item: CallItem


class _Document(msgspec.Struct):
    """The stored result of a call (`CallOutcome.result`)."""

    raw: Any = None
    data: Any = msgspec.UNSET
    meta: dict[str, Any] = {}
    job_id: str | None = None


_decode_document = msgspec.json.Decoder(_Document).decode
_shard_of = lru_cache(maxsize=4096)(shard_of)


def prepare(
    asker: Asker,
    call_id: str,
    *,
    tool: Any,
    input: Any,  # noqa: A002 - the authoring surface names it so
    caller: str,
    asked: float,
    id: str | None = None,  # noqa: A002 - likewise
    force: bool = False,
    stale_after: Duration | None = None,
    timeout: Duration | None = None,
    max_wait: float | None = None,
) -> PreparedCall:
    """Check a call and make the item that travels.

    ``caller``: ``<dataset>/<row key>``, or empty for the body; with the call's ``id`` (its tool's, if none is given) it names the logical call, which
    is the same in every replay, delivery and attempt. ``asked``: when it was first asked for, seconds since the epoch. ``max_wait``: seconds
    that it waits for a provider that does not serve (its tool's own limit bounds every wait). Raises `InputInvalid` naming field and value,
    `UnknownName`, `DefinitionError`.
    """
    definition = tool_of(tool)
    if id is not None and not (isinstance(id, str) and id.isprintable()):
        raise DefinitionError(f"call id {id!r:.100} is not allowed: it must be printable text")
    encoded = canonical(definition.encode_input(input))
    if len(encoded) > MAX_INPUT_BYTES:
        raise InputInvalid(f"input of tool {definition.id!r} is {len(encoded)} bytes; at most {MAX_INPUT_BYTES} are allowed")
    provider = definition.provider
    name = id or definition.id
    scope = scope_of(definition.cache, play=asker.play, run_id=asker.run_id, caller=caller, call=name)
    item = CallItem(
        call_id=call_id,
        tool=definition.id,
        receipt_key=receipt_key(asker.org, scope, definition.id, definition.version, encoded, provider.credential_scope),
        input=msgspec.Raw(encoded),
        row=caller,
        asked=asked,
        force=force,
        stale_after=definition.stale_after if stale_after is None else optional_seconds(stale_after),
        timeout=optional_seconds(timeout),
        max_wait=max_wait,
    )
    return PreparedCall(name, definition, _shard_of(asker.org, provider.name), item)


def result_of(call: PreparedCall, outcome: CallOutcome) -> ToolResult[Any]:
    """What the author gets.

    Raises:
        OutputInvalid: the stored result does not fit the tool's output type.
        ToolFailed: with the failure's record.
        OutcomeUnknown: nobody knows whether an earlier request had its effect.
        Parked: the call must wait longer than a coroutine may, or the run was halted.

    """
    tool = call.tool
    match outcome.outcome:
        case "completed" | "no_result":
            document = _decode_document(outcome.result) if outcome.result != NULL else _Document()
            data = document.raw if document.data is msgspec.UNSET else document.data
            try:
                typed = None if data is None else tool.output_adapter.validate_python(data)
            except ValidationError as error:
                raise OutputInvalid(f"answer of tool {tool.id!r}: {explain(error)}") from error
            return ToolResult(
                tool=tool.id,
                status=outcome.outcome,
                raw=document.raw,
                data=typed,
                meta=document.meta,
                job_id=document.job_id,
                execution=Execution(kind=outcome.execution, receipt=outcome.receipt, cost=outcome.cost),
                extract=tool.extract,
            )
        case "failed":
            failure = outcome.failure or ToolFailure(tool=tool.id, code="tool_failed", message=outcome.reason or "the call failed", origin="gateway")
            raise ToolFailed(f"tool {failure.tool!r} failed: {failure.message}", failure)
        case "deferred":
            reason = outcome.reason or f"tool {tool.id}"
            asked = None if reason.startswith("budget:") else call.item.asked  # the provider is not what keeps it waiting
            raise Parked(reason, wait_ms=outcome.wait_ms, asked=asked, provider=outcome.provider, away=outcome.away)
        case "halted":
            raise Parked(outcome.reason or "halted", halted=True, asked=call.item.asked)
        case "unknown":
            raise OutcomeUnknown(
                f"tool {tool.id!r}: an earlier request was sent and its outcome is not known; "
                f"settle or replay receipt {outcome.receipt} (rowmill receipts)"
            )


def charge_of(outcome: CallOutcome) -> tuple[str, Decimal] | None:
    """(receipt, cost) where this caller's own request was made, also when its answer is read back later; else None."""
    if outcome.execution != "live" or outcome.outcome not in {"completed", "no_result", "failed"}:
        return None
    if outcome.failure is not None and outcome.failure.origin != "provider":
        return None
    return outcome.receipt or outcome.call_id, outcome.cost
