"""The call desk: tool calls go to the gateways in pages, their answers come back one by one.

Owns which calls are out and not answered, and asking again for them after a silence or a new connection. What a call means to the row that made it
belongs to `tool_calling`. A call is out under an id of this process; its receipt key makes asking twice harmless.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from rowmill.runtime.clock import Clock
from rowmill.runtime.gathering import Gatherer
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS, Message
from rowmill_contracts.tools import CallItem, CallOutcome, ToolCalls, ToolResults
from rowmill_contracts.topology import gateway_calls
from rowmill_row_executor.ports import Asker
from rowmill_row_executor.settings import RowExecutorSettings

log = structlog.get_logger()

_LONGEST_SILENCE = 16
"""Asking again slows down by doubling, up to this many times the setting ``ask_again``."""

ReplyT = TypeVar("ReplyT", bound=Message)


class CallBus(Protocol):
    """The part of the bus that the desk speaks to."""

    reply_to: str

    async def publish(self, message: Message, key: str, *, reply_to: str | None = None) -> None: ...

    def on_reply(self, message: type[ReplyT], callback: Callable[[ReplyT], None]) -> None: ...

    def on_reconnect(self, callback: Callable[[], None]) -> None: ...


class _Route:
    """Calls of one run to one shard, gathered into pages. ``out`` counts calls that are not answered."""

    __slots__ = ("gatherer", "key", "out")

    def __init__(self, key: tuple[str, int], gatherer: Gatherer[CallItem]) -> None:
        self.key = key
        self.gatherer = gatherer
        self.out = 0


class _Out:
    """A call that is out. Times are seconds of the process's own clock."""

    __slots__ = ("ask_again_at", "first_asked", "future", "item", "route", "silence")

    def __init__(self, item: CallItem, route: _Route, future: asyncio.Future[CallOutcome], now: float, silence: float) -> None:
        self.item = item
        self.route = route
        self.future = future
        self.first_asked = now
        self.silence = silence
        self.ask_again_at = now + silence


class BusCallDesk:
    """The desk of a process. `start` it once its bus is up; `stop` it before the bus."""

    def __init__(self, bus: CallBus, settings: RowExecutorSettings, clock: Clock) -> None:
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._out: dict[str, _Out] = {}
        self._routes: dict[tuple[str, int], _Route] = {}
        self._made = 0
        self._left_at = math.inf
        self._watch: asyncio.Task[None] | None = None
        bus.on_reply(ToolResults, self.answered)
        bus.on_reconnect(self.ask_all_again)

    def start(self) -> None:
        self._watch = asyncio.create_task(self._ask_silent_ones_again(), name="call desk")

    def leave(self) -> None:
        """The process stops, and what answers calls may, too: what is not answered within ``call_leave`` waits outside."""
        self._left_at = self._clock.monotonic() + self._settings.call_leave

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    @property
    def out(self) -> int:
        """Calls that are not answered."""
        return len(self._out)

    def new_call_id(self) -> str:
        self._made += 1
        return format(self._made, "x")

    def ask(self, asker: Asker, shard: int, item: CallItem) -> asyncio.Future[CallOutcome]:
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        route = self._routes.get((asker.run_id, shard)) or self._route(asker, shard)
        route.out += 1
        self._out[item.call_id] = _Out(item, route, future, self._clock.monotonic(), self._settings.ask_again)
        route.gatherer.add(item)
        return future

    def answered(self, message: ToolResults) -> None:
        """Hand each answer to who waits for it. An answer to a call that is not out (answered before, dropped) means nothing."""
        for outcome in message.results:
            call = self._out.pop(outcome.call_id, None)
            if call is not None:
                self._close(call)
                if not call.future.done():
                    call.future.set_result(outcome)

    def ask_all_again(self) -> None:
        """After a new connection: answers may have been lost with the old one."""
        for call in list(self._out.values()):
            call.route.gatherer.add(call.item)

    def look(self, now: float) -> None:
        """Ask again for calls that were silent too long; let go of dropped ones, of ones in flight for longer than a row waits in hand, and, when
        this process has left, of all.
        """
        for call_id, call in list(self._out.items()):
            if call.future.done():
                del self._out[call_id]
                self._close(call)
            elif now >= self._left_at or now - call.first_asked >= self._settings.call_hold:
                del self._out[call_id]
                self._close(call)
                wait = self._settings.call_leave if now >= self._left_at else self._settings.call_hold_park
                call.future.set_result(CallOutcome(call_id=call_id, outcome="deferred", wait_ms=int(wait * 1000), reason="in_flight"))
            elif now >= call.ask_again_at:
                call.silence = min(call.silence * 2, self._settings.ask_again * _LONGEST_SILENCE)
                call.ask_again_at = now + call.silence
                call.route.gatherer.add(call.item)

    async def _ask_silent_ones_again(self) -> None:
        while True:
            await self._clock.sleep(self._settings.ask_again / 4 if self._left_at == math.inf else self._settings.call_leave / 10)
            self.look(self._clock.monotonic())

    def _route(self, asker: Asker, shard: int) -> _Route:
        async def flush(items: list[CallItem]) -> None:
            message = ToolCalls(run_id=asker.run_id, org=asker.org, play=asker.play, started_at=asker.started_at, force=asker.force, calls=items)
            await self._bus.publish(message, gateway_calls(shard), reply_to=self._bus.reply_to)

        gatherer = Gatherer(flush, max_items=PAGE_ROWS, max_bytes=PAGE_BYTES, size=_size_of, max_age=self._settings.page_gather)
        route = self._routes[asker.run_id, shard] = _Route((asker.run_id, shard), gatherer)
        return route

    def _close(self, call: _Out) -> None:
        route = call.route
        route.out -= 1
        if not route.out:
            self._routes.pop(route.key, None)


def _size_of(item: CallItem) -> int:
    return len(memoryview(item.input))
