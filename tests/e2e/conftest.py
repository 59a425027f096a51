"""Whole systems for the tests here: see `stage`. Services and provider run for a module; each test has empty books and its own client."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.e2e.stage import ProviderProcess, Stage, make_project

from rowmill import registry
from rowmill.client import Client
from rowmill.dev import ServerSet


@pytest.fixture(scope="module")
def _provider() -> Iterator[ProviderProcess]:
    with ProviderProcess() as running:
        yield running


@pytest.fixture(scope="module")
def _stage(
    servers: ServerSet, broker_url: str, database_url: str, _provider: ProviderProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    stage = Stage(make_project(tmp_path_factory.mktemp("leads")), servers, broker_url, database_url, _provider)
    try:
        asyncio.run(stage.start_services())
        yield stage
    finally:
        stage.services.stop()


@pytest.fixture
def system(_stage: Stage) -> Iterator[Stage]:
    """Five services that run, and a provider that answers at once, misbehaves nowhere and has counted nothing."""
    _stage.provider.control(latency_ms=0, rate_limit=None, fail_rate=0, drop_rate=0, honour_keys=True, hold=False)
    _stage.provider.reset()
    with registry.isolated():
        yield _stage
    for module in ("plays", "more_plays"):
        sys.modules.pop(module, None)
    while str(_stage.project) in sys.path:
        sys.path.remove(str(_stage.project))


@pytest.fixture
async def client(system: Stage) -> AsyncIterator[Client]:
    async with system.connected() as connected:
        yield connected


@pytest.fixture
def word() -> str:
    """A word for domains that no other test asks about."""
    return uuid.uuid4().hex[:8]
