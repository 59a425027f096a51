"""``/livez``, ``/readyz`` and ``/metrics`` of a process, for whoever watches over it. Listens on loopback only: it says what the process does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rowmill.runtime.service import App

log = structlog.get_logger()

LOOPBACK: Final = "127.0.0.1"


class HealthServer:
    """Use ``async with HealthServer(apps, port):``. Port 0 picks a free one; see `port`.

    - ``/livez``: 200 as long as the event loop turns. A broker or database that is away is no reason to restart the process.
    - ``/readyz``: 200 when every app is ready (consumers attached, database reachable), else 503; the body says it per app.
    - ``/metrics``: Prometheus' text format.
    """

    def __init__(self, apps: Sequence[App], port: int) -> None:
        self.port = port
        self._apps = apps
        routes = web.Application()
        routes.add_routes([web.get("/livez", self._livez), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(routes, access_log=None)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, self.port).start()
        self.port = self._runner.addresses[0][1]
        log.info("health_served", url=f"http://{LOOPBACK}:{self.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = {app.name: app.ready for app in self._apps}
        return web.json_response(ready, status=200 if all(ready.values()) else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
