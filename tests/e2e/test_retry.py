"""`rowmill runs retry` on five services: the failed rows of a run that is over are worked again, and nothing else is."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from tests.e2e.stage import BOUND, ProviderProcess, Stage

from rowmill import registry
from rowmill.client import Client, Job
from rowmill.client.reading import SheetReader
from rowmill.dev import ServerSet
from rowmill.dev.services import ServiceSet
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.rows import ReadRow
from rowmill_contracts.run_questions import RunSummary
from rowmill_contracts.topology import RUNS_RETRY

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

ROWS, PAGE = 60, 25
REFUSED, MISTAKEN = {3, 27, 59}, {10}
"""Rows that the tool refuses, and one that the play's code is wrong about."""

PLAYS = """
from decimal import Decimal
from pathlib import Path
from pydantic import BaseModel
from rowmill import Batch, Context, Provider, RowContext, Rows, ToolCall, ToolError, column, play

HERE = Path(__file__).parent
shop = Provider("shop", base_url="http://127.0.0.1:1", rate="10000/s")

class Item(BaseModel):
    name: str

def called(tool: str, inputs: list[Item]) -> None:
    with (HERE / "calls").open("a") as log:
        log.writelines(f"{tool} {item.name}\\n" for item in inputs)

@shop.tool("look", effect="idempotent", batch=Batch(10))
async def look(inputs: list[Item], call: ToolCall) -> list[int | ToolError]:
    called("look", inputs)
    return [len(item.name) for item in inputs]

@shop.tool("order", effect="non_idempotent", cost=Decimal("0.05"), batch=Batch(10))
async def order(inputs: list[Item], call: ToolCall) -> list[str | ToolError]:
    called("order", inputs)
    refused = (HERE / "refused").read_text().split()
    return [ToolError("sold out") if item.name in refused else item.name.upper() for item in inputs]

@column(version="1")
def known(row: Item, ctx: RowContext) -> str:
    if MISTAKE:
        raise ValueError("the code is wrong about this row")
    return "yes"

class Items(BaseModel):
    items: Rows[Item]

@play("shopping")
async def shopping(ctx: Context, input: Items) -> dict[str, object]:
    await ctx.call(look, Item(name="the body"))
    done = await (
        ctx.dataset("items", input.items, row=Item)
        .with_column("seen", lambda row, ctx: ctx.call(look, Item(name=row["name"])))
        .with_column("known", known)
        .with_column("ordered", lambda row, ctx: ctx.call(order, Item(name=row["name"])))
        .run(key="name")
    )
    return {"items": done, "ordered": sum(1 for row in await done.materialize(1000) if row.get("ordered") is not None)}
"""
WRONG, RIGHT = PLAYS.replace("MISTAKE", f'row.name == "item-{min(MISTAKEN):03}"'), PLAYS.replace("MISTAKE", "False")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "plays.py").write_text(WRONG)
    (folder / "rowmill.toml").write_text('plays = ["plays"]\ntools = ["plays"]\n')
    (folder / "refused").write_text(" ".join(name(index) for index in REFUSED))
    (folder / "calls").touch()
    return folder


@pytest.fixture(scope="module")
def stage(servers: ServerSet, broker_url: str, database_url: str, project: Path) -> Iterator[Stage]:
    with ProviderProcess() as provider, pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWMILL_PAGE_ROWS", str(PAGE))
        stage = Stage(project, servers, broker_url, database_url, provider)
        stage.environment = {key: value for key, value in stage.environment.items() if not key.startswith("ROWMILL_PROVIDERS__")}
        stage.services = ServiceSet(stage.environment, project / "logs")
        try:
            asyncio.run(stage.start_services())
            yield stage
        finally:
            stage.services.stop()


def name(index: int) -> str:
    return f"item-{index:03}"


def calls(project: Path) -> Counter[str]:
    return Counter((project / "calls").read_text().splitlines())


def charged(made: Counter[str]) -> tuple[int, Decimal]:
    """Calls and cost of what was made: orders cost something, whatever comes of them."""
    return made.total(), Decimal("0.05") * sum(number for call, number in made.items() if call.startswith("order "))


async def ended(job: Job) -> RunSummary:
    async with asyncio.timeout(BOUND):
        return await job.wait()


