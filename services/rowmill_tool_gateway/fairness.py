"""Whose call is next: runs in turn, and within a run the call that was asked for first.

In turn, so that a run of fifty rows beside one of half a million does not wait for it; by the time of first asking, so that a call which was
deferred does not queue anew behind those that came later.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class RunQueue(Generic[ItemT]):
    """Items by run, taken one run after the other. An item is withdrawn by its ticket; it stays in its heap and is passed over."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, int, ItemT]]] = {}
        self._turns: deque[str] = deque()
        self._run_of: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._tickets = 0

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
        heap = self._heaps.get(run_id)
        if heap is None:
            heap = self._heaps[run_id] = []
            self._turns.append(run_id)
        self._tickets += 1
        heapq.heappush(heap, (asked, self._tickets, item))
        self._run_of[self._tickets] = run_id
        self._counts[run_id] = self._counts.get(run_id, 0) + 1
        return self._tickets

    def take(self) -> ItemT | None:
        """The next item; None when there is none."""
        while self._turns:
            run_id = self._turns.popleft()
            heap = self._heaps[run_id]
            _, ticket, item = heapq.heappop(heap)
            while ticket not in self._run_of and heap:
                _, ticket, item = heapq.heappop(heap)
            if heap:
                self._turns.append(run_id)
            else:
                del self._heaps[run_id]
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
