"""A whole system to act on: five services as processes, the example's provider, a client; and the audit that every run must pass."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import msgspec

from rowmill import registry
from rowmill.client import Client, Job
from rowmill.client.reading import SheetReader
from rowmill.dev import ServerSet
from rowmill.dev.rabbitmq import PrivateRabbitMQ
from rowmill.dev.services import ServiceSet
from rowmill.dev.working_set import missing_services
from rowmill.doctor.auditing import audit, charged_by
from rowmill.doctor.health import look
from rowmill.doctor.run_checks import charges
from rowmill.encoding.exports import export_value
from rowmill.errors import UnavailableError
from rowmill.plays import Play
from rowmill.project import Project
from rowmill.runtime.bus import Bus
from rowmill.runtime.hosting import SERVICES
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.counts import Counts
from rowmill_contracts.rows import ReadRow
from rowmill_contracts.run_questions import RunSummary
from rowmill_contracts.topology import ADMISSION_DEAD, DELAYS, RECEIPTS_SETTLE, WORK_QUEUES, dead, delay_queue, suspect

EXAMPLE = Path(__file__).parents[2] / "examples" / "leads"
sys.path.insert(0, str(EXAMPLE))

from provider import ProviderProcess as ProviderProcess  # noqa: E402, PLC0414 - found through the path above; tests import it from here
from provider import apollo_answer, crm_score, hunter_answer  # noqa: E402

SCALE = 0.05
BOUND = 120.0
"""Seconds within which anything that is waited for must have happened; far over what it takes."""

FULL_SIZE = {"ROWMILL_PAGE_GATHER": str(0.005 / SCALE), "ROWMILL_CLAIM_AHEAD": str(0.1 / SCALE), "ROWMILL_HAND": str(2.5 / SCALE)}
"""Durations that are about throughput, not about waiting: at a twentieth, calls that a slow machine keeps waiting would be parked all the time."""

LOOKS = {"ROWMILL_WATCH_INTERVAL": "20", "ROWMILL_FEEDER_LOOK": "5", "ROWMILL_WAIT_POLL": "1"}
"""How often services look whether anything is wrong or due: at a twentieth, five idle ones and their servers took a third of a processor."""

PROJECT_FILE = """
plays = ["plays", "more_plays"]
tools = ["plays"]

[providers.hunter]
rate = "1000/s"
concurrency = 4

[providers.apollo]
rate = "1000/s"
concurrency = 16

[providers.crm]
rate = "1000/s"
concurrency = 4
"""

MORE_PLAYS = """
from pathlib import Path
from pydantic import BaseModel
from rowmill import Context, Provider, Rows, ToolCall, play

class Domains(BaseModel):
    rows: Rows

@play("misspelt", description="Asks for a tool that there is not")
async def misspelt(ctx: Context, input: Domains) -> None:
    await ctx.dataset("misspelt", input.rows).with_column("email", lambda row, ctx: ctx.call("hunter.fnid", {})).run(key="domain")

class Word(BaseModel):
    word: str

books = Provider("books", base_url="https://books.example", concurrency=20)

def sharing(cache):
    @books.tool(cache, effect="read", cache=cache)
    async def ask(given: Word, call: ToolCall) -> str:
        with Path(__file__).with_name("asked").open("a") as asked:
            asked.write(cache + chr(10))
        return given.word
    return ask

tools = [sharing(cache) for cache in ("org", "play", "run", "none")]

class Words(BaseModel):
    rows: Rows

async def shared(row, ctx):
    return [(await ctx.call(tool, Word(word=row["word"]))).raw for tool in tools]

@play("sharing", description="Equal calls of tools that share their results with whom they say")
async def sharing_play(ctx: Context, input: Words) -> None:
    await ctx.dataset("shared", input.rows).with_column("found", shared).run(key="name")

@play("sharing_too", description="The same calls in another play")
async def sharing_too(ctx: Context, input: Words) -> None:
    await ctx.dataset("shared", input.rows).with_column("found", shared).run(key="name")
"""


def make_project(folder: Path) -> Path:
    """A project with the example's play, whose providers allow as much as tests need. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLE / "plays.py", folder)
    (folder / "more_plays.py").write_text(MORE_PLAYS)
    (folder / "rowmill.toml").write_text(PROJECT_FILE)
    return folder


def provider_environment(url: str) -> dict[str, str]:
    """What points the example's providers at ``url``."""
    places = {f"ROWMILL_PROVIDERS__{name}__BASE_URL": url for name in ("HUNTER", "APOLLO", "CRM")}
    return {"HUNTER_KEY": "demo", "APOLLO_KEY": "demo", **places}


