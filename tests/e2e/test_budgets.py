"""Budgets, pauses and stops on a whole system: exact by the provider's own count, and nothing paid for twice afterwards. And who shares what was paid
for.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from tests.e2e.stage import BOUND, Books, Stage, leads, read_csv, write_csv

from rowmill.client import Client, Job
from rowmill_contracts.events import RunEvent
from rowmill_contracts.run_questions import RunSummary

pytestmark = pytest.mark.servers

HUNTER, APOLLO = Decimal("0.01"), Decimal("0.02")


def paid(books: Books) -> Decimal:
    """What the provider would bill."""
    return books.hunter * HUNTER + books.apollo * APOLLO


def run_id_in(stderr: str) -> str:
    return next(word for line in stderr.splitlines() if "; run " in line for word in [line.rsplit("run ", 1)[1].strip()])


async def stands(job: Job) -> RunSummary:
    """The run once it is over or waits for a person."""
    async with asyncio.timeout(BOUND):
        return await job.wait(standing=True)


async def rests(system: Stage) -> Books:
    """What the provider has counted once nothing is on its way any more."""
    await system.quiet()
    return Books.told(system.provider.stats())


async def test_a_budget_stops_the_run_exactly_and_more_of_it_completes_the_run(system: Stage, client: Client, word: str, tmp_path: Path) -> None:
    rows = leads(200, word)
    whole = Books.of(row["domain"] for row in rows)
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.csv"
    assert paid(whole) > 2

    first = await asyncio.to_thread(system.rowmill, "run", "leads", "--csv", str(source), "--out", str(out), "--budget", "0.50")

    assert first.returncode == 1, first.stderr
    run_id = run_id_in(first.stderr)
    assert f"rowmill runs resume {run_id} --budget" in first.stderr
    assert "waits for budget: money, " in first.stderr
    spent = await rests(system)
    assert Decimal("0.48") < paid(spent) <= Decimal("0.50"), "what is left of the budget pays for no further call"
    summary = await (await client.job(run_id)).status()
    assert summary is not None
    assert summary.state == "waiting"
    named = re.fullmatch(r"budget: money, 0[.\d]* of 0\.50 is left and receipt ([0-9a-f]{12}) may cost 0\.0[12]", summary.waiting_for or "")
    assert named, summary.waiting_for
    summary = await system.charged(await client.job(run_id))
    assert (summary.counts.cost, summary.counts.calls) == (paid(spent), spent.total)

    for given in ((), ("--budget", "0.50")):
        refused = await asyncio.to_thread(system.rowmill, "runs", "resume", run_id, *given)
        assert refused.returncode != 0
        needed = re.search(
            r"would wait for its budget of money again at once: .*; to go on it needs at least --budget (0\.5[012])$", refused.stderr.strip()
        )
        assert needed, refused.stderr
        assert Decimal(needed[1]) > Decimal("0.50")

    named_again = await asyncio.to_thread(system.rowmill, "run", "leads", "--csv", str(source), "--run-id", run_id, "--budget", "5.00")
    assert named_again.returncode == 1
    told = f"the run {run_id} exists, with a budget of 0.50, which --budget 5.00 does not change here; `rowmill runs resume {run_id} --budget 5.00`"
    assert told in named_again.stderr

    resumed = await asyncio.to_thread(system.rowmill, "runs", "resume", run_id, "--budget", "5.00")

    assert resumed.returncode == 0, resumed.stderr
    job = await client.job(run_id)
    await stands(job)
    summary = await system.audit(client, job, rows)
    assert summary.budget == Decimal("5.00")
    assert Books.told(system.provider.stats()) == whole
    assert (summary.counts.cost, summary.counts.calls) == (paid(whole), whole.total)
    again = await asyncio.to_thread(system.rowmill, "run", "leads", "--csv", str(source), "--out", str(out))
    assert again.returncode == 0, again.stderr
    assert len(read_csv(out)) == 200
    assert Books.told(system.provider.stats()) == whole


async def test_calls_that_failed_are_in_what_is_shown_of_their_run_wherever_it_is_shown(
    system: Stage, client: Client, word: str, tmp_path: Path
) -> None:
    rows = leads(40, word)
    due = Books.of(row["domain"] for row in rows)
    system.provider.control(reply={"path": "/match", "status": 500, "count": 4})  # each is tried again, and paid for again

    job = await client.start(system.play(), leads=rows)
    async with asyncio.timeout(BOUND):
        heard = [event async for event in job.events()]

    cost, calls = paid(due) + 4 * APOLLO, due.total + 4
    assert isinstance(heard[-1], RunEvent)
    assert (heard[-1].cost, heard[-1].counts.calls) == (cost, calls)
    summary = await system.audit(client, job, rows)
    assert (summary.counts.cost, summary.counts.calls) == (cost, calls)
    for command in (("runs", "get", job.run_id), ("runs", "list")):
        told = json.loads((await asyncio.to_thread(system.rowmill, *command, "--json")).stdout)
        shown = next(run for run in told if run["run_id"] == job.run_id) if isinstance(told, list) else told
        assert (Decimal(shown["counts"]["cost"]), shown["counts"]["calls"]) == (cost, calls), command
    audited = json.loads((await asyncio.to_thread(system.rowmill, "doctor", "--audit", job.run_id, "--json")).stdout)
    assert (Decimal(audited["audit"]["cost"]), audited["audit"]["calls"]) == (cost, calls)
    assert [finding for finding in audited["findings"] if finding["check"] == "charges"] == []

    more = leads(40, word + "x")
    source, out = write_csv(tmp_path / "more.csv", more), tmp_path / "out.csv"
    system.provider.reset()
    system.provider.control(reply={"path": "/match", "status": 404, "count": 3})  # these rows fail; what they asked for is paid
    ended = await asyncio.to_thread(system.rowmill, "run", "leads", "--csv", str(source), "--out", str(out), "--allow-failed")
    spent = await rests(system)
    assert f"  calls: {spent.total + 3} made live, cost {paid(spent) + 3 * APOLLO}" in ended.stdout.splitlines(), (ended.stdout, ended.stderr)


async def test_a_resumption_with_too_little_waits_again(system: Stage, client: Client, word: str) -> None:
    rows = leads(100, word)
    job = await client.start(system.play(), leads=rows, budget={"calls": 10, "money": 1})
    assert ((await stands(job)).waiting_for or "").startswith("budget: calls, all 10 are made and receipt ")
    assert (await rests(system)).total == 10
    assert (await system.charged(job)).counts.calls == 10

    refused = await asyncio.to_thread(system.rowmill, "runs", "resume", job.run_id, "--budget", "calls=10")
    assert "10 are made; to go on it needs at least --budget calls=11" in refused.stderr
    resumed = await asyncio.to_thread(system.rowmill, "runs", "resume", job.run_id, "--budget", "calls=30")
    assert resumed.returncode == 0, resumed.stderr
    async with asyncio.timeout(BOUND):
        while Books.told(system.provider.stats()).total < 30:
            await asyncio.sleep(0.05)
    assert ((await stands(job)).waiting_for or "").startswith("budget: calls, all 30 are made and receipt ")

    assert (await rests(system)).total == 30
    await job.resume(budget={"calls": 1000, "money": 5})
    await stands(job)
    await system.audit(client, job, rows)
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in rows)


async def test_a_run_sends_nothing_after_its_wall_time_and_completes_once_it_has_more(system: Stage, client: Client, word: str) -> None:
    rows = leads(200, word)
    system.provider.control(latency_ms=600)
    job = await client.start(system.play(), leads=rows, budget={"wall_time": "1s"})

    waiting_for = (await stands(job)).waiting_for or ""
    assert re.fullmatch(r"budget: wall time, 1 s are over.*", waiting_for), waiting_for
    system.provider.control(latency_ms=0)
    sent = await rests(system)
    whole = Books.of(row["domain"] for row in rows)
    assert sent.total < whole.total
    await asyncio.sleep(0.3)
    assert Books.told(system.provider.stats()) == sent

    resumed = await asyncio.to_thread(system.rowmill, "runs", "resume", job.run_id, "--budget", "wall-time=1h")
    assert resumed.returncode == 0, resumed.stderr
    await stands(job)
    await system.audit(client, job, rows)
    assert Books.told(system.provider.stats()) == whole


async def test_equal_calls_are_made_once_for_whom_the_tool_says(system: Stage, client: Client, word: str) -> None:
    asked = system.project / "asked"
    asked.write_text("")

    async def made(play: str, number: int) -> Counter[str]:
        """Of each tool the calls of one more run of three rows that ask the same."""
        before = Counter(asked.read_text().split())
        rows = [{"name": f"{play} {number} {row}", "word": word} for row in range(3)]
        summary = await stands(await client.start(system.play(play), rows=rows))
        assert (summary.state, summary.counts.completed) == ("completed", 3), summary.error
        return Counter(asked.read_text().split()) - before

    assert await made("sharing", 1) == {"org": 1, "play": 1, "run": 1, "none": 3}
    assert await made("sharing", 2) == {"run": 1, "none": 3}
    assert await made("sharing_too", 1) == {"play": 1, "run": 1, "none": 3}
    await rests(system)


async def test_a_paused_run_sends_nothing_until_it_is_resumed(system: Stage, client: Client, word: str) -> None:
    rows = leads(600, word)
    system.provider.control(latency_ms=200)
    job = await client.start(system.play(), leads=rows)
    async with asyncio.timeout(BOUND):
        while Books.told(system.provider.stats()).total < 60:
            await asyncio.sleep(0.02)

    await job.pause()
    system.provider.control(latency_ms=0)
    paused = await asyncio.to_thread(system.rowmill, "runs", "pause", job.run_id)
    assert paused.returncode == 0, paused.stderr
    before = await rests(system)
    assert 0 < before.total < Books.of(row["domain"] for row in rows).total
    assert (await stands(job)).waiting_for == "pause"
    shown = await asyncio.to_thread(system.rowmill, "runs", "get", job.run_id, "--json")
    assert json.loads(shown.stdout)["waiting_for"] == "pause"
    assert await rests(system) == before

    resumed = await asyncio.to_thread(system.rowmill, "runs", "resume", job.run_id)
    assert resumed.returncode == 0, resumed.stderr
    await stands(job)
    await system.audit(client, job, rows)
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in rows)


async def test_a_waiting_run_can_be_stopped_and_its_rows_are_cancelled(system: Stage, client: Client, word: str) -> None:
    rows = leads(100, word)
    job = await client.start(system.play(), leads=rows, budget=Decimal("0.10"))
    await stands(job)
    before = await rests(system)

    stopped = await asyncio.to_thread(system.rowmill, "runs", "stop", job.run_id)

    assert stopped.returncode == 0, stopped.stderr
    async with asyncio.timeout(BOUND):
        summary = await job.wait()
    assert summary.state == "cancelled"
    assert summary.counts.terminal == summary.counts.admitted == 100
    assert await rests(system) == before
    over = await asyncio.to_thread(system.rowmill, "runs", "resume", job.run_id, "--budget", "9")
    assert over.returncode == 2
    assert "cancelled" in over.stderr


async def test_a_provider_that_wants_to_be_paid_lets_the_run_wait(system: Stage, client: Client, word: str) -> None:
    rows = leads(60, word)
    system.provider.control(reply={"path": "/v2/bulk", "status": 402, "count": 1, "body": '{"error": "pay first"}'})
    job = await client.start(system.play(), leads=rows)

    assert (await stands(job)).waiting_for == 'payment: provider hunter answered 402: {"error": "pay first"}'
    await rests(system)
    await job.resume()

    await stands(job)
    await system.audit(client, job, rows)
