"""Servers and services for one command: those that run already, else a private set for as long as the command needs it.

Commands of one project share a private set: each holds a shared lock while it works, and who started the set stops it only once nobody else
holds the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rowmill.dev.nodes import ServerSet
from rowmill.dev.servers import FOLDER_NAME, Servers
from rowmill.dev.services import ServiceSet
from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.hosting import SERVICES
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.topology import ADMISSION_ASKS, EXECUTOR_ROWS, RECEIPTS_CLAIMS, SHEETS_ASKS, gateway_calls

Report = Callable[[str], None]

SIGNS = {
    "admission": ADMISSION_ASKS,
    "row-executor": EXECUTOR_ROWS,
    "tool-gateway": gateway_calls(0),
    "receipt-store": RECEIPTS_CLAIMS,
    "sheet-writer": SHEETS_ASKS,
}
"""A queue per service: who consumes it runs."""

START_SECONDS = 60.0

STARTING_SECONDS = 30.0
"""How long services that somebody else starts may lag behind the first of them."""

ANSWER_SECONDS = 10.0
"""How long a broker may take to answer who consumes."""


@dataclass(frozen=True)
class WorkingSet:
    """Where the servers are. ``private``: services were started for this command."""

    broker_url: str
    database_url: str
    private: bool


@contextmanager
def working_set(project: Path, *, broker_url: str | None, database_url: str | None, report: Report) -> Iterator[WorkingSet]:
    """Servers that answer and services that consume, for the length of a ``with`` block.

    Raises:
        ServersUnavailable: no server could be found or started; the message says what was tried. UnavailableError: a service does not start.

    """
    servers = Servers(project, broker_url=broker_url, database_url=database_url)
    with _shared_use(project, report) as last_one:
        were_running = all(state["running"] for state in servers.status().values())
        nodes = servers.ensure(report=report)
        try:
            with _services(project, nodes, report, last_one) as private:
                yield WorkingSet(nodes.broker.url, nodes.database.url, private)
        finally:
            if not were_running:
                last_one()
                servers.stop()


@contextmanager
def _services(project: Path, nodes: ServerSet, report: Report, last_one: Callable[[], None]) -> Iterator[bool]:
    missing = asyncio.run(missing_services(nodes.broker.url))
    if missing and len(missing) < len(SERVICES):
        report(f"waiting for services that may still be starting: {', '.join(missing)}")
        missing = asyncio.run(missing_services(nodes.broker.url, patience=STARTING_SECONDS))
    if not missing:
        yield False
        return
    if len(missing) < len(SERVICES):
        raise UnavailableError(
            f"some services run on this broker and others do not; missing: {', '.join(missing)}. Start them with `rowmill serve {' '.join(missing)}`"
        )
    report("no services run here, so a private set is started for this command (`rowmill up` keeps one running)")
    environment = {
        "ROWMILL_BROKER_URL": nodes.broker.url,
        "ROWMILL_DATABASE_URL": nodes.database.url,
        "ROWMILL_PROJECT": str(project),
    }
    services = ServiceSet(environment, project / FOLDER_NAME / "logs")
    services.start()
    try:
        asyncio.run(_started(nodes.broker.url, services))
        yield True
    finally:
        last_one()
        services.stop()


async def missing_services(broker_url: str, *, of: Collection[str] = SERVICES, patience: float = 0.0) -> list[str]:
    """Those of the services that nobody runs on that broker, after ``patience`` seconds in which they may start.

    Raises:
        UnavailableError: the broker does not answer.

    """
    bus = Bus(ServiceSettings(broker_url=broker_url), service="look")
    await bus.start(wait=ANSWER_SECONDS)
    try:
        deadline = time.monotonic() + patience
        while True:
            missing = await _missing(bus, of)
            if not missing or time.monotonic() >= deadline:
                return missing
            await asyncio.sleep(0.1)
    finally:
        await bus.stop()


async def _missing(bus: Bus, of: Collection[str] = SERVICES) -> list[str]:
    depths = await bus.depths([SIGNS[name] for name in of])
    return [name for name in of if depths[SIGNS[name]][1] == 0]


async def _started(broker_url: str, services: ServiceSet) -> None:
    async with Bus(ServiceSettings(broker_url=broker_url), service="look") as bus:
        deadline = time.monotonic() + START_SECONDS
        while missing := await _missing(bus):
            services.raise_if_broken()
            if time.monotonic() > deadline:
                words = "\n".join(services[name].last_words() for name in missing)
                raise UnavailableError(f"{', '.join(missing)} did not start within {START_SECONDS:g} s; the end of the log:\n{words}")
            await asyncio.sleep(0.05)


@contextmanager
def _shared_use(project: Path, report: Report) -> Iterator[Callable[[], None]]:
    """Hold the project's set together with others; the function given waits until nobody else does."""
    folder = project / FOLDER_NAME
    folder.mkdir(mode=0o711, exist_ok=True)
    descriptor = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)

        def last_one() -> None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("another rowmill command uses this private set; waiting until it is done")
                fcntl.flock(descriptor, fcntl.LOCK_EX)

        yield last_one
    finally:
        os.close(descriptor)
