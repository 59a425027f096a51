"""Carrying out declared HTTP tools: one request out, its results or what was seen instead back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rowmill.errors import DefinitionError, SecretMissing
from rowmill.tools import Tool
from rowmill_tool_gateway.credentials import Credentials, SecretMisplaced
from rowmill_tool_gateway.failures import Observation, retry_after_seconds, speaks_of_payment
from rowmill_tool_gateway.http_port import HttpPort, MaySend, NoResponse, always
from rowmill_tool_gateway.http_requests import RequestShape
from rowmill_tool_gateway.results import Ended, read_answer, read_answers

EXCERPT = 300
"""Characters of a refusal's body that go into its message."""
REQUEST_IDS = ("X-Request-Id", "Request-Id", "X-Amzn-RequestId", "X-Correlation-Id", "CF-Ray")
"""Headers in which providers name a request, for their support to find it; the first that is there counts."""


class Carrier(Protocol):
    """Carries out calls of one tool, in one request."""

    async def carry(self, inputs: Sequence[bytes], keys: Sequence[str], timeout: float, may_send: MaySend = always) -> Sequence[Ended]:
        """How each call ended, in order. Never raises but when cancelled. ``timeout``: seconds from now. ``may_send``: asked right before anything
        is sent; refused, every call ended as ``not_sent``.
        """


def seen_answer(status: int, headers: Mapping[str, str], body: bytes, now: float) -> Observation:
    """What an answer that is no success says. ``now``: seconds since the epoch."""
    retry_after = retry_after_seconds(headers.get("Retry-After"), now)
    excerpt = body[: EXCERPT * 4].decode("utf-8", "replace")[:EXCERPT].strip()
    return Observation(
        "answered",
        f"the provider answered {status}" + (f": {excerpt}" if excerpt else ""),
        status=status,
        retry_after=retry_after,
        request_id=next((found for name in REQUEST_IDS if (found := headers.get(name))), None),
        says_payment=speaks_of_payment(status, body, retry_after),
    )


def refuse_secrets(tool: Tool, inputs: Sequence[bytes], credentials: Credentials) -> None:
    """Inputs stand in rows, receipts' keys and URLs, so no secret may. Raises `SecretMisplaced`."""
    if any(credentials.redactor.holds(given) for given in inputs):
        raise SecretMisplaced(
            f"tool {tool.id!r}: an input holds the value of a secret; tools are given secrets by their provider's auth= and secrets="
        )


class HttpCarrier:
    """``wall``: seconds since the epoch, for dates in headers."""

    def __init__(self, tool: Tool, port: HttpPort, credentials: Credentials, *, result_limit: int, wall: Callable[[], float] = time.time) -> None:
        self._tool = tool
        self._port = port
        self._credentials = credentials
        self._result_limit = result_limit
        self._wall = wall
        self._shape = RequestShape(tool)

    async def carry(self, inputs: Sequence[bytes], keys: Sequence[str], timeout: float, may_send: MaySend = always) -> Sequence[Ended]:
        try:
            credential = await self._credentials.headers(self._tool.provider)
            refuse_secrets(self._tool, inputs, self._credentials)
            request, batched = self._shape.request(inputs, keys, credential, timeout)
            response = await self._port.send(request, may_send)
        except SecretMissing as error:
            return [Observation("misdefined", str(error), code=error.code, category="auth")] * len(inputs)
        except DefinitionError as error:
            return [Observation("misdefined", str(error))] * len(inputs)
        except NoResponse as error:
            return [Observation(error.kind, str(error))] * len(inputs)
        body = self._credentials.redactor.body(response.body)
        if 200 <= response.status < 300 or response.status in self._tool.no_result:
            if batched:
                return read_answers(self._tool, response.status, body, keys, inputs, self._result_limit)
            return [read_answer(self._tool, response.status, body, self._result_limit)]
        return [seen_answer(response.status, response.headers, body, self._wall())] * len(inputs)
