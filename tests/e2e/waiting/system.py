"""The five services over a project of a test's own, such as one whose rows wait, and its plays loaded here."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.stage import BOUND, FULL_SIZE, SCALE

from rowmill import registry
from rowmill.dev.services import ServiceSet
from rowmill.dev.working_set import missing_services
from rowmill.plays import Play
from rowmill.project import Project


class WaitingSystem:
    """``async with WaitingSystem(folder, …) as system``; ``settings``: in real seconds and numbers of rows, as services read them.

    ``source``: the project's folder, ``module``: its plays.
    """

    source = Path(__file__).parent / "project"
    module = "waiting_plays"

    def __init__(self, folder: Path, broker_url: str, database_url: str, settings: Mapping[str, str]) -> None:
        self._project = folder / "project"
        shutil.copytree(self.source, self._project)
        self._broker_url = broker_url
        environment = {
            "ROWMILL_BROKER_URL": broker_url,
            "ROWMILL_DATABASE_URL": database_url,
            "ROWMILL_PROJECT": str(self._project),
            "ROWMILL_TIME_SCALE": str(SCALE),
            **FULL_SIZE,
            **settings,
        }
        self.environment = environment
        self.services = ServiceSet(environment, folder / "logs")
        self._registry = registry.isolated()

    async def __aenter__(self) -> Self:
        try:
            self.services.start(keep_alive=False)
            async with asyncio.timeout(BOUND):
                while await missing_services(self._broker_url):
                    await asyncio.sleep(0.1)
            self._registry.__enter__()
            Project.find(self._project).load()
        except BaseException:
            self.services.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._registry.__exit__(kind, error, trace)
        sys.modules.pop(self.module, None)
        if str(self._project) in sys.path:
            sys.path.remove(str(self._project))
        await asyncio.to_thread(self.services.stop)

    def memory(self) -> dict[str, int]:
        """Megabytes that executors and gateways have in memory."""
        found = {}
        for name in ("row-executor", "tool-gateway"):
            status = Path(f"/proc/{self.services[name].pid}/status").read_text(encoding="utf-8")
            found[name] = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1024  # type: ignore[index] # every process has it
        return found

    def play(self, name: str) -> Play[Any, Any]:
        return registry.play_named(name)
