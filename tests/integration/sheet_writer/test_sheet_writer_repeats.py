"""Messages that come again, and a writer that died between its commit and what it had to tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import aio_pika
import asyncpg
import pytest
from tests.integration.sheet_writer.conftest import Neighbours, SheetRun, input_row

from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Database
from rowmill_contracts.counts import Counts
from rowmill_contracts.topology import EVENTS, SHEETS_SETTLE, dead
from rowmill_sheet_writer.announcing import Announcer
from rowmill_sheet_writer.deciding import Lookup
from rowmill_sheet_writer.events import settled_events
from rowmill_sheet_writer.looking import look_up
from rowmill_sheet_writer.settings import SheetWriterSettings
from rowmill_sheet_writer.settling import settle_messages
from rowmill_sheet_writer.store import SERVER_SETTINGS, Store

pytestmark = pytest.mark.servers

NewRun = Callable[..., SheetRun]
ANN, BOB = input_row("ann"), input_row("bob")


@pytest.fixture
async def store(settings: SheetWriterSettings) -> AsyncIterator[Store]:
    """The tables, as a writer holds them that dies right after its commit."""
    database = await Database.connect(settings.database_url, schema="sheets", server_settings=SERVER_SETTINGS)
    yield Store(database)
    await database.close()


async def test_a_repeated_message_changes_nothing_and_is_told_again_under_the_same_id(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    for _ in range(2):
        await run.settle(run.completed(ANN, 0), run.failed(BOB, 1))
    await neighbours.until(lambda: len(neighbours.events_of(run)) == 4)
    await neighbours.until(lambda: len([c for c in neighbours.committed if c.run_id == run.run_id]) == 2)
    assert len({event.event_id for event in neighbours.events_of(run)}) == 2
    assert {(c.version, c.counts.terminal) for c in neighbours.committed if c.run_id == run.run_id} == {(2, 2)}


async def test_what_was_committed_before_a_death_is_told_at_the_next_delivery(new_run: NewRun, neighbours: Neighbours, store: Store) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    message = run.settled(run.completed(ANN, 0), run.failed(BOB, 1))
    await store.transact(lambda transaction: settle_messages(transaction, [message]))
    assert (await run.counts()).counts.terminal == 2
    assert neighbours.events_of(run) == []

    await neighbours.bus.publish(message, SHEETS_SETTLE)
    told = await neighbours.until_counts(run, completed=1, failed=1)
    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 2)
    assert told.version == 2
    assert {event.event_id for event in neighbours.events_of(run)} == {e.message.event_id for e in settled_events(message, message.rows)}


async def test_what_a_lookup_committed_before_a_death_is_told_when_asked_again(new_run: NewRun, neighbours: Neighbours, store: Store) -> None:
    first, run = new_run(), new_run()
    await first.look_up([ANN, BOB])
    await first.settle(first.completed(ANN, 0))
    await neighbours.until_counts(first, completed=1)
    request = run.lookup([ANN, BOB, ANN])
    sheet_id = await store.sheet_id("acme", "leads", run.dataset)
    await store.transact(lambda transaction: look_up(transaction, [Lookup.of(request, sheet_id)]))
    assert (await run.counts()).counts == Counts(admitted=3, reused=1, duplicates=1)

    answer = await run.ask(request)
    assert [row.mark for row in answer.rows] == ["reused", "sent", "duplicate"]
    assert answer.counts == (await neighbours.until_counts(run, reused=1, duplicates=1)).counts
    await neighbours.until(lambda: [row.reused for row in neighbours.event_rows(run)] == [True])


async def test_part_of_a_message_that_was_overtaken_is_told_as_far_as_it_counts(new_run: NewRun, neighbours: Neighbours) -> None:
    run = new_run()
    await run.look_up([ANN, BOB])
    await run.settle(run.completed(BOB, 1, attempt=2))
    await neighbours.until_counts(run, completed=1)
    await run.settle(run.completed(ANN, 0), run.failed(BOB, 1))
    await neighbours.until_counts(run, completed=2)
    await neighbours.until(lambda: len(neighbours.event_rows(run)) == 2)
    assert {(row.index, row.attempt, row.status) for row in neighbours.event_rows(run)} == {(0, 1, "completed"), (1, 2, "completed")}


async def test_one_row_settled_by_two_runs_in_one_commit_is_the_newer_runs(new_run: NewRun, neighbours: Neighbours, store: Store) -> None:
    older, newer = new_run(), new_run()
    await older.look_up([ANN])
    await newer.look_up([ANN])
    messages = [newer.settled(newer.failed(ANN, 0)), older.settled(older.completed(ANN, 0)), newer.settled(newer.failed(ANN, 0))]
    outcomes = await store.transact(lambda transaction: settle_messages(transaction, messages))
    assert [outcome.committed.counts.terminal for outcome in outcomes if outcome.committed is not None] == [1, 1, 1]
    assert [row.error is not None for row in await newer.read_all()] == [True]


async def test_settled_rows_without_a_page_record_are_dead_lettered_and_the_others_kept(
    new_run: NewRun, neighbours: Neighbours, broker_url: str
) -> None:
    run = new_run()
    await run.look_up([ANN])
    await run.settle(run.completed(ANN, 0), run.completed(BOB, 1), run.completed(BOB, 0, page=9))
    told = await neighbours.until_counts(run, completed=1)
    assert told.counts.terminal == 1
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(dead(SHEETS_SETTLE), ensure=False)
        async with queue.iterator(timeout=20) as messages:
            async for message in messages:
                await message.ack()
                break
    assert message.headers["x-rowmill-error"] == "2 rows are in no page record of the run, the first with index 1 of page 0"


async def test_events_that_nobody_confirms_are_noted_and_sent_later(
    new_run: NewRun, neighbours: Neighbours, store: Store, settings: SheetWriterSettings, database_url: str
) -> None:
    run = new_run()
    message = run.settled(run.completed(ANN, 0))
    [event] = settled_events(message, message.rows)
    async with Bus(settings, service="writer") as bus, await aio_pika.connect(settings.broker_url) as connection:
        channel = await connection.channel()
        full = await channel.declare_queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish", "x-queue-type": "classic"})
        await full.bind(EVENTS, event.routing_key)
        announcer = Announcer(bus, store, event_confirm=0.3, owed_batch=20)
        await announcer.events([event])
        assert [owed.event_id for owed in await store.read_owed(after="", limit=10)] == [event.message.event_id]
        assert await announcer.send_owed() == 0
        await announcer.events([event])
        await full.delete(if_unused=False, if_empty=False)
        assert await announcer.send_owed() == 1
        assert await store.read_owed(after="", limit=10) == []
    await neighbours.until(lambda: len(neighbours.events_of(run)) > 0)
    assert {told.event_id for told in neighbours.events_of(run)} == {event.message.event_id}
    found = await asyncpg.connect(database_url)
    assert await found.fetchval("SELECT count(*) FROM sheets.events_owed") == 0
    await found.close()
