"""Several writers at once, and a database that dies under them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from decimal import Decimal

import pytest
from tests.integration.sheet_writer.conftest import Neighbours, SheetRun, accounted, input_row

from rowmill.dev.private import PrivateServers
from rowmill.runtime.bus import Bus
from rowmill_contracts.counts import Counts
from rowmill_sheet_writer.app import App
from rowmill_sheet_writer.settings import SheetWriterSettings

pytestmark = pytest.mark.servers

NewRun = Callable[..., SheetRun]
PAGE, PAGES = 50, 12
ROWS = [input_row(f"row{number}") for number in range(PAGE * PAGES)]


async def look_all_up(run: SheetRun, order: list[int], **changes: object) -> list[str]:
    """Every page twice, all at once; the marks by index."""

    async def one(page: int) -> tuple[int, list[str]]:
        rows = ROWS[PAGE * page : PAGE * (page + 1)]
        answer = await run.look_up(rows, page=page, first_index=PAGE * page, **changes)
        assert answer.error is None
        return page, [row.mark for row in answer.rows]

    answers = await asyncio.gather(*(one(page) for page in order + order))
    return [mark for _, marks in sorted(answers[: len(order)]) for mark in marks]


async def settle_all(run: SheetRun, rng: random.Random) -> None:
    """Every row twice, in messages across pages, in any order."""
    settled = [run.completed(row, index, page=index // PAGE) for index, row in enumerate(ROWS)] * 2
    rng.shuffle(settled)
    await asyncio.gather(*(run.settle(*settled[start : start + 40]) for start in range(0, len(settled), 40)))


async def test_runs_over_one_sheet_by_several_writers_at_once_lose_and_double_nothing(
    new_run: NewRun, neighbours: Neighbours, settings: SheetWriterSettings
) -> None:
    rng = random.Random(7)
    other = App(settings)
    await other.start()
    runs = [new_run() for _ in range(3)]
    for run in runs:
        order = list(range(PAGES))
        rng.shuffle(order)
        assert set(await look_all_up(run, order, force="all")) == {"sent"}
    await asyncio.gather(*(settle_all(run, rng) for run in runs))
    for run in runs:
        told = await neighbours.until_counts(run, completed=len(ROWS))
        assert told.counts == Counts(admitted=len(ROWS), completed=len(ROWS), calls=len(ROWS), cost=Decimal("0.01") * len(ROWS))
        assert [row.index for row in await run.read_all()] == list(range(len(ROWS)))
    later = new_run()
    assert set(await look_all_up(later, list(range(PAGES)))) == {"reused"}
    assert accounted((await later.counts()).counts)
    await other.stop()


async def test_a_database_that_was_killed_costs_no_row(own_servers: PrivateServers) -> None:
    database_url = own_servers.database.create_database("killed_under_the_writer")
    settings = SheetWriterSettings(broker_url=own_servers.broker.url, database_url=database_url, time_scale=0.05, ask_timeout=1200, ask_again=400)
    app = App(settings)
    await app.start()
    async with Bus(settings, service="neighbours") as bus:
        heard = Neighbours(bus)
        await heard.listen()
        run = SheetRun(bus, "killed")
        await look_all_up(run, list(range(PAGES)))
        settling = asyncio.create_task(settle_all(run, random.Random(3)))
        await heard.until(lambda: len(heard.committed) > 1)
        await asyncio.to_thread(own_servers.database.kill)
        await asyncio.to_thread(own_servers.start)
        await settling
        told = await heard.until_counts(run, completed=len(ROWS))
        assert told.counts.calls == len(ROWS)
        await heard.until(lambda: {row.index for row in heard.event_rows(run)} == set(range(len(ROWS))))
        assert [row.mark for row in await run.read_all()] == ["completed"] * len(ROWS)
    await app.stop()