async def rows_of(client: Client, job: Job) -> list[ReadRow]:
    return [row async for row in SheetReader(client.bus).rows(job.run_id, "items")]


async def test_failed_rows_are_worked_again_by_the_code_there_is_now_and_nothing_else_is(stage: Stage, project: Path) -> None:
    given = [{"name": name(index)} for index in range(ROWS)]
    async with stage.connected() as client:
        with registry.isolated():
            job = await client.start(stage.play("shopping"), items=given)
        sys.modules.pop("plays", None)
        summary = await ended(job)
        failed = REFUSED | MISTAKEN
        assert (summary.state, summary.counts.completed, summary.counts.failed) == ("completed", ROWS - len(failed), len(failed))
        first = calls(project)
        summary = await stage.charged(job)
        assert (summary.counts.calls, summary.counts.cost) == charged(first)
        assert {row.index for row in await rows_of(client, job) if row.mark == "failed"} == failed

        (project / "refused").write_text(name(59))
        (project / "plays.py").write_text(RIGHT)
        stage.kill9("row-executor")
        stage.restart("row-executor")
        done = await asyncio.to_thread(stage.rowmill, "runs", "retry", job.run_id)
        assert f"{len(failed)} failed rows of run {job.run_id} are worked again" in done.stdout, done.stderr
        summary = await ended(job)
        assert (summary.state, summary.counts.completed, summary.counts.failed, summary.counts.admitted) == ("completed", ROWS - 1, 1, ROWS)
        assert msgspec.json.decode(summary.output)["ordered"] == ROWS - 1, "the body has read its rows again"
        rows = await rows_of(client, job)
        assert {row.index: row.attempt for row in rows if row.attempt != 1} == dict.fromkeys(failed, 2)
        assert [row.index for row in rows if row.mark == "failed"] == [59]
        again = calls(project) - first
        assert again == Counter({f"order {name(index)}" for index in failed}), "completed calls are not made again, failed ones once"
        summary = await stage.charged(job)
        assert (summary.counts.calls, summary.counts.cost) == charged(first + again)

        (project / "refused").write_text("")
        request = RunRetry(run_id=job.run_id, retry_id="once")
        for _ in range(2):
            await client.bus.publish(request, RUNS_RETRY)
        await completed(job, ROWS)
        await client.bus.publish(request, RUNS_RETRY)  # comes when the run is over again: it was heard
        refused = await asyncio.to_thread(stage.rowmill, "runs", "retry", job.run_id, "--json")
        assert (refused.returncode, "no row of run" in refused.stderr) == (2, True), refused.stderr
        assert {row.index: row.attempt for row in await rows_of(client, job) if row.attempt != 1} == dict.fromkeys(failed, 2) | {59: 3}
        assert calls(project) - first - again == Counter({f"order {name(59)}": 1})
        await stage.quiet()


async def test_what_a_retry_gives_stands_also_where_a_newer_run_met_the_same_failure(stage: Stage, project: Path) -> None:
    given = [{"name": f"old-{number}"} for number in range(3)]
    (project / "refused").write_text("old-1")
    async with stage.connected() as client:
        with registry.isolated():
            play = stage.play("shopping")
            older, newer = [await ended_job(await client.start(play, items=given)) for _ in range(2)]
        sys.modules.pop("plays", None)
        assert [[row.mark for row in await rows_of(client, job)][1] for job in (older, newer)] == ["failed", "failed"]
        (project / "refused").write_text("")
        await client.bus.publish(RunRetry(run_id=older.run_id, retry_id="older"), RUNS_RETRY)
        await completed(older, 3)
        row = (await rows_of(client, older))[1]
        assert (row.mark, msgspec.json.decode(row.data)["ordered"]["v"]["raw"], row.error) == ("completed", "OLD-1", None)


async def ended_job(job: Job) -> Job:
    await ended(job)
    return job


async def completed(job: Job, rows: int) -> None:
    """Return once the run has ended with so many completed rows."""
    async with asyncio.timeout(BOUND):
        while (summary := await ended(job)).counts.completed < rows:
            await asyncio.sleep(0.05)
    assert (summary.state, summary.counts.completed, summary.counts.failed) == ("completed", rows, 0)