def leads(count: int, word: str) -> list[dict[str, str]]:
    """``count`` leads that no other ``word`` has, so that nothing about them is known from other runs."""
    return [{"domain": f"{word}-{number:05d}.example", "name": f"Näme {number}"} for number in range(count)]


def write_csv(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))


def hunter_email(domain: str) -> str | None:
    answer = hunter_answer(domain)
    nested = answer.get("data", {}).get("emails", [])
    found: str | None = answer.get("email") or (nested[0]["value"] if nested else None)
    return found


def contact_of(domain: str) -> str | None:
    """The contact that the example's play finds for a domain."""
    return hunter_email(domain) or apollo_answer(domain)["email"]


def score_of(domain: str) -> int | None:
    return crm_score(domain) if contact_of(domain) is not None else None


class Books(msgspec.Struct, frozen=True):
    """What a provider is asked for some domains: items by provider, each once."""

    hunter: int
    apollo: int
    crm: int

    @classmethod
    def of(cls, domains: Iterable[str]) -> Books:
        """What the example's play must ask."""
        distinct = set(domains)
        return cls(
            len(distinct), sum(hunter_email(domain) is None for domain in distinct), sum(contact_of(domain) is not None for domain in distinct)
        )

    @classmethod
    def told(cls, stats: dict[str, Any]) -> Books:
        """What the provider says that it was asked."""
        items = Counter(stats["items"])
        return cls(items["/v2/find"] + items["/v2/bulk"], items["/match"], items["/score"])

    @property
    def total(self) -> int:
        return self.hunter + self.apollo + self.crm

    @property
    def reads(self) -> int:
        return self.hunter + self.apollo


