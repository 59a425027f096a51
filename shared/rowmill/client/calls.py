"""One call of a tool without a run around it: through the gateway, under a receipt, as a row's call would be made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rowmill.client.lanes import ask_lanes
from rowmill.encoding.canonical import canonical
from rowmill.encoding.receipts import receipt_key
from rowmill.errors import AskTimeout, InputInvalid, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import new_id
from rowmill.tools import Tool
from rowmill_contracts.digests import shard_of
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import gateway_calls

PRESENCE_SECONDS = 5.0
"""Silence of all gateways after which none is taken to run: a call that nobody takes would be made, and paid for, when nobody waits for it."""
MAX_INPUT_BYTES = 1024 * 1024


class ToolCaller:
    """``org``: who pays. ``ask_again``: seconds of silence after which a call is sent again, which joins the one under way."""

    def __init__(self, bus: Bus, *, org: str = "default", ask_again: float = 5.0) -> None:
        self._bus = bus
        self._org = org
        self._ask_again = ask_again

    async def call(
        self,
        tool: Tool,
        given: Any,
        *,
        wait: float,
        force: bool = False,
        timeout: float | None = None,
        waiting: Callable[[CallOutcome], None] | None = None,
    ) -> CallOutcome:
        """The outcome of a call with this input: what is stored serves, unless it is forced. Equal calls of runs use its result.

        ``wait``: seconds to wait in all; then the call goes on without us, and asking again finds its result. ``waiting``: told whenever the call
        must wait for its provider. Raises `InputInvalid`, `UnavailableError` where no gateway runs (nothing was sent then), `AskTimeout`.
        """
        encoded = canonical(tool.encode_input(given))
        if len(encoded) > MAX_INPUT_BYTES:
            raise InputInvalid(f"input of tool {tool.id!r} is {len(encoded)} bytes; at most {MAX_INPUT_BYTES} are allowed")
        provider = tool.provider
        if not await ask_lanes(self._bus, seconds=PRESENCE_SECONDS, org=self._org, provider=provider.name, enough=bool):
            raise UnavailableError("no tool-gateway answered, so the call was not made; `rowmill up` starts servers and services")
        run_id, asked = new_id("call-"), time.time()
        key = receipt_key(self._org, "", tool.id, tool.version, encoded, provider.credential_scope)
        item = CallItem(
            call_id=run_id,
            tool=tool.id,
            receipt_key=key,
            input=msgspec.Raw(encoded),
            row=f"call/{run_id}",
            asked=asked,
            force=force,
            timeout=timeout,
        )
        message = ToolCalls(run_id=run_id, org=self._org, play="call", started_at=asked, calls=[item])
        try:
            async with asyncio.timeout(wait):
                return await self._answered(message, gateway_calls(shard_of(self._org, provider.name)), waiting)
        except TimeoutError as error:
            raise AskTimeout(
                f"no outcome of the call within {wait:g} s; it may still be made. Its receipt is {key[:12]} (`rowmill receipts show {key[:12]}`), "
                "and the same call, asked for again without --force, is served by its result"
            ) from error

    async def _answered(self, message: ToolCalls, queue: str, waiting: Callable[[CallOutcome], None] | None) -> CallOutcome:
        """Ask until there is an outcome that is final."""
        answers: asyncio.Queue[CallOutcome] = asyncio.Queue()

        def collect(results: ToolResults) -> None:
            for outcome in results.results:
                if outcome.call_id == message.run_id:
                    answers.put_nowait(outcome)

        self._bus.on_reply(ToolResults, collect)
        while True:
            await self._bus.publish(message, queue, reply_to=self._bus.reply_to)
            try:
                async with asyncio.timeout(self._ask_again):
                    outcome = await answers.get()
            except TimeoutError:
                continue
            if outcome.outcome != "deferred":
                return outcome
            if waiting is not None:
                waiting(outcome)
            await asyncio.sleep(outcome.wait_ms / 1000)
