"""What is known of lanes as time passes, and where a word meets a change of hands half-way."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.receipt_store.conftest import SHARD

from rowmill.runtime.db import Connection, Database
from rowmill_contracts.shards import LaneStanding, LeaseShard
from rowmill_receipt_store.standing_store import StandingStore
from rowmill_receipt_store.store import Store

pytestmark = pytest.mark.servers

DAY = 86_400.0


@pytest.fixture
def standings(database: Database) -> StandingStore:
    return StandingStore(database)


def word(shard: int, number: int, *standing: LaneStanding) -> LeaseShard:
    return LeaseShard(holder="one", shards=[shard], terms=[1], number=number, standings=list(standing))


async def test_what_closes_a_lane_passes_and_what_was_said_long_ago_is_forgotten_once_it_is_over(
    store: Store, standings: StandingStore, shard: int
) -> None:
    await store.lease_shards("one", [shard])
    long, short = LaneStanding("acme/long", shard, 3 * DAY, 0.5), LaneStanding("acme/short", shard, 600.0, 0.25, 9, 300.0)
    await standings.tell(word(shard, 1, short, long))
    standings.clock_offset += 500.0
    found = {one.lane: one for one in await standings.known({shard: 2})}
    assert 0.0 < found["acme/short"].closed <= 100.0
    assert found["acme/short"].away is not None
    assert 800.0 <= found["acme/short"].away < 900.0
    standings.clock_offset += 100.0
    found = {one.lane: one for one in await standings.known({shard: 2})}
    assert (found["acme/short"].closed, found["acme/short"].share, found["acme/short"].missed) == (0.0, 0.25, 9)
    standings.clock_offset += DAY
    await standings.known({shard: 2})
    assert [one.lane for one in await standings.known({shard: 2})] == ["acme/long"]
    await standings.tell(word(shard, 2, LaneStanding("acme/long", shard, 1e300, 1.0, 0, 1e300)))
    assert [round(one.closed / DAY) for one in await standings.known({shard: 2})] == [365], "as long as can be stored"


async def test_a_word_that_meets_a_change_of_hands_half_way_waits_for_it_and_changes_nothing(
    store: Store, standings: StandingStore, database: Database, shard: int
) -> None:
    await store.lease_shards("one", [shard])
    connection: Connection
    async with database.pool.acquire() as connection:
        async with connection.transaction():
            await connection.execute("UPDATE shards SET holder = 'two', term = term + 1 WHERE shard = $1", shard)
            telling = asyncio.create_task(standings.tell(word(shard, 1, LaneStanding("acme/late", shard, 1000.0))))
            async with asyncio.timeout(SHARD):
                while not await waiting(database):
                    await asyncio.sleep(0.01)
            assert not telling.done()
        await telling
    assert await standings.known({shard: 9}) == []


async def waiting(database: Database) -> int:
    """Statements of this schema that wait for a lock."""
    row = await database.fetchrow("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%standings%'")
    assert row is not None
    return int(row[0])
