"""The tool gateway, wired: the one place that builds its bus, connections and threads."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import ClassVar

import structlog

from rowmill.project import Project
from rowmill.runtime import deadlines
from rowmill.runtime.author_threads import AuthorThreads
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.loaded_code import LoadedCode
from rowmill.tools import Tool
from rowmill_contracts.digests import SHARDS
from rowmill_contracts.shards import ShardsFreed
from rowmill_contracts.topology import ADMISSION_PARKED, CONTROL, gateway_calls
from rowmill_tool_gateway.body_budget import BodyBudget
from rowmill_tool_gateway.calling_back import CallBack
from rowmill_tool_gateway.credentials import Credentials, Redactor
from rowmill_tool_gateway.engine import Engine
from rowmill_tool_gateway.function_clients import Clients
from rowmill_tool_gateway.functions import FunctionCarrier
from rowmill_tool_gateway.handlers import Handlers
from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.http_library import LibraryPort
from rowmill_tool_gateway.http_port import AiohttpPort, HttpPort
from rowmill_tool_gateway.http_tools import Carrier, HttpCarrier
from rowmill_tool_gateway.routes import Routes
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.toolbox import Toolbox

log = structlog.get_logger()


class App:
    """Talks to providers, runs tool functions, sees secrets; nobody else does."""

    name: ClassVar[str] = "tool-gateway"

    def __init__(self, settings: ToolGatewaySettings | None = None) -> None:
        self._settings = settings or ToolGatewaySettings()
        self._bus = Bus(self._settings, service=self.name)
        connect, stall, limit = self._settings.connect_timeout, self._settings.body_stall, self._settings.body_limit
        budget = BodyBudget(self._settings.body_budget, limit)
        self._routes = Routes()
        self._sessions = AiohttpPort(connect_timeout=connect, body_stall=stall, body_limit=limit, budget=budget, routes=self._routes)
        self._library = LibraryPort(self._routes, self._sessions.bounds, connect_timeout=connect)
        self._port: HttpPort = self._sessions
        if self._settings.http_client == "direct":
            self._port = DirectPort(connect_timeout=connect, body_stall=stall, body_limit=limit, budget=budget, routes=self._routes)
        self._threads = AuthorThreads(self._settings.blocking_threads)
        self._credentials = Credentials(os.environ, Redactor(), outage=self._settings.secret_outage)
        self._clients = Clients(self._sessions, self._credentials, self._library, self._routes)
        self._clock = SystemClock()
        self._engine: Engine | None = None
        self._call_back = CallBack(
            lambda message: self._bus.publish(message, ADMISSION_PARKED),
            every=self._settings.hand,
            for_long=2 * self._settings.away_wait,
            clock=self._clock,
        )

    async def start(self) -> None:
        """Load the project's tools, connect, consume the calls of all shards. Raises `ProjectError`."""
        project = Project.find(self._settings.project or Path.cwd())
        project.load()
        code = LoadedCode(self.name, self._bus.process_id, self._clock.now(), lambda name: project.code_digest(project.play(name)))
        engine = self._engine = Engine(
            self._bus,
            Toolbox(self._carrier),
            self._credentials,
            self._settings,
            holder=self._bus.process_id,
            clock=self._clock,
            connected=lambda: self._bus.connected,
            serves=self._call_back.serves,
            step_back=lambda shard: self._bus.step_back(gateway_calls(shard)),
            sooner=self._call_back.sooner,
            tell_freed=lambda shards: self._bus.publish(ShardsFreed(shards=shards), "", exchange=CONTROL),
        )
        handlers = Handlers(engine, self._bus, code)
        self._bus.on_reconnect(engine.reconnected)
        deadline = deadlines.calls(self._settings, hand=self._settings.hand, in_flight_hold=self._settings.in_flight_hold)
        for shard in range(SHARDS):
            await self._bus.consume(
                gateway_calls(shard),
                handlers.calls,
                prefetch=self._settings.calls_prefetch,
                may_take_suspects=partial(engine.shards.may_take, shard),
                watched=True,  # by its receipt: what a call does to its gateway is counted there, and not held against its message (docs/adr/0019)
                deadline=deadline,
            )
        await self._bus.listen(CONTROL, [""], handlers.control)
        await self._bus.start()
        engine.start()
        log.info("gateway_started", holder=self._bus.process_id)  # the name that its leases are held under

    async def stop(self) -> None:
        """Take no more calls, defer what was not sent, wait for what was, close."""
        if self._engine is not None:
            await self._engine.shards.leave()
        for shard in range(SHARDS):
            await self._bus.stop_consuming(gateway_calls(shard))
        if self._engine is not None:
            await self._engine.stop(self._settings.drain_timeout)
        await self._call_back.stop()
        await self._bus.stop()
        self._clients.forget()
        await self._port.close()
        await self._sessions.close()
        await self._library.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return self._bus.ready

    def _carrier(self, tool: Tool) -> Carrier:
        limit = self._settings.result_limit
        if tool.kind == "http":
            port = self._library if self._routes.needs_library(tool.provider.name) else self._port
            return HttpCarrier(tool, port, self._credentials, result_limit=limit)
        return FunctionCarrier(tool, self._clients, self._credentials, self._threads, result_limit=limit)
