"""One system for a module's tests, on servers that they may harm, over a network that they may harm."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.e2e.stage import SCALE, ProviderProcess, Stage, make_project
from tests.integration.faults.proxy import FaultProxy

from rowmill import registry
from rowmill.client import Client
from rowmill.dev.private import PrivateServers
from rowmill.dev.services import ServiceSet

GRACE = 6.0
"""Real seconds for which the holder of a shard is waited for after an outage: processes connect again in their own time, not in a scaled one."""


class Network:
    """A `FaultProxy` before the broker and one before the database, on a loop and thread of their own: they outlive each test's loop."""

    def __init__(self, servers: PrivateServers) -> None:
        self._urls = {"broker": servers.broker.url, "database": servers.database.url}
        self._proxies = {name: FaultProxy(urlsplit(url).port or 0) for name, url in self._urls.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")

    def __enter__(self) -> Self:
        self._thread.start()
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.__aenter__(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.__aexit__(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, name: str) -> str:
        parts = urlsplit(self._urls[name])
        return urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{self._proxies[name].port}"))

    def order(self, name: str, what: Callable[[FaultProxy], None]) -> None:
        """Do something to one of the proxies (`broker`, `database`)."""
        self._loop.call_soon_threadsafe(what, self._proxies[name])

    def heal(self) -> None:
        for name in self._proxies:
            self.order(name, FaultProxy.heal)


class Harmed(Stage):
    """A stage whose services reach their servers through a `Network`; the tests' own client and audit go straight."""

    def __init__(self, stage_servers: PrivateServers, network: Network, provider: ProviderProcess, project_folder: pytest.TempPathFactory) -> None:
        project = make_project(project_folder.mktemp("leads"))
        super().__init__(project, stage_servers, network.url("broker"), network.url("database"), provider)
        self.environment["ROWMILL_SHARD_GRACE"] = str(GRACE / SCALE)
        self.services = ServiceSet(self.environment, project / "logs")
        self.nodes = stage_servers
        self.network = network
        self.broker_url = stage_servers.broker.url
        self.database_url = stage_servers.database.url

    def freeze(self, service: str) -> None:
        self.services[service].signal(signal.SIGSTOP)

    def resume(self, service: str) -> None:
        self.services[service].signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def _provider() -> Iterator[ProviderProcess]:
    with ProviderProcess() as running:
        yield running


@pytest.fixture(scope="module")
def _harmed(_module_pair: PrivateServers, _provider: ProviderProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    _module_pair.start()
    with Network(_module_pair) as network:
        stage = Harmed(_module_pair, network, _provider, tmp_path_factory)
        try:
            asyncio.run(stage.start_services())
            yield stage
        finally:
            stage.services.stop()


@pytest.fixture
def system(_harmed: Harmed, own_servers: PrivateServers) -> Iterator[Harmed]:
    """Five services, a provider that has counted nothing, and servers and a network that are well."""
    assert own_servers is _harmed.nodes
    _harmed.provider.control(latency_ms=30, rate_limit=None, fail_rate=0, drop_rate=0, honour_keys=True, hold=False)
    _harmed.provider.reset()
    with registry.isolated():
        yield _harmed
    _harmed.network.heal()
    for module in ("plays", "more_plays"):
        sys.modules.pop(module, None)
    while str(_harmed.project) in sys.path:
        sys.path.remove(str(_harmed.project))


@pytest.fixture
async def client(system: Harmed) -> AsyncIterator[Client]:
    async with system.connected() as connected:
        yield connected
