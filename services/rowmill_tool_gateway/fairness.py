"""Whose call is next: runs in turn, within a run the call that was asked for first, and within each round the run whose call that is.

In turn, so that a run of fifty rows beside one of half a million does not wait for it; by the time of first asking, so that a call which was
deferred does not queue anew behind those that came later.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class RunQueue(Generic[ItemT]):
    """Items by run, taken one run after the other. An item is withdrawn by its ticket; it stays in its heap and is passed over."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, int, ItemT]]] = {}
        self._turns: list[tuple[int, float, int, str]] = []
        """(round, when its first call was asked for, number, run): a heap, in which only the numbers in `_turn_of` count."""
        self._turn_of: dict[str, int] = {}
        self._round = 0
        self._served: set[str] = set()
        """Runs that had their turn in this round."""
        self._run_of: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._tickets = 0
        self._numbers = 0

    @property
    def length(self) -> int:
        """Items that wait."""
        return len(self._run_of)

    @property
    def runs(self) -> int:
        """Runs that have items waiting."""
        return len(self._counts)

    def waiting(self, run_id: str) -> int:
        """Items of that run that wait."""
        return self._counts.get(run_id, 0)

    def add(self, run_id: str, asked: float, item: ItemT) -> int:
        """Queue an item; its ticket withdraws it."""
        self._tickets += 1
        ticket = self._tickets
        heap = self._heaps.get(run_id)
        if heap is None:
            heap = self._heaps[run_id] = []
        first = not heap or asked < heap[0][0]
        heapq.heappush(heap, (asked, ticket, item))
        if first:
            self._take_turn(run_id, asked)
        self._run_of[ticket] = run_id
        self._counts[run_id] = self._counts.get(run_id, 0) + 1
        return ticket

    def _take_turn(self, run_id: str, asked: float) -> None:
        self._numbers += 1
        self._turn_of[run_id] = self._numbers
        heapq.heappush(self._turns, (self._round + (run_id in self._served), asked, self._numbers, run_id))

    def take(self) -> ItemT | None:
        """The next item; None when there is none."""
        while len(self._heaps) == 1:  # alone, a run has every turn
            [(run_id, heap)] = self._heaps.items()
            _, ticket, item = heapq.heappop(heap)
            if not heap:
                self._heaps.clear()
                self._turn_of.clear()
                self._turns.clear()
                self._served.clear()
            if self.withdraw(ticket):
                return item
        while self._turns:
            turn, _, number, run_id = heapq.heappop(self._turns)
            if self._turn_of.get(run_id) != number:
                continue
            if turn != self._round:
                self._round = turn
                self._served.clear()
            self._served.add(run_id)
            heap = self._heaps[run_id]
            _, ticket, item = heapq.heappop(heap)
            while ticket not in self._run_of and heap:
                _, ticket, item = heapq.heappop(heap)
            if heap:
                self._take_turn(run_id, heap[0][0])
            else:
                del self._heaps[run_id], self._turn_of[run_id]
            if self.withdraw(ticket):
                return item
        return None

    def withdraw(self, ticket: int) -> bool:
        """The item waits no more; whether it did."""
        run_id = self._run_of.pop(ticket, None)
        if run_id is None:
            return False
        left = self._counts[run_id] - 1
        if left:
            self._counts[run_id] = left
        else:
            del self._counts[run_id]
        return True
