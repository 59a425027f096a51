"""From calls to one HTTP request of a declared tool. Pure.

Inputs are JSON objects as the executor checked and encoded them; where nothing is added they are the body as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from rowmill.errors import DefinitionError
from rowmill.tools import Tool
from rowmill_tool_gateway.http_port import HttpRequest

_decode = msgspec.json.Decoder().decode
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_IN_QUERY: Final = frozenset({"GET", "HEAD", "DELETE"})
JSON_HEADERS: Final[Mapping[str, str]] = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "rowmill"}


class RequestShape:
    """How the tool's requests look, worked out once per tool.

    ``headers`` of a request are given by the caller (the credential) and the tool's provider. A path such as ``/companies/{domain}`` takes the
    named members of the input into the path; for GET and DELETE the others go into the query.
    """

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._provider = tool.provider
        self._url = tool.provider.base_url + _slashed(tool.path)
        self._places = tuple(_PLACE.findall(tool.path))
        self._in_query = tool.method in _IN_QUERY
        batch = tool.batch
        self._batch_url = tool.provider.base_url + _slashed(batch.path if batch is not None and batch.path is not None else tool.path)
        given = {name.lower() for name in tool.provider.headers}
        self._headers = {**{name: value for name, value in JSON_HEADERS.items() if name.lower() not in given}, **tool.provider.headers}
        self._fresh = tool.effect == "non_idempotent"
        self._single = batch is None

    def request(self, inputs: Sequence[bytes], keys: Sequence[str], credential: Mapping[str, str], timeout: float) -> tuple[HttpRequest, bool]:
        """The request for these calls, and whether it is a batch. ``keys``: idempotency keys. Raises `DefinitionError`."""
        batch = self._tool.batch
        headers = {**self._headers, **credential}
        # A lone call of a batch tool uses the single endpoint if there is one; not an idempotent one, whose repetition inside a batch the provider
        # would have to recognise by another kind of key.
        if batch is None or (len(inputs) == 1 and batch.path is not None and self._tool.effect == "read"):
            headers[self._provider.idempotency_header] = keys[0]
            url, body = self._single_target(inputs[0])
            return self._made(url, headers, body, timeout), False
        items = inputs if batch.item_key is None else [_with_key(given, batch.item_key, key) for given, key in zip(inputs, keys, strict=True)]
        body = b"[" + b",".join(items) + b"]"
        if batch.items is not None:
            body = b"{" + msgspec.json.encode(batch.items) + b":" + body + b"}"
        return self._made(self._batch_url, headers, body, timeout), True

    def _made(self, url: str, headers: Mapping[str, str], body: bytes | None, timeout: float) -> HttpRequest:
        return HttpRequest(self._provider.name, self._tool.method, url, headers, body, timeout, self._fresh)

    def _single_target(self, given: bytes) -> tuple[str, bytes | None]:
        if not self._places and not self._in_query:
            return self._url, given
        members = _decode(given)
        if not isinstance(members, dict):
            raise DefinitionError(f"tool {self._tool.id!r}: its input goes into the URL, so it must be an object")
        url = _PLACE.sub(lambda place: _path_part(self._tool, members, place[1]), self._url)
        rest = {name: value for name, value in members.items() if name not in self._places}
        if not self._in_query:
            return url, msgspec.json.encode(rest)
        query = urlencode([pair for name, value in rest.items() for pair in _query_pairs(name, value)])
        return (f"{url}?{query}" if query else url), None


def _slashed(path: str) -> str:
    return path if path.startswith("/") or not path else f"/{path}"


def _path_part(tool: Tool, members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if value is None or isinstance(value, dict | list) or value in {"", ".", ".."}:
        raise DefinitionError(f"tool {tool.id!r}: {name!r} goes into the path and is {value!r}")
    return quote(_text(value), safe="")


def _query_pairs(name: str, value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, list):
        return [(name, _text(item)) for item in value if item is not None]
    return [(name, _text(value))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _with_key(given: bytes, name: str, key: str) -> bytes:
    """The input with its idempotency key as one member more; a member of that name is overwritten."""
    member = msgspec.json.encode(name)
    if not given.startswith(b"{") or member in given:
        members = _decode(given)
        if not isinstance(members, dict):
            raise DefinitionError(f"an input that carries a key must be an object, not {given[:80]!r}")
        return msgspec.json.encode({**members, name: key})
    rest = given[1:].lstrip()
    return b"{" + member + b":" + msgspec.json.encode(key) + (b"" if rest.startswith(b"}") else b",") + rest
