"""Waiting requests grow into few statements; urgent kinds first; a fault stays with its request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from rowmill.errors import UnavailableError
from rowmill_receipt_store.merging import Merger, rounds


class Statements:
    """Remembers what was carried out together, and waits at a gate."""

    def __init__(self) -> None:
        self.carried: list[tuple[str, list[int]]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def named(self, name: str) -> Callable[[Sequence[int]], Awaitable[list[int]]]:
        async def carry_out(items: Sequence[int]) -> list[int]:
            self.carried.append((name, list(items)))
            await self.gate.wait()
            if 13 in items:
                raise ValueError("13")
            if 500 in items:
                raise UnavailableError("away")
            return [item * 10 for item in items]

        return carry_out


def merger(statements: int = 1) -> Merger:
    return Merger(statements=statements, max_items=5, max_bytes=100)


async def test_requests_delivered_together_go_in_one_statement_and_are_answered_apart() -> None:
    log = Statements()
    kind = merger().kind(log.named("claim"))

    answers = await asyncio.gather(kind.ask([1, 2]), kind.ask([3]), kind.ask([]))

    assert list(answers) == [[10, 20], [30], []]
    assert log.carried == [("claim", [1, 2, 3])]


async def test_what_waits_while_a_statement_runs_is_merged_up_to_the_limit() -> None:
    log = Statements()
    kind = merger().kind(log.named("claim"))
    log.gate.clear()
    first = asyncio.ensure_future(kind.ask([1]))
    while not log.carried:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(kind.ask([n, n])) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    log.gate.set()

    await asyncio.gather(first, *later)

    assert log.carried == [("claim", [1]), ("claim", [2, 2, 3, 3]), ("claim", [4, 4])]


async def test_urgent_kinds_go_first_whatever_came_first() -> None:
    log = Statements()
    merging = merger()
    urgent, claims = merging.kind(log.named("settle")), merging.kind(log.named("claim"))

    await asyncio.gather(claims.ask([1]), claims.ask([2]), urgent.ask([3]))

    assert log.carried == [("settle", [3]), ("claim", [1, 2])]


async def test_bytes_bound_a_statement_and_a_larger_request_goes_alone() -> None:
    log = Statements()
    kind = merger().kind(log.named("complete"))

    await asyncio.gather(kind.ask([1], weight=60), kind.ask([2], weight=60), kind.ask([3], weight=900), kind.ask([4, 4, 4, 4, 4, 4]))

    assert log.carried == [("complete", [1]), ("complete", [2]), ("complete", [3]), ("complete", [4, 4, 4, 4, 4, 4])]


async def test_a_faulty_request_fails_alone() -> None:
    kind = merger().kind(Statements().named("claim"))

    answers = await asyncio.gather(kind.ask([1]), kind.ask([13]), kind.ask([2]), return_exceptions=True)

    assert answers[0] == [10]
    assert isinstance(answers[1], ValueError)
    assert answers[2] == [20]


async def test_while_the_database_is_away_all_are_told_at_once() -> None:
    log = Statements()
    kind = merger().kind(log.named("claim"))

    answers = await asyncio.gather(kind.ask([1]), kind.ask([500]), return_exceptions=True)

    assert [type(answer) for answer in answers] == [UnavailableError, UnavailableError]
    assert len(log.carried) == 1


async def test_who_gave_up_waiting_disturbs_nobody() -> None:
    log = Statements()
    kind = merger().kind(log.named("claim"))
    log.gate.clear()
    gone, stays = asyncio.ensure_future(kind.ask([1])), asyncio.ensure_future(kind.ask([2]))
    while not log.carried:
        await asyncio.sleep(0)
    gone.cancel()
    log.gate.set()

    assert await stays == [20]
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await kind.ask([3]) == [30]


def test_rounds_hold_each_key_once_and_keep_its_order() -> None:
    assert rounds(["a", "b", "a", "c", "a", "b"]) == [[0, 1, 3], [2, 5], [4]]
    assert rounds([]) == []
