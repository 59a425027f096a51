"""From a provider's answer to what is stored and sent back. Pure.

The provider's JSON is checked and passed on as the bytes that came; only what is needed to judge it is decoded. ``data`` is left out of the
stored document where it is `raw` read by the tool's output type: always, but for a call without result whose body does not fit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from rowmill.errors import OutputInvalid, RowmillError
from rowmill.said import said_by
from rowmill.tools import Tool
from rowmill_tool_gateway.failures import Observation

_decode = msgspec.json.Decoder().decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_BOM = b"\xef\xbb\xbf"
_BODILESS = frozenset({204, 205})
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Result:
    """``output``: the document that is stored. ``cost``: what the tool says it cost; None where it does not say."""

    output: bytes
    no_result: bool
    cost: Decimal | None = None


Ended = Result | Observation
"""How one call ended."""


def read_answer(tool: Tool, status: int, body: bytes, limit: int) -> Ended:
    """The result of a single call. ``status``: a success, or one of the tool's ``no_result``. ``limit``: bytes of an output at most.

    An empty body is null where the status says that there is none (204, 205) or the tool's output may be null; else it is not JSON.
    """
    text = body.removeprefix(_BOM).strip()
    ended = _read_item(tool, status, text or b"null", limit, lenient=status in tool.no_result)
    if not text and status not in _BODILESS and isinstance(ended, Observation) and ended.kind == "wrong_answer":
        return Observation("bad_answer", "the answer is empty", code="not_json")
    return ended


def read_answers(tool: Tool, status: int, body: bytes, keys: Sequence[str], inputs: Sequence[bytes], limit: int) -> list[Ended]:
    """The results of a batch, one per call in order (SPEC 4.2)."""
    if status in tool.no_result:
        return [read_answer(tool, status, body, limit) for _ in keys]
    try:
        items = _items(tool, body.removeprefix(_BOM))
    except (*_UNREADABLE, KeyError) as error:
        return [_no_list(body.removeprefix(_BOM), error)] * len(keys)
    batch = tool.batch
    if batch is not None and batch.id_field is not None:
        return _by_id(tool, status, items, keys, inputs, limit)
    if len(items) != len(keys):
        wrong = f"{len(keys)} calls were sent and {len(items)} results came back without ids"
        return [Observation("wrong_answer", wrong, code="result_count")] * len(keys)
    return [_read_item(tool, status, bytes(item), limit) for item in items]


def _no_list(body: bytes, error: Exception) -> Observation:
    """JSON of another shape would come again as it is; what is no JSON may be whole the next time."""
    try:
        _decode(body)
    except _UNREADABLE as unreadable:
        return Observation("bad_answer", f"the answer is not JSON: {unreadable}", code="not_json")
    return Observation("wrong_answer", f"the answer holds no list of results: {error}", code="no_results")


def output_of(tool: Tool, value: Any, limit: int) -> Ended:
    """The result of a tool function's output for one input."""
    try:
        raw = msgspec.json.encode(tool.encode_output(value))
    except OutputInvalid as error:
        return Observation("wrong_answer", said_by(error))
    except BaseException as error:  # an author's serialiser may raise anything
        return Observation("wrong_answer", f"answer of tool {tool.id!r} cannot be written as JSON: {said_by(error)}")
    return _read_item(tool, None, raw, limit)


def _read_item(tool: Tool, status: int | None, raw: bytes, limit: int, *, lenient: bool = False) -> Ended:
    if len(raw) > limit:
        return Observation("too_large", f"the result has {len(raw)} bytes; at most {limit} are stored")
    try:
        value = _decode(raw)
    except _UNREADABLE as error:
        if not lenient:
            return Observation("bad_answer", f"the answer is not JSON: {error}", code="not_json")
        value, raw = None, b"null"
    try:
        result = tool.result(value, http_status=status)
        cost = None if tool.actual_cost is None else tool.actual_cost_of(result, Decimal(0))
    except OutputInvalid as error:
        return Observation("wrong_answer", said_by(error))
    except RowmillError as error:
        return Observation("wrong_answer", said_by(error), category="definition")
    except BaseException as error:  # an author's actual_cost may raise anything
        return Observation("wrong_answer", f"actual_cost of tool {tool.id!r} failed: {type(error).__name__}: {said_by(error)}", category="definition")
    unfit = b',"data":null' if result.data is None and value is not None else b""
    return Result(b'{"raw":' + raw + unfit + _meta(status), result.status == "no_result", cost)


@lru_cache(maxsize=64)
def _meta(status: int | None) -> bytes:
    return b"}" if status is None else b',"meta":{"http_status":%d}}' % status


def _items(tool: Tool, body: bytes) -> list[msgspec.Raw]:
    """The list at the batch's ``results`` path, each item as it came."""
    part: bytes | msgspec.Raw = body
    path = None if tool.batch is None else tool.batch.results
    for step in path.split(".") if path else ():
        part = _decode_members(part)[step]
    return _decode_items(part)


def _by_id(tool: Tool, status: int, items: Sequence[msgspec.Raw], keys: Sequence[str], inputs: Sequence[bytes], limit: int) -> list[Ended]:
    """Results matched by the member that repeats the item's key, or the item's own member of that name."""
    batch = tool.batch
    assert batch is not None and batch.id_field is not None  # noqa: S101, PT018 - the caller looked
    found: dict[Any, bytes] = {}
    for item in items:
        members = _members(item)
        if batch.id_field in members:
            found[bytes(members[batch.id_field])] = bytes(item)
    ended: list[Ended] = []
    for key, given in zip(keys, inputs, strict=True):
        wanted = msgspec.json.encode(key) if batch.item_key is not None else bytes(_members(given).get(batch.id_field, b""))
        raw = found.get(wanted)
        ended.append(
            Observation("wrong_answer", "the answer holds no result for this call", code="result_missing")
            if raw is None
            else _read_item(tool, status, raw, limit)
        )
    return ended


def _members(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _decode_members(raw)
    except _UNREADABLE:
        return {}
