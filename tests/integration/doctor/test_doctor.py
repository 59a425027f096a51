"""The doctor on a real system: a run that went well passes, and each kind of corruption is found by what it is."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aio_pika
import asyncpg
import msgspec
import pytest
from tests.e2e.stage import BOUND, ProviderProcess, Stage, leads, make_project

from rowmill.client import Client
from rowmill.dev import ServerSet
from rowmill.doctor import in_hand
from rowmill.doctor.auditing import Audit, audit_over
from rowmill.doctor.findings import Finding
from rowmill.doctor.health import look
from rowmill.errors import UsageError
from rowmill.runtime.bus import Bus
from rowmill.runtime.hosting import SERVICES
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import encode
from rowmill_contracts.runs import AdvanceRun, RunStart
from rowmill_contracts.topology import EXECUTOR_ADVANCE, EXECUTOR_KEYS, RUNS_START, WORK_QUEUES, dead, suspect

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

RUN = "audited"
PAGE = 200
ROWS = 450
"""Three pages, with two duplicates at the end."""


@pytest.fixture(scope="module")
def stage(servers: ServerSet, broker_url: str, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A system in which one run was completed."""
    with ProviderProcess() as provider, pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWMILL_PAGE_ROWS", str(PAGE))
        stage = Stage(make_project(tmp_path_factory.mktemp("leads")), servers, broker_url, database_url, provider)
        provider.control(latency_ms=0)
        try:
            asyncio.run(_run(stage))
            yield stage
        finally:
            stage.services.stop()


async def _run(stage: Stage) -> None:
    await stage.start_services()
    rows = leads(ROWS - 2, "audited")
    texts = [msgspec.Raw(msgspec.json.encode(row)) for row in (*rows, rows[0], rows[7])]
    async with Client(stage.broker_url) as client:
        await client.bus.publish(RunStart(run_id=RUN, play="leads", rows=texts), RUNS_START)
        async with asyncio.timeout(BOUND):
            assert (await (await client.job(RUN)).wait()).state == "completed"
    await stage.quiet()


@dataclass
class Books:
    """The tables, in a transaction that is rolled back."""

    connection: asyncpg.Connection

    async def audit(self, *, patience: float = 1.0, queued: int | None = 0) -> Audit:
        return await audit_over(self.connection, RUN, queued=queued, patience=patience)

    async def charged(self) -> Any:
        return await self.connection.fetchval("SELECT sum(coalesce(spent, reserved)) FROM receipts.charges WHERE run_id = $1", RUN)

    async def after(self, sql: str, *arguments: Any) -> list[Finding]:
        """What is found after that statement."""
        await self.connection.execute(sql, *arguments)
        return (await self.audit()).findings


@pytest.fixture
async def books(stage: Stage) -> AsyncIterator[Books]:
    connection = await asyncpg.connect(stage.database_url)
    transaction = connection.transaction()
    await transaction.start()
    yield Books(connection)
    await transaction.rollback()
    await connection.close()


async def test_the_books_of_a_run_that_went_well_are_right(books: Books) -> None:
    found = await books.audit(patience=0.0)
    assert found.findings == []
    assert (found.state, found.rows, found.unknown) == ("completed", ROWS, 0)
    counts = found.counts["leads"]
    assert (counts.admitted, counts.completed, counts.duplicates) == (ROWS, ROWS - 2, 2)
    assert (found.cost, found.calls) == (await books.charged(), found.counts["leads"].calls)
    with pytest.raises(UsageError, match="no run 'nobody'"):
        await audit_over(books.connection, "nobody", queued=0, patience=0)


OPEN_AGAIN = "UPDATE admission.datasets SET state = 'open', counted_at = now() - interval '1 hour'"
UNFINISHED = (
    "UPDATE admission.runs SET state = '{}', finished_at = NULL, changed_at = now() - interval '1 hour', advanced_at = now() - interval '1 hour'"
)
RECEIPT = """UPDATE receipts.receipts SET state = '{}', expires_at = now() - interval '1 hour'
WHERE key = (SELECT key FROM receipts.receipts ORDER BY key LIMIT 1)"""

