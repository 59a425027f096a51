"""Services that are started anew and tell of their health, each on a port of its own."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from tests.e2e.stage import BOUND
from tests.integration.faults.conftest import Harmed

from rowmill.dev.services import ServiceSet
from rowmill.runtime.hosting import SERVICES


class Watched:
    """All services anew, each telling of its health on a port of its own."""

    def __init__(self, system: Harmed) -> None:
        self._ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
        self.services = ServiceSet(system.environment, system.project / "logs")
        for process in self.services.processes:
            process._environment["ROWMILL_HEALTH_PORT"] = str(self._ports[process.name])

    async def health(self, path: str) -> dict[str, int]:
        """The status of each service; those that do not listen yet are left out."""
        found = {}
        async with aiohttp.ClientSession() as session:
            for service, port in self._ports.items():
                try:
                    async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                        found[service] = answer.status
                except aiohttp.ClientError:
                    continue
        return found

    async def until(self, path: str, wanted: dict[str, int]) -> None:
        """Return once the services answer so."""
        found: dict[str, int] = {}
        try:
            async with asyncio.timeout(BOUND):
                while (found := await self.health(path)) != wanted:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            words = "\n".join(f"{process.name} {process.exit_status}: {process.last_words()}" for process in self.services.processes)
            raise AssertionError(f"{path} is answered {found}, not {wanted}\n{words}") from None


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
