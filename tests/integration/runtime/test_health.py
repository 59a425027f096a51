"""What a process says about its health, with servers that go away."""

from __future__ import annotations

import asyncio

import aiohttp

from rowmill.dev.private import PrivateServers
from rowmill.runtime.health import HealthServer
from rowmill.runtime.service import App
from rowmill_sheet_writer.app import App as SheetWriter
from rowmill_sheet_writer.settings import SheetWriterSettings


async def answer(server: HealthServer, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{server.port}{path}") as response:
        return response.status, await response.text()


async def becomes(server: HealthServer, status: int) -> None:
    async with asyncio.timeout(60):
        while (await answer(server, "/readyz"))[0] != status:
            await asyncio.sleep(0.05)


def sessions(answered: tuple[int, str]) -> float:
    """How many sessions the process has had with the broker, for this service (other tests of the process count too)."""
    [line] = [line for line in answered[1].splitlines() if line.startswith('rowmill_broker_sessions_total{service="sheet-writer"}')]
    return float(line.rsplit(" ", 1)[1])


async def test_ready_means_consumers_attached_and_database_reachable(own_servers: PrivateServers) -> None:
    settings = SheetWriterSettings(broker_url=own_servers.broker.url, database_url=own_servers.database.url, time_scale=0.05)
    writer: App = SheetWriter(settings)
    async with HealthServer([writer], 0) as server:
        assert await answer(server, "/readyz") == (503, '{"sheet-writer": false}')
        await writer.start()
        try:
            assert await answer(server, "/readyz") == (200, '{"sheet-writer": true}')

            before = sessions(await answer(server, "/metrics"))
            await asyncio.to_thread(own_servers.database.stop)
            await becomes(server, 503)
            await asyncio.to_thread(own_servers.database.start)
            await becomes(server, 200)

            await asyncio.to_thread(own_servers.broker.stop)
            await becomes(server, 503)
            assert await answer(server, "/livez") == (200, '{"live": true}')
            await asyncio.to_thread(own_servers.broker.start)
            await becomes(server, 200)

            assert sessions(await answer(server, "/metrics")) > before, "a session after the restart"
            _, metrics = await answer(server, "/metrics")
            assert 'rowmill_broker_session_up{service="sheet-writer"} 1.0' in metrics
        finally:
            await writer.stop()
        assert (await answer(server, "/readyz"))[0] == 503