class Stage:
    """The services (started and ended as real processes), the provider, and a client when entered."""

    def __init__(self, project: Path, servers: ServerSet, broker_url: str, database_url: str, provider: ProviderProcess) -> None:
        self.project = project
        self.broker_url = broker_url
        self.database_url = database_url
        self.provider = provider
        self.environment = {
            "ROWMILL_BROKER_URL": broker_url,
            "ROWMILL_DATABASE_URL": database_url,
            "ROWMILL_PROJECT": str(project),
            "ROWMILL_TIME_SCALE": str(SCALE),
            **FULL_SIZE,
            **LOOKS,
            **provider_environment(provider.url),
        }
        self.services = ServiceSet(self.environment, project / "logs")
        self._servers = servers

    # ---- processes --------------------------------------------------------------------------------------------------------------------

    async def start_services(self) -> None:
        """Start all five and return when each consumes."""
        self.services.start(keep_alive=False)
        await self.consuming()

    async def consuming(self) -> None:
        missing: list[str] = []
        try:
            async with asyncio.timeout(BOUND):
                while missing := await self._missing():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            words = "\n".join(f"{process.name} {process.exit_status}: {process.last_words()}" for process in self.services.processes)
            raise AssertionError(f"services do not consume: {missing}\n{words}") from None

    async def _missing(self) -> list[str]:
        try:
            return list(await missing_services(self.broker_url))
        except UnavailableError:  # a busy machine's broker takes more than a question's patience to come up
            return ["broker"]

    def kill9(self, service: str) -> None:
        """End it without a word; returns when it is gone."""
        process = self.services[service]
        assert process.pid is not None, f"{service} had stopped by itself: {process.last_words()}"
        process.signal(signal.SIGKILL)
        process.wait(10)

    def restart(self, service: str) -> None:
        self.services[service].start()

    def all_run(self) -> bool:
        return all(self.services[name].pid is not None for name in SERVICES)

    def rowmill(self, *arguments: str, folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """A `rowmill` command as a person would type it in the project's folder; ``more`` environment wins."""
        return subprocess.run(
            [sys.executable, "-m", "rowmill", *arguments],
            cwd=folder or self.project,
            env={**os.environ, **self.environment, **more},
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )

    # ---- runs -------------------------------------------------------------------------------------------------------------------------

    def play(self, name: str = "leads") -> Play[Any, Any]:
        """A play of the project, loaded into this process (under its isolated registry)."""
        project = Project.find(self.project)
        project.load()
        return registry.play_named(name)

    def connected(self) -> Client:
        return Client(self.broker_url)

    # ---- audit ------------------------------------------------------------------------------------------------------------------------

    async def audit(self, client: Client, job: Job, rows: Sequence[dict[str, str]]) -> RunSummary:
        """Assert what must hold of every run of the example's play over ``rows``, whatever happened meanwhile.

        Each row is there once, in input order, with the cells that the provider gives; the counts add up; nothing is left on the broker; the doctor
        finds nothing wrong with its books, however short it has lasted: no lease without a holder, nothing owed, nothing that waits for nothing.
        """
        summary = await job.status()
        assert summary is not None
        assert summary.state == "completed", summary.error
        await self.quiet()
        summary = await self.charged(job)
        await self.well(job)
        read = [row async for row in SheetReader(client.bus).rows(job.run_id, "leads")]
        assert_rows(read, rows)
        assert_counts(summary.counts, len(rows))
        assert summary.counts.duplicates == len(rows) - len({row["domain"] for row in rows})
        return summary

    async def charged(self, job: Job) -> RunSummary:
        """The run, once it is shown to cost what its charges add up to: what is found out late of a call changes both."""
        connection = await asyncpg.connect(self.database_url)
        shown = books = None
        try:
            async with asyncio.timeout(BOUND / 4):
                while True:
                    summary = await job.status()
                    assert summary is not None
                    shown, books = summary.counts, await charged_by(connection, job.run_id)
                    assert charges(books) == []
                    if summary.charges_known and (shown.cost, shown.calls) == (books.told, books.calls):
                        return summary
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"shown as {shown}, charged {books}") from None
        finally:
            await connection.close()

    async def well(self, job: Job) -> None:
        """Return when the doctor finds nothing wrong with the run's books; what services repair at their next look may be wrong for a while."""
        findings: list[Any] = []
        try:
            async with asyncio.timeout(BOUND / 4):
                while findings := [*(await audit(self.database_url, job.run_id, queued=0, patience=0)).findings, *await self._in_hand()]:
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"the doctor finds {findings}") from None

    async def _in_hand(self) -> list[Any]:
        """What is in hand for too long, or kept there for an outage."""
        return [finding for finding in (await look(self.broker_url, self.database_url)).findings if finding.check in {"in hand", "outage"}]

    async def quiet(self) -> None:
        """Return when every queue of work, of suspects, of the delayed and of the buried is empty and nothing is unacknowledged; fails if that does
        not happen, or if a letter is dead.
        """
        names = [name for queue in WORK_QUEUES for name in (queue.name, suspect(queue.name))] + [ADMISSION_DEAD]
        names += [delay_queue(name, max(1, int(ttl * SCALE))).name for name, ttl in DELAYS.items()]
        letters = [dead(queue.name) for queue in WORK_QUEUES]
        async with Bus(ServiceSettings(broker_url=self.broker_url, time_scale=SCALE), service="audit") as bus:
            left: dict[str, Any] = {}
            quiet, stored = 0, False
            try:
                async with asyncio.timeout(BOUND / 2):
                    while quiet < 2 or not stored:  # one look passes over queues one after the other, and may miss what moves on meanwhile
                        left = {name: ready for name, (ready, _) in (await bus.depths(names)).items() if ready} or await self._unacknowledged()
                        quiet = 0 if left.keys() - {RECEIPTS_SETTLE} else quiet + 1
                        stored = quiet > 0 and (stored or not left)  # gateways go on renewing their lanes there: it is empty now and again
                        await asyncio.sleep(0.2)
            except TimeoutError:
                raise AssertionError(f"messages are left after the run: {left}") from None
            died = {name: ready for name, (ready, _) in (await bus.depths(letters)).items() if ready}
            assert not died, f"dead letters: {died}"

    async def _unacknowledged(self) -> dict[str, int]:
        broker = self._servers.broker
        if not isinstance(broker, PrivateRabbitMQ):
            return {}  # a broker that is not ours: its clients cannot ask it
        vhost = unquote(urlsplit(self.broker_url).path.removeprefix("/")) or "/"
        held = await asyncio.to_thread(broker.unacknowledged, vhost)
        return {name: number for name, number in held.items() if number and not name.startswith(("replies.", "listen."))}


def assert_rows(read: Sequence[ReadRow], rows: Sequence[dict[str, str]]) -> None:
    """Each input row exactly once, in input order, worked, with the provider's cells."""
    assert [row.index for row in read] == list(range(len(rows)))
    for found, given in zip(read, rows, strict=True):
        cells = {name: export_value(value) for name, value in msgspec.json.decode(found.data).items()}
        domain = given["domain"]
        assert {name: cells.get(name) for name in given} == given
        assert found.mark in {"completed", "reused", "duplicate"}, f"row {found.index} is {found.mark}: {found.error}"
        assert cells.get("contact") == contact_of(domain), f"row {found.index}: {cells}"
        assert cells.get("score") == score_of(domain), f"row {found.index}: {cells}"


def assert_counts(counts: Counts, rows: int) -> None:
    assert counts.admitted == rows
    assert counts.terminal == counts.admitted, counts
    assert counts.cost >= Decimal(0)
