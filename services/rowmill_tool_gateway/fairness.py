"""Whose call is next: runs in turn, within a run the call that was asked for first, and within each round the run whose call that is.

In turn, so that a run of fifty rows beside one of half a million does not wait for it; by the time of first asking, so that a call which was
deferred does not queue anew behind those that came later.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

GAP = 1024
"""Taken items, and turns that do not count any more, that are kept until they are cleared out together."""


class _Line(Generic[ItemT]):
    """Items of one run, in order of asking and then of coming; each is found by (asked, ticket)."""

    __slots__ = ("_entries", "_head")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, ItemT]] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self._entries) - self._head

    @property
    def first(self) -> tuple[float, int]:
        asked, ticket, _ = self._entries[self._head]
        return asked, ticket

    def add(self, asked: float, ticket: int, item: ItemT) -> None:
        insort(self._entries, (asked, ticket, item), lo=self._head)

    def take(self) -> tuple[int, ItemT]:
        _, ticket, item = self._entries[self._head]
        self._head += 1
        if self._head >= GAP:
            del self._entries[: self._head]
            self._head = 0
        return ticket, item

    def before(self, asked: float, ticket: int) -> int:
        """Items that stand before one that was asked for then and came with that ticket."""
        return self._place(asked, ticket) - self._head

    def remove(self, asked: float, ticket: int) -> None:
        del self._entries[self._place(asked, ticket)]

    def _place(self, asked: float, ticket: int) -> int:
        return bisect_left(self._entries, (asked, ticket), lo=self._head)  # a shorter tuple comes before longer ones


class RunQueue(Generic[ItemT]):
    """Items by run, taken one run after the other. An item has a ticket, which says when it first came, and by which it is withdrawn."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[ItemT]] = {}
        self._turns: list[tuple[int, float, int, str]] = []
        """(round, when its first call was asked for, number, run): a heap, in which only the numbers in `_turn_of` count."""
        self._turn_of: dict[str, int] = {}
        self._round = 0
        self._served: set[str] = set()
        """Runs that had their turn in this round."""
        self._place_of: dict[int, tuple[str, float]] = {}
        self._tickets = 0
        self._numbers = 0

    @property
    def length(self) -> int:
        """Items that wait."""
        return len(self._place_of)

    @property
    def runs(self) -> int:
        """Runs that have items waiting."""
        return len(self._lines)

    def waiting(self, run_id: str) -> int:
        """Items of that run that wait."""
        line = self._lines.get(run_id)
        return 0 if line is None else len(line)

    def before(self, run_id: str, asked: float, ticket: int | None = None) -> int:
        """Items that would be taken before one of that run that was asked for then, were it added now (None: with a new ticket): at most, as long as
        nothing older comes.
        """
        line = self._lines.get(run_id)
        if line is None:
            return min(len(self._lines), self.length)
        before = line.before(asked, self._tickets + 1 if ticket is None else ticket)
        return min((before + 1) * len(self._lines) - 1, self.length)

    def ahead(self, ticket: int) -> int:
        """The same for an item that waits."""
        run_id, asked = self._place_of[ticket]
        return min((self._lines[run_id].before(asked, ticket) + 1) * len(self._lines), self.length) - 1

    def ticket(self) -> int:
        """For an item that comes now."""
        self._tickets += 1
        return self._tickets

    def add(self, run_id: str, asked: float, item: ItemT, ticket: int | None = None) -> int:
        """Queue an item; returns its ticket. With the one that it had before it has its place again."""
        if ticket is None:
            ticket = self.ticket()
        line = self._lines.get(run_id)
        if line is None:
            line = self._lines[run_id] = _Line()
        line.add(asked, ticket, item)
        if line.first == (asked, ticket):
            self._take_turn(run_id, asked)
        self._place_of[ticket] = (run_id, asked)
        return ticket

    def _take_turn(self, run_id: str, asked: float) -> None:
        self._numbers += 1
        self._turn_of[run_id] = self._numbers
        heapq.heappush(self._turns, (self._round + (run_id in self._served), asked, self._numbers, run_id))
        if len(self._turns) > 2 * len(self._turn_of) + GAP:
            self._turns = [turn for turn in self._turns if self._turn_of.get(turn[3]) == turn[2]]
            heapq.heapify(self._turns)

    def take(self) -> ItemT | None:
        """The next item; None when there is none."""
        if len(self._lines) == 1:  # alone, a run has every turn
            [(run_id, line)] = self._lines.items()
            ticket, item = line.take()
            del self._place_of[ticket]
            if not line:
                self._forget(run_id)
            return item
        while self._turns:
            turn, _, number, run_id = heapq.heappop(self._turns)
            if self._turn_of.get(run_id) != number:
                continue
            if turn != self._round:
                self._round = turn
                self._served.clear()
            self._served.add(run_id)
            line = self._lines[run_id]
            ticket, item = line.take()
            del self._place_of[ticket]
            if line:
                self._take_turn(run_id, line.first[0])
            else:
                self._forget(run_id)
            return item
        return None

    def withdraw(self, ticket: int) -> bool:
        """The item waits no more; whether it did."""
        place = self._place_of.pop(ticket, None)
        if place is None:
            return False
        run_id, asked = place
        line = self._lines[run_id]
        line.remove(asked, ticket)
        if not line:
            self._forget(run_id)
        return True

    def _forget(self, run_id: str) -> None:
        """The run has no items. Who had its turn in this round is known until the next one, unless nobody waits."""
        del self._lines[run_id], self._turn_of[run_id]
        if not self._lines:
            self._turns.clear()
            self._served.clear()
