"""What a tool call gives: its result, how it was executed, and reading values out of it by declared paths.

A result survives being stored in a cell or receipt and read back, also where the tool's code is not loaded.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Generic, Literal, TypeVar

import msgspec
from pydantic import BaseModel, TypeAdapter

from rowmill.errors import UsageError

Out = TypeVar("Out")

ResultStatus = Literal["completed", "no_result"]
Extract = Mapping[str, Sequence[str]]
"""Extractor name to the paths that are tried in turn, such as ``{"email": ["email", "data.emails.0.value"]}``."""


class Execution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a result came about: a request made for this row (``live``), a stored one (``cache``), another caller's (``in_flight``).

    ``receipt``: short digest of the receipt, never its key. ``cost``: what the row paid.
    """

    kind: Literal["live", "cache", "in_flight"] = "live"
    receipt: str = ""
    cost: Decimal = Decimal(0)


class ToolResult(msgspec.Struct, Generic[Out], frozen=True, kw_only=True):
    """The result of a tool call (SPEC 1.5).

    ``raw``: the provider's JSON, unchanged (of a batch: this call's item). ``data``: ``raw`` read by the tool's output type (None for a call
    without result whose body does not fit it). ``meta``: facts about the call, such as ``waterfall_attempts``.
    """

    tool: str
    status: ResultStatus
    raw: Any
    data: Out
    meta: dict[str, Any] = {}
    job_id: str | None = None
    execution: Execution = Execution()
    extract: Extract = {}

    def get(self, name: str) -> Any:
        """The first value that is not null among the declared paths of ``name``, or None. Raises `UsageError` for an undeclared name."""
        return next((value for value in self._values(name) if value is not None), None)

    def list(self, name: str) -> builtins.list[Any]:
        """Every value that is not null at the declared paths of ``name``, in path order; a list found there gives its items."""
        found: builtins.list[Any] = []
        for value in self._values(name):
            if isinstance(value, builtins.list):
                found.extend(item for item in value if item is not None)
            elif value is not None:
                found.append(value)
        return found

    def _values(self, name: str) -> Iterator[Any]:
        if name not in self.extract:
            declared = ", ".join(sorted(self.extract)) or "none"
            raise UsageError(f"tool {self.tool!r} declares no extractor {name!r}; declared: {declared}")
        for path in self.extract[name]:
            yield from values_at(self.raw, path)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values. ``data`` is left out where it is what ``raw`` is."""
        document: dict[str, Any] = {"tool": self.tool, "status": self.status, "raw": self.raw}
        data = plain(self.data)
        if data != self.raw or type(data) is not type(self.raw):
            document["data"] = data
        if self.meta:
            document["meta"] = self.meta
        if self.job_id is not None:
            document["job_id"] = self.job_id
        document["execution"] = msgspec.to_builtins(self.execution)
        if self.extract:
            document["extract"] = {name: [*paths] for name, paths in self.extract.items()}
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any], output: TypeAdapter[Any] | None = None) -> ToolResult[Any]:
        """Read back what `to_json` wrote. With the tool's ``output`` type ``data`` is that type again, else plain JSON."""
        raw = document["raw"]
        data = document.get("data", raw)
        if output is not None and data is not None:
            data = output.validate_python(data)
        return ToolResult(
            tool=document["tool"],
            status=document["status"],
            raw=raw,
            data=data,
            meta=document.get("meta", {}),
            job_id=document.get("job_id"),
            execution=msgspec.convert(document.get("execution", {}), Execution),
            extract=document.get("extract", {}),
        )


def plain(data: Any) -> Any:
    """A tool's data as JSON values."""
    if isinstance(data, BaseModel):
        return data.model_dump(mode="json")
    if data is None or isinstance(data, str | int | float | bool):
        return data
    kind: Any = type(data)
    return _adapter(kind).dump_python(data, mode="json")


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def values_at(document: Any, path: str) -> Iterator[Any]:
    """The values at a dotted path: names of object members, indexes of list items, ``*`` for every item. Nothing where the path leads nowhere."""
    if type(document) is dict and path in document and "." not in path:  # the common case, once or more per row
        yield document[path]
        return
    found: builtins.list[Any] = [document]
    for step in path.split("."):
        found = [below for value in found for below in _below(value, step)]
        if not found:
            return
    yield from found


def _below(value: Any, step: str) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if step in value:
            yield value[step]
        elif step == "*":
            yield from value.values()
    elif isinstance(value, list):
        if step == "*":
            yield from value
        elif step.lstrip("-").isdigit() and -len(value) <= int(step) < len(value):
            yield value[int(step)]
