"""Carrying out tools that are functions: called with their inputs and a `ToolCall`, in the loop or in a thread.

What a function raises is an observation like any other: httpx's errors are classed as the provider's answers are, `ToolError` says itself what
follows, anything else is the function's own failure.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import structlog

from rowmill.errors import DefinitionError, InputInvalid, SecretMissing, ToolError
from rowmill.runtime.ends import being_cancelled
from rowmill.said import said_by
from rowmill.tools import Tool, ToolCall
from rowmill_tool_gateway.credentials import Credentials
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.function_clients import NEVER_OPENED, Clients
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseTooLarge
from rowmill_tool_gateway.http_port import MaySend, NoResponse, always, may_send_here, not_sent
from rowmill_tool_gateway.http_tools import refuse_secrets, seen_answer
from rowmill_tool_gateway.results import Ended, Result, output_of
from rowmill_tool_gateway.rights import Right

log = structlog.get_logger()

_decode = msgspec.json.Decoder().decode


@types.coroutine
def _watched(work: Coroutine[Any, Any, Any], right: Right) -> Generator[Any, Any, Any]:
    """Carries ``work`` out, and notes when it waits for anything but our own transport, as who sends by a client of its own does."""
    thrown: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration as ended:
            return ended.value
        if not right.asking:
            right.elsewhere = True
        try:
            yield awaited
            thrown = None
        except BaseException as error:  # it is the work's to deal with, also where it is cancelled
            thrown = error


class FunctionCarrier:
    """``monotonic`` and ``wall``: clocks, for the deadline that functions see and for dates in headers."""

    def __init__(
        self,
        tool: Tool,
        clients: Clients,
        credentials: Credentials,
        threads: Executor,
        *,
        result_limit: int,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tool = tool
        self._clients = clients
        self._credentials = credentials
        self._threads = threads
        self._result_limit = result_limit
        self._monotonic = monotonic
        self._wall = wall

    async def carry(self, inputs: Sequence[bytes], keys: Sequence[str], timeout: float, may_send: MaySend = always) -> Sequence[Ended]:
        tool = self._tool
        try:
            given = [tool.decode_input(_decode(one)) for one in inputs]
            secrets: Mapping[str, str] = await self._credentials.values(tool.provider)
            refuse_secrets(tool, inputs, self._credentials)
        except SecretMissing as error:
            return [Observation("misdefined", said_by(error), code=error.code, category="auth")] * len(inputs)
        except InputInvalid as error:
            return [Observation("misdefined", said_by(error), code=error.code)] * len(inputs)
        if not may_send():
            return [Observation("not_sent", str(not_sent()))] * len(inputs)
        fresh = tool.effect == "non_idempotent"
        try:
            client = self._clients.client(tool.provider, fresh=fresh)
        except DefinitionError as error:  # of its TLS files
            return [Observation("misdefined", said_by(error))] * len(inputs)
        deadline = self._monotonic() + timeout
        call = ToolCall(http=client, blocking_http=self._clients.blocking(client), keys=list(keys), deadline=deadline, secrets=secrets)
        right = Right(may_send, elsewhere=tool.blocking)
        asked = may_send_here.set(right)
        try:
            async with asyncio.timeout(timeout):
                outputs = await self._called(given if tool.batch is not None else given[0], call, right)
        except NoResponse as error:
            return [Observation("no_answer" if self._did_something(right) else error.kind, said_by(error))] * len(inputs)
        except BaseException as error:  # author code may raise anything: what ends neither this process nor the call is the function's own
            if isinstance(error, KeyboardInterrupt) or (isinstance(error, asyncio.CancelledError) and being_cancelled()):
                raise
            return [self._observed(error, right)] * len(inputs)
        finally:
            may_send_here.reset(asked)
            right.end()
        if tool.batch is None:
            return [self._ended(outputs, right)]
        if not isinstance(outputs, list | tuple) or len(outputs) != len(inputs):
            got = f"{len(outputs)} results" if isinstance(outputs, list | tuple) else type(outputs).__name__
            return [Observation("wrong_answer", f"{len(inputs)} inputs were given and {got} returned", code="result_count")] * len(inputs)
        return [self._ended(output, right) for output in outputs]

    async def _called(self, given: Any, call: ToolCall, right: Right) -> Any:
        function = self._tool.function
        assert function is not None  # noqa: S101 - a function tool has one
        if self._tool.blocking:
            context = contextvars.copy_context()
            return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, function, given, call)
        returned = function(given, call)
        if inspect.iscoroutine(returned):
            return await _watched(returned, right)
        right.elsewhere = True
        return await returned if inspect.isawaitable(returned) else returned

    def _ended(self, output: Any, right: Right) -> Ended:
        if isinstance(output, BaseException):
            return self._observed(output, right)
        ended = output_of(self._tool, output, self._result_limit)
        if isinstance(ended, Result):
            return Result(self._credentials.redactor.body(ended.output), ended.no_result, ended.cost)
        return ended

    def _did_something(self, right: Right) -> bool:
        """Whether the call may have had an effect. What must not be repeated is unsent only where nothing else can have gone before."""
        return right.used or (right.elsewhere and self._tool.effect == "non_idempotent")

    def _observed(self, error: BaseException, right: Right) -> Observation:
        """A request that never was does not mean that nothing happened. That a connection never opened is believed of our own transport alone,
        where the call must not be repeated: of a function's own client nothing is known.
        """
        try:
            seen = self._seen(error)
        except BaseException as unread:  # author code's errors may raise anything where they are read
            seen = Observation("crashed", f"{type(error).__name__}, of which nothing can be read ({type(unread).__name__})")
        did_something = self._did_something(right)
        ours = self._tool.effect != "non_idempotent" or any(error is one for one in right.unopened)
        if seen.kind == "never_opened" and (did_something or not ours):
            return replace(seen, kind="no_answer")
        return replace(seen, kind="crashed") if did_something and seen.kind == "misdefined" else seen

    def _seen(self, error: BaseException) -> Observation:
        match error:
            case ToolError():
                status, retry_after = _number(error.status), _number(error.retry_after)
                return Observation(
                    "raised",
                    said_by(error.message),
                    status=None if status is None else int(status),
                    retry_after=retry_after,
                    code=None if error.failure_code == ToolError.code else said_by(error.failure_code),
                    category=None if error.category == "rejected" else said_by(error.category),  # the default; a status says more
                    retryable=bool(error.retryable),
                )
            case httpx.HTTPStatusError():
                body = self._credentials.redactor.body(_body(error.response))  # before it is cut, lest a part of a secret be left
                return seen_answer(error.response.status_code, error.response.headers, body, self._wall())
            case SecretMissing():
                return Observation("misdefined", said_by(error), code=error.code, category="auth")
            case NoResponse():  # of one item among others, which may have been sent
                return Observation("no_answer", said_by(error))
            case ResponseTooLarge():
                return Observation("too_large", said_by(error))
            case BadResponse():
                return Observation("bad_answer", said_by(error))
            case httpx.HTTPError() if isinstance(error, NEVER_OPENED):
                return Observation("never_opened", f"no connection to the provider: {said_by(error)}")
            case httpx.DecodingError() | httpx.RemoteProtocolError():
                return Observation("bad_answer", f"the answer cannot be read: {said_by(error)}")
            case httpx.TransportError():
                return Observation("no_answer", f"the connection was lost before the answer: {type(error).__name__}: {said_by(error)}")
            case json.JSONDecodeError() | UnicodeDecodeError():  # what `httpx.Response.json` raises
                return Observation("bad_answer", f"the answer is not JSON: {said_by(error)}", code="not_json")
            case TimeoutError():
                return Observation("no_answer", "no answer within the call's timeout", code="timeout")
            case _:
                log.warning("tool_crashed", tool=self._tool.id, error_type=type(error).__name__)
                return Observation("crashed", f"{type(error).__name__}: {said_by(error)}")


def _number(given: Any) -> float | None:
    """What author code gives for a number, such as a header's text, as messages carry it; None: nothing usable."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _body(response: httpx.Response) -> bytes:
    try:
        return response.content
    except httpx.ResponseNotRead:
        return b""
