from __future__ import annotations

import asyncio

from rowmill.runtime.gathering import Gatherer


async def gathered(items: int, **options: int) -> list[list[int]]:
    pages: list[list[int]] = []

    async def flush(page: list[int]) -> None:
        await asyncio.sleep(0)
        pages.append(page)

    gatherer = Gatherer(flush, **{"max_items": 10, "max_age": 0.001, "max_flushes": 1, **options})  # type: ignore[arg-type]
    for item in range(items):
        gatherer.add(item)
    await gatherer.drain()
    return pages


async def test_every_item_is_flushed_once_in_order() -> None:
    pages = await gathered(95)
    assert [item for page in pages for item in page] == list(range(95))


async def test_pages_fill_under_load() -> None:
    assert [len(page) for page in await gathered(95)] == [10] * 9 + [5]


async def test_an_idle_gatherer_sends_at_once_without_its_timer() -> None:
    arrived = asyncio.Event()

    async def flush(_page: list[int]) -> None:
        arrived.set()

    gatherer = Gatherer(flush, max_items=10, max_age=3600)
    gatherer.add(1)
    await asyncio.wait_for(arrived.wait(), 10)


async def test_pages_are_cut_by_bytes_and_a_larger_item_travels_alone() -> None:
    pages: list[list[bytes]] = []

    async def flush(page: list[bytes]) -> None:
        pages.append(page)

    gatherer = Gatherer(flush, max_items=10, max_age=0.001, max_bytes=10, size=len, max_flushes=1)
    for size in (4, 4, 4, 30, 1):
        gatherer.add(b"x" * size)
    await gatherer.drain()
    assert [[len(item) for item in page] for page in pages] == [[4, 4], [4], [30], [1]]


async def test_what_comes_while_flushes_are_under_way_goes_together_and_waits_for_no_flush_that_hangs() -> None:
    pages: list[list[int]] = []
    released = asyncio.Event()

    async def flush(page: list[int]) -> None:
        pages.append(page)
        await released.wait()

    async def begun(flushes: int) -> None:
        async with asyncio.timeout(10):
            while len(pages) < flushes:
                await asyncio.sleep(0)

    gatherer = Gatherer(flush, max_items=10, max_age=0.001)
    gatherer.add(1)
    await begun(1)
    gatherer.add(2)
    await begun(2)
    gatherer.add(3)
    gatherer.add(4)
    await begun(3)
    assert pages == [[1], [2], [3, 4]]
    released.set()
    await gatherer.drain()


async def test_a_full_page_goes_while_others_hang_without_its_timer() -> None:
    """Both where it fills up, and where it was full before a flush might begin."""
    pages: list[list[int]] = []
    released = asyncio.Event()

    async def flush(page: list[int]) -> None:
        pages.append(page)
        await released.wait()

    gatherer = Gatherer(flush, max_items=2, max_age=3600, max_flushes=3)
    async with asyncio.timeout(10):
        for item in range(6):
            gatherer.add(item)
        while len(pages) < 3:
            await asyncio.sleep(0)
        gatherer.add(6)
        gatherer.add(7)
        await asyncio.sleep(0)
        assert len(pages) == 3, "no more flushes at once than allowed"
        released.set()
        while len(pages) < 4:
            await asyncio.sleep(0)
    assert pages == [[0, 1], [2, 3], [4, 5], [6, 7]]