CORRUPTIONS = {
    "a page is gone": ("DELETE FROM sheets.pages WHERE page = 1", "rows", "pages are missing from the record (1: pages 1 to 1)"),
    "rows between pages are gone": ("UPDATE sheets.pages SET first_index = first_index + 3 WHERE page = 2", "rows", "begins with row 403, not 400"),
    "a row is there twice": (
        "UPDATE sheets.pages SET row_keys = substring(row_keys FOR 32) || substring(row_keys FOR 32) || substring(row_keys FROM 65) WHERE page = 0",
        "rows",
        "rows are there twice (1: row 1)",
    ),
    "a duplicate has no twin": ("UPDATE sheets.pages SET marks = 'd' || substring(marks FROM 2) WHERE page = 1", "rows", "duplicates of nothing"),
    "a mark is none": ("UPDATE sheets.pages SET marks = 'z' || substring(marks FROM 2) WHERE page = 1", "rows", "row 200: 'z'"),
    "a page has fewer marks than rows": ("UPDATE sheets.pages SET marks = substring(marks FROM 2) WHERE page = 0", "rows", "marks, keys and count"),
    "a row is not in the sheet": (
        "DELETE FROM sheets.sheet_rows r USING sheets.pages p WHERE p.page = 0 AND r.row_key = substring(p.row_keys FOR 32)",
        "rows",
        "have ended and are not in the sheet",
    ),
    "a row ended otherwise": (
        "UPDATE sheets.sheet_rows r SET status = 'failed' FROM sheets.pages p WHERE p.page = 0 AND r.row_key = substring(p.row_keys FOR 32)",
        "rows",
        "row 0: marked 'c', in the sheet 'failed'",
    ),
    "counts are not the marks'": ("UPDATE sheets.dataset_counts SET failed = failed + 1", "counts", "failed 1, not 0"),
    "a cost is not the marks'": ("UPDATE sheets.dataset_counts SET cost = cost + 1", "counts", "do not add up to its counts: cost"),
    "counts are gone": ("DELETE FROM sheets.dataset_counts", "counts", "do not add up to its counts: nothing"),
    "admission counts otherwise": ("UPDATE admission.datasets SET completed = completed - 1", "counts", "count otherwise: completed 447, not 448"),
    "a row was admitted and never ended": ("UPDATE admission.datasets SET admitted = admitted + 1", "counts", "451 rows admitted and 450 ended"),
    "admission has not heard": (
        "UPDATE admission.datasets SET version = version - 1, counted_at = now() - interval '1 hour', completed = 0",
        "counts",
        "has not heard the newest counts: completed 0, not 448",
    ),
    "admission is ahead": ("UPDATE admission.datasets SET version = version + 1", "counts", "the sheet-writer made only"),
    "a run is said to have cost less": (
        "UPDATE receipts.tallies SET charged = charged - 1",
        "charges",
        "The run is said to have cost",
    ),
    "a run is said to have made fewer calls": ("UPDATE receipts.tallies SET calls = 0", "charges", "The run is said to have made 0 calls"),
    "a budget's account is not the charges": (
        "INSERT INTO receipts.runs (run_id, state, reason, charged) VALUES ('audited', 'running', '', 0.01)",
        "charges",
        "The account of the run's budget says 0.01",
    ),
    "admission heard of another cost": ("UPDATE admission.runs SET charged = charged - 1", "charges", "Admission heard of"),
    "admission heard of what nobody told": ("UPDATE admission.runs SET charges_version = charges_version + 1000", "charges", "of version"),
    "a message is owed": (
        """INSERT INTO admission.owed (run_id, lane, exchange, key, message_type, body, asked, owed_at)
        VALUES ('audited', 'work', 'rowmill', 'k', 'AdvanceRun.v1', '', false, now() - interval '1 hour')""",
        "messages",
        "Owed by admission for 3600 s, and not sent: 1 AdvanceRun.v1.",
    ),
    "an event is owed": (
        "INSERT INTO sheets.events_owed VALUES ('e', 'k', 'RowsCompleted.v1', 'audited', '', now() - interval '1 hour')",
        "messages",
        "Owed by the sheet-writer for 3600 s, and not sent: 1 RowsCompleted.v1.",
    ),
    "a lease of a sent call has no holder": (RECEIPT.format("running"), "leases", "are running under leases that ran out: 1, the first 3600 s ago"),
    "a lease of an unsent call has no holder": (RECEIPT.format("queued"), "leases", "are queued under leases that ran out: 1, the first 3600 s ago"),
    "a run waits for nothing": (
        UNFINISHED.format("waiting") + ", waiting_for = 'dataset:leads'",
        "waiting",
        "waits for dataset:leads, and no dataset of it is open",
    ),
    "a run says not what it waits for": (UNFINISHED.format("waiting"), "waiting", "nothing says for what"),
    "nobody drives a run": (UNFINISHED.format("running"), "waiting", "no executor has held it"),
    "a dataset is not closed": (OPEN_AGAIN, "waiting", "open although all of its 450 rows have ended"),
    "nobody feeds a dataset": (
        OPEN_AGAIN + ", admission_done = false, feeder_until = now() - interval '1 hour', admitted = admitted + 1",
        "leases",
        "nobody has fed it",
    ),
    "a row is not woken": (
        """WITH opened AS (UPDATE admission.datasets SET state = 'open' RETURNING dataset_seq)
        INSERT INTO admission.waits (dataset_seq, row_index, key, page, attempt, waits, due_at, reason)
        SELECT dataset_seq, 1, '', 0, 1, 1, now() - interval '1 hour', 'r' FROM opened""",
        "waiting",
        "rows that waited have been due for 3600 s",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_each_corruption_is_found(books: Books, name: str) -> None:
    sql, check, said = CORRUPTIONS[name]
    found = await books.after(sql)
    assert [finding for finding in found if finding.check == check and said in finding.problem], found
    assert all(finding.advice.endswith((".", "?")) and finding.problem.endswith(".") for finding in found)


async def test_rows_that_are_out_while_no_queue_holds_a_message_are_found(books: Books) -> None:
    await books.connection.execute(OPEN_AGAIN)
    await books.connection.execute("UPDATE sheets.pages SET marks = 's' || substring(marks FROM 2) WHERE page = 1")
    said = "1 rows were sent out and have not ended, and no queue holds a message"
    assert [finding.problem for finding in (await books.audit()).findings if said in finding.problem]
    for queued in (1, None):
        assert not [finding for finding in (await books.audit(queued=queued)).findings if said in finding.problem]


async def test_what_is_under_way_is_no_finding_until_patience_ends(books: Books) -> None:
    await books.connection.execute(UNFINISHED.format("running"))
    await books.connection.execute(RECEIPT.format("running"))
    assert (await books.audit(patience=7200.0)).findings == []
    assert len((await books.audit(patience=60.0)).findings) == 2


def test_all_is_well_with_a_system_that_is_idle(stage: Stage) -> None:
    stats = f"{stage.provider.url}/_stats"
    done = stage.rowmill("doctor", "--audit", RUN, "--provider-stats", stats)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    document = json.loads(stage.rowmill("doctor", "--audit", RUN, "--json").stdout)
    assert (document["well"], document["audit"]["rows"], set(document["services"].values())) == (True, ROWS, {True})
    served = {queue["queue"]: shown["service"] for shown in document["in_hand"] for queue in shown["queues"] if queue["deadline"] > 0}
    assert served.keys() >= {work.name for work in WORK_QUEUES}
    assert set(served.values()) == set(SERVICES)


def test_a_provider_that_counts_an_effect_twice_is_found(stage: Stage) -> None:
    stage.provider.control(honour_keys=False)
    body = msgspec.json.encode([{"key": "twice", "domain": "twice.example"}])
    for _ in range(2):
        urllib.request.urlopen(f"{stage.provider.url}/score", body, timeout=10).close()  # noqa: S310 - our own loopback address
    done = stage.rowmill("doctor", "--provider-stats", f"{stage.provider.url}/_stats")
    assert done.returncode == 1
    assert "more than one effect under the same idempotency key (twice 2 times)" in done.stdout


async def test_a_service_that_is_away_and_a_dead_letter_are_found(stage: Stage) -> None:
    async with Bus(ServiceSettings(broker_url=stage.broker_url, time_scale=0.05), service="test") as bus:
        await bus.publish_body(encode(AdvanceRun(run_id="x")), AdvanceRun.message_type, dead(EXECUTOR_ADVANCE))
    stage.kill9("row-executor")

    async def found() -> list[str]:
        return [finding.problem for finding in (await look(stage.broker_url, stage.database_url)).findings]

    async with asyncio.timeout(BOUND):
        while "Nobody runs the row-executor service on this broker." not in await found():
            await asyncio.sleep(0.2)
    assert f"1 dead letter lies in {dead(EXECUTOR_ADVANCE)}." in await found()
    done = await asyncio.to_thread(stage.rowmill, "doctor")
    assert done.returncode == 1
    assert "`rowmill serve row-executor` starts it" in done.stdout


async def test_messages_that_somebody_holds_although_every_run_is_over_are_found(
    stage: Stage, servers: ServerSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a work queue, and one beside it that is suspected of crashing who handles it. They may be of a run that begins meanwhile."""
    monkeypatch.setattr(in_hand, "ASTRAY_SECONDS", 0.0)
    control = getattr(servers.broker, "control", None)
    if control is None:
        pytest.skip("only a broker of our own says what is unacknowledged")
    if stage.services["row-executor"].pid is not None:
        stage.kill9("row-executor")
    said = f"2 messages of {EXECUTOR_KEYS} are unacknowledged although every run is over."
    async with await aio_pika.connect(stage.broker_url) as connection:
        channel = await connection.channel()
        held = []
        for queue in (EXECUTOR_KEYS, suspect(EXECUTOR_KEYS)):
            await channel.default_exchange.publish(aio_pika.Message(b"{}"), queue)
            held.append(await (await channel.get_queue(queue, ensure=False)).get())
        async with asyncio.timeout(BOUND):
            while said not in [finding.problem for finding in (await look(stage.broker_url, stage.database_url, control)).findings]:
                await asyncio.sleep(0.2)

        def begins_a_run(*arguments: str) -> str:
            asyncio.run(execute(stage.database_url, "UPDATE admission.runs SET state = 'running'"))
            counted: str = control(*arguments)
            return counted

        assert said not in [finding.problem for finding in (await look(stage.broker_url, stage.database_url, begins_a_run)).findings]
        await execute(stage.database_url, "UPDATE admission.runs SET state = 'completed'")
        for message in held:
            await message.ack()


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


async def test_servers_that_do_not_answer_are_found() -> None:
    health = await look("amqp://guest:secret@127.0.0.1:1/", "postgresql://postgres:secret@127.0.0.1:1/none")
    assert sorted(finding.check for finding in health.findings) == ["broker", "database"]
    assert "secret" not in str(health)
    assert all(f"see to ROWMILL_{finding.check.upper()}_URL" in finding.advice for finding in health.findings)


async def test_of_the_projects_own_servers_it_says_what_starts_them_and_not_what_starts_the_services() -> None:
    health = await look("amqp://127.0.0.1:1/", "postgresql://127.0.0.1:1/none", own={"broker", "database"})
    assert [finding.advice.partition(",")[0] for finding in health.findings] == ["`rowmill dev up` starts it"] * 2


async def test_on_a_database_without_tables_it_says_what_starts_the_services(servers: ServerSet) -> None:
    empty = servers.database.create_database("without_tables")
    try:
        health = await look("amqp://127.0.0.1:1/", empty, own={"broker", "database"})
    finally:
        servers.database.drop_database("without_tables")
    advice = {finding.check: finding.advice for finding in health.findings}
    assert advice["database"] == "`rowmill up` starts them."
