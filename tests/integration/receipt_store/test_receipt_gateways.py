"""Who is there: what gateways are told of each other with their leases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.receipt_store.conftest import SHARD

from rowmill.runtime.db import Database
from rowmill_contracts.shards import LeaseShard, OpenRequests
from rowmill_receipt_store.gateway_store import GatewayStore, Met

pytestmark = pytest.mark.servers


class Hall:
    """Where gateways meet; time passes as it is told to."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._store = GatewayStore(database, life=SHARD)

    def pass_time(self, seconds: float) -> None:
        self._store.clock_offset += seconds

    async def meet(self, holder: str, number: int = 0, **facts: Any) -> Met:
        return await self._store.meet(LeaseShard(holder=holder, shards=[], number=number, **facts))

    async def known(self) -> list[str]:
        return [row["holder"] for row in await self.database.fetch("SELECT holder FROM gateways")]


@pytest.fixture
async def hall(database: Database) -> AsyncIterator[Hall]:
    yield Hall(database)
    await database.execute("TRUNCATE gateways")


async def test_who_has_been_there_for_a_while_shares_until_it_is_silent_for_as_long(hall: Hall) -> None:
    assert (await hall.meet("ann")).sharing == [], "who may be gone at once is given nothing"
    hall.pass_time(0.6 * SHARD)
    await hall.meet("ann")
    assert (await hall.meet("bob")).sharing == []
    hall.pass_time(0.6 * SHARD)
    assert (await hall.meet("bob")).sharing == ["ann"]
    await hall.meet("ann")
    hall.pass_time(0.6 * SHARD)
    assert (await hall.meet("bob")).sharing == ["ann", "bob"]
    hall.pass_time(0.6 * SHARD)
    assert (await hall.meet("bob")).sharing == ["bob"], "ann has said nothing for longer than a lease lasts"
    assert (await hall.meet("ann")).sharing == ["ann", "bob"], "who was silent is no newcomer: all reckon again as they did before"


async def test_who_leaves_shares_no_more_and_does_not_come_back_by_a_late_message(hall: Hall) -> None:
    await hall.meet("ann", 1)
    hall.pass_time(0.9 * SHARD)
    await hall.meet("ann", 2)
    hall.pass_time(0.2 * SHARD)
    assert (await hall.meet("ann", 3)).sharing == ["ann"]
    assert (await hall.meet("ann", 4, serving=False)).sharing == []
    assert (await hall.meet("bob", 1)).sharing == []
    await hall.meet("ann", 3)
    await hall.meet("ann", 5)
    assert (await hall.meet("bob", 2)).sharing == []


async def test_what_the_others_have_open_is_told_while_they_are_there_as_they_said_last(hall: Hall) -> None:
    await hall.meet("ann", 2, open=[OpenRequests("acme/hunter", 3), OpenRequests("acme/apollo", 1)])
    await hall.meet("ann", 1, open=[])
    await hall.meet("ann", 4, open=[OpenRequests("acme/hunter", 3), OpenRequests("acme/apollo", 1)])
    await hall.meet("ann", 3, open=[])
    await hall.meet("bob", 1, open=[OpenRequests("acme/hunter", 2)], serving=False)
    assert (await hall.meet("cid")).open == [OpenRequests("acme/apollo", 1), OpenRequests("acme/hunter", 5)], "an older message changes nothing"
    assert (await hall.meet("bob", 2, serving=False)).open == [OpenRequests("acme/apollo", 1), OpenRequests("acme/hunter", 3)], "not one's own"
    hall.pass_time(1.1 * SHARD)
    assert (await hall.meet("cid")).open == [], "connections of the dead are closed"


async def test_who_is_long_gone_is_forgotten(hall: Hall) -> None:
    await hall.meet("ann")
    await hall.meet("bob")
    hall.pass_time(99 * SHARD)
    await hall.meet("bob")
    assert (await hall.meet("ann")).sharing == ["ann", "bob"], "who was silent for less is no newcomer"
    hall.pass_time(102 * SHARD)
    assert (await hall.meet("bob")).sharing == ["bob"]
    assert await hall.known() == ["bob"]
