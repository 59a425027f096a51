"""Reports of windows that were decided on before a shard changed hands, or before a newer one was stored, and come to be stored after."""

from __future__ import annotations

import pytest

from rowmill.runtime.db import Database
from rowmill_contracts.shards import Draw, Sent
from rowmill_receipt_store.store import Store
from rowmill_receipt_store.window_store import WindowStore
from rowmill_receipt_store.windows import Report

pytestmark = pytest.mark.servers


@pytest.fixture
def windows(database: Database) -> WindowStore:
    return WindowStore(database)


def reported(shard: int, *, term: int, number: int) -> Report:
    draw = Draw(window=f"acme/lane-{shard}", shard=shard, number=number, permits=number, seconds=1.0, span=60.0)
    return Report(draw=draw, term=term, sent=[Sent(1.0, number)], told=None)


async def number(windows: WindowStore, shard: int) -> tuple[int, int] | None:
    """Term and number of what is stored."""
    found = (await windows.load([f"acme/lane-{shard}"])).get(f"acme/lane-{shard}")
    return None if found is None else (found.term, found.number)


async def test_only_the_holder_of_a_shard_under_its_term_has_a_report_stored(store: Store, windows: WindowStore, shard: int) -> None:
    name = f"acme/lane-{shard}"
    await store.lease_shards("one", [shard])
    assert await windows.save("one", [reported(shard, term=1, number=1)]) == {name}
    assert await windows.save("two", [reported(shard, term=1, number=2)]) == set(), "another has the shard"

    await store.release_shards("one", [shard])
    assert await windows.save("one", [reported(shard, term=1, number=3)]) == set(), "it was given up"
    await store.lease_shards("one", [shard])
    assert await windows.save("one", [reported(shard, term=1, number=4)]) == set(), "it was taken anew"
    assert await number(windows, shard) == (1, 1)
    assert await windows.save("one", [reported(shard, term=2, number=1)]) == {name}
    assert await number(windows, shard) == (2, 1)


async def test_a_report_that_is_overtaken_by_a_newer_one_changes_nothing(store: Store, windows: WindowStore, shard: int) -> None:
    await store.lease_shards("one", [shard])
    await windows.save("one", [reported(shard, term=1, number=5)])
    for late in (4, 5):
        assert await windows.save("one", [reported(shard, term=1, number=late)]) == set()
    [kept] = (await windows.load([f"acme/lane-{shard}"])).values()
    assert (kept.number, kept.permits, kept.sent) == (5, 5, [Sent(1.0, 5)])
