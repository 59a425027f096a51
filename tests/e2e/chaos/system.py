"""Two gateways, two executors and one of each other service on a project of three tools; what an operator types; rows and findings of a run."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import asyncpg
from tests.e2e.chaos.provider import ChaosProvider
from tests.e2e.stage import BOUND
from typer.testing import CliRunner

from rowmill.cli.main import app
from rowmill.client import Client, Job
from rowmill.client.reading import SheetReader
from rowmill.dev.services import ServiceSet
from rowmill.dev.working_set import missing_services
from rowmill.doctor.health import Control, look
from rowmill_contracts.rows import ReadRow
from rowmill_contracts.run_questions import RunSummary

SCALE = 0.2
FULL_SIZE = {"ROWMILL_PAGE_GATHER": str(0.005 / SCALE), "ROWMILL_CLAIM_AHEAD": str(0.1 / SCALE), "ROWMILL_HAND": str(2.5 / SCALE)}
"""Durations that are about throughput, not about waiting."""

STANDING = (
    "SELECT tool, state, holder, count(*) AS receipts, max(expires_at) - now() AS lease FROM receipts.receipts GROUP BY tool, state, holder",
    "SELECT shard, term, holder, expires_at - now() AS lease, ended_term FROM receipts.shards WHERE term > 0",
    "SELECT state, reason, count(*) AS waits, min(due_at) - now() AS due FROM admission.waits GROUP BY state, reason",
)

COPIES = {"tool-gateway": 2, "row-executor": 2}


class ChaosSystem:
    """``control``: as the doctor wants it."""

    def __init__(self, folder: Path, broker_url: str, database_url: str, control: Control | None, provider: ChaosProvider) -> None:
        self.project = folder / "project"
        shutil.copytree(Path(__file__).parent / "project", self.project)
        self.broker_url = broker_url
        self.database_url = database_url
        self.provider = provider
        self._control = control
        self.environment = {
            "ROWMILL_BROKER_URL": broker_url,
            "ROWMILL_DATABASE_URL": database_url,
            "ROWMILL_PROJECT": str(self.project),
            "ROWMILL_TIME_SCALE": str(SCALE),
            **FULL_SIZE,
            "ROWMILL_PAGE_ROWS": "50",
            "ROWMILL_LOG_FORMAT": "json",
            **{f"ROWMILL_PROVIDERS__{name}__BASE_URL": provider.url for name in ("LOOKING", "GRADING", "ORDERING")},
        }
        self.services = ServiceSet(self.environment, folder / "logs", copies=COPIES)

    async def start(self) -> None:
        self.services.start(keep_alive=False)
        async with asyncio.timeout(BOUND):
            while await missing_services(self.broker_url):
                await asyncio.sleep(0.1)

    def rowmill(self, *arguments: str, status: int | None = 0) -> str:
        """What a person would type in the project's folder (which must be the current one), and what it says. ``status`` None: any."""
        result = CliRunner().invoke(app, arguments, env=self.environment)
        assert status in {None, result.exit_code}, f"{arguments}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result.stdout

    def asked(self, *arguments: str) -> Any:
        return json.loads(self.rowmill(*arguments, "--json"))

    async def ended(self, job: Job, *, within: float) -> RunSummary:
        try:
            async with asyncio.timeout(within):
                return await job.wait()
        except TimeoutError:
            health = await look(self.broker_url, self.database_url, self._control)
            left = [queue for queue in health.queues if queue.ready or queue.unacknowledged or queue.suspects or queue.dead]
            raise AssertionError(f"the run is stuck: {await job.status()}\n{left}\n{health.findings}\n{await self._standing()}") from None

    async def _standing(self) -> str:
        """How receipts, shards and waits stand, for whoever has to find out why a run does not end."""
        connection = await asyncpg.connect(self.database_url)
        try:
            return "\n".join([str(dict(row)) for question in STANDING for row in await connection.fetch(question)])
        finally:
            await connection.close()

    async def rows(self, client: Client, job: Job) -> list[ReadRow]:
        return [row async for row in SheetReader(client.bus).rows(job.run_id, "items")]

    async def quiet(self) -> None:
        """Return when no message is left anywhere, nor held by anybody."""
        async with asyncio.timeout(BOUND):
            while (await look(self.broker_url, self.database_url, self._control)).queued:
                await asyncio.sleep(0.1)
