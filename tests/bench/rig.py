"""What a measurement stands on: private servers, the five services and the provider as processes of their own, and their books.

Nothing here reaches inside a service: times are taken at the client, CPU and memory from the operating system, commits from
`pg_stat_database`, messages from the broker's global counters.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncpg
import psutil

from rowmill.dev import private_servers
from rowmill.dev.services import ServiceSet
from rowmill.dev.working_set import missing_services

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "project"), str(HERE.parents[1] / "examples" / "leads")]

from provider import ProviderProcess  # noqa: E402 - the example's folder is put on the path above

START_SECONDS = 60.0
SAMPLE_SECONDS = 0.2
STATISTICS_SECONDS = 1.3
"""Postgres sessions report their commits at most once a second."""


@dataclass
class Usage:
    """What one stretch of work used. ``cpu`` in seconds by process; ``peak_mb`` of our processes (services and client) together."""

    seconds: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)
    peak_mb: float = 0.0
    peak_mb_of: dict[str, float] = field(default_factory=dict)
    commits: int = 0
    messages: int = 0
    provider: dict[str, Any] = field(default_factory=dict)


class Rig:
    """Start with ``with Rig(latency_ms=0) as rig``; everything is stopped and deleted at the end."""

    def __init__(self, *, copies: dict[str, int] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rowmill-bench-", dir="/tmp"))
        self.servers = private_servers(self.folder / "servers")
        self.provider = ProviderProcess()
        self.copies = copies
        self.services: ServiceSet | None = None

    def __enter__(self) -> Self:
        self.folder.chmod(0o711)
        try:
            self.provider.__enter__()
            self.servers.start()
            self.services = ServiceSet(self.environment(), self.folder / "logs", copies=self.copies)
            self.services.start()
            asyncio.run(self._all_consume())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.services is not None:
            self.services.stop()
        self.provider.__exit__(None, None, None)
        self.servers.delete()
        if os.environ.get("ROWMILL_BENCH_KEEP_LOGS"):
            print(f"logs: {self.folder / 'logs'}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def broker_url(self) -> str:
        return self.servers.broker.url

    @property
    def database_url(self) -> str:
        return self.servers.database.url

    def environment(self) -> dict[str, str]:
        """What the services see."""
        return {
            "ROWMILL_BROKER_URL": self.broker_url,
            "ROWMILL_DATABASE_URL": self.database_url,
            "ROWMILL_PROJECT": str(HERE / "project"),
            "ROWMILL_PROVIDERS__BENCH__BASE_URL": self.provider.url,
            "ROWMILL_PROVIDERS__PACED__BASE_URL": self.provider.url,
            "ROWMILL_LOG_LEVEL": "WARNING",
        }

    async def _all_consume(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            while await missing_services(self.broker_url):
                assert self.services is not None
                self.services.raise_if_broken()
                await asyncio.sleep(0.2)

    # ---- books ------------------------------------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Every process that takes part, by part."""
        assert self.services is not None
        found: dict[str, list[psutil.Process]] = {"client": [psutil.Process()]}
        for service in self.services.processes:
            if service.pid is not None:
                found.setdefault(service.name, []).append(psutil.Process(service.pid))
        provider = self.provider._process
        assert provider is not None
        found["provider"] = [psutil.Process(provider.pid)]
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if words and str(self.folder) in " ".join(words):
                if "beam.smp" in words[0]:
                    found["broker"] = [process]
                elif words[0].endswith("postgres"):
                    found["postgres"] = [process, *process.children()]
        return found

    async def commits(self) -> int:
        connection = await asyncpg.connect(self.database_url)
        try:
            commits: int = await connection.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        finally:
            await connection.close()
        return commits

    def messages(self) -> int:
        """Messages that the broker has received since it started."""
        said = self.servers.broker.control("eval", "rabbit_global_counters:overview().")
        return sum(int(number) for number in re.findall(r"messages_received_total\s*=>\s*(\d+)", said))


OURS = ("client", "admission", "row-executor", "tool-gateway", "receipt-store", "sheet-writer")


class Measurement:
    """``async with Measurement(rig) as used`` around the work; ``used`` is filled in at its end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.usage = Usage()

    async def __aenter__(self) -> Usage:
        await asyncio.sleep(STATISTICS_SECONDS)
        self._commits = await self.rig.commits()
        self._messages = await asyncio.to_thread(self.rig.messages)
        self.rig.provider.reset()
        self._processes = self.rig.processes()
        self._cpu = self._cpu_now()
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        self._started = time.perf_counter()
        return self.usage

    async def __aexit__(self, *_: object) -> None:
        self.usage.seconds = time.perf_counter() - self._started
        now = self._cpu_now()
        self.usage.cpu = {name: now[name] - self._cpu[name] for name in now}
        self._over.set()
        await asyncio.to_thread(self._sampler.join)
        self.usage.provider = self.rig.provider.stats(brief=True)
        await asyncio.sleep(STATISTICS_SECONDS)
        self.usage.commits = await self.rig.commits() - self._commits
        self.usage.messages = await asyncio.to_thread(self.rig.messages) - self._messages

    def _cpu_now(self) -> dict[str, float]:
        def used(process: psutil.Process) -> float:
            try:
                times = process.cpu_times()
            except psutil.Error:  # a server's session that is over by now
                return 0.0
            return float(times.user + times.system)

        return {name: sum(used(process) for process in processes) for name, processes in self._processes.items()}

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            now = {name: sum(process.memory_info().rss for process in self._processes[name]) / 1e6 for name in OURS}
            for name, size in now.items():
                self.usage.peak_mb_of[name] = max(size, self.usage.peak_mb_of.get(name, 0.0))
            self.usage.peak_mb = max(self.usage.peak_mb, sum(now.values()))
