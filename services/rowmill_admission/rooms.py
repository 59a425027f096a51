"""Who may send next: room for rows at the executors, given out round-robin by organisation, then by run. Pure.

Every number is absolute, as the tables have it; the only thing kept here is what was granted and is not in the tables yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """``rows`` and ``bytes``: at the executors at most, over all runs."""

    rows: int
    bytes: int


@dataclass(slots=True)
class Flight:
    """What a dataset has in flight. ``sent``: rows that ever went; ``ended``: of those terminal; ``waiting``: of those outside any process;
    ``called_back``: some of those are called back, or were lately and may be sent back once more; they go before new ones of their run.

    Rows that wait count in their run's window (it admits no more), not in the common room.
    """

    org: str
    run_id: str
    window: int
    sent: int = 0
    sent_bytes: int = 0
    ended: int = 0
    waiting: int = 0
    called_back: bool = False
    granted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rows and bytes of pages that were granted and whose sending the tables do not show yet."""

    @property
    def granted_rows(self) -> int:
        return sum(rows for rows, _ in self.granted.values())

    @property
    def in_window(self) -> int:
        return max(0, self.sent - self.ended) + self.granted_rows

    @property
    def in_room(self) -> int:
        return max(0, self.sent - self.ended - self.waiting) + self.granted_rows

    @property
    def bytes_in_room(self) -> int:
        """By the mean size of the dataset's rows."""
        out = max(0, self.sent - self.ended - self.waiting)
        return (out * self.sent_bytes // self.sent if self.sent else 0) + sum(size for _, size in self.granted.values())


@dataclass(frozen=True, slots=True)
class Ask:
    """A dataset's next page wants room."""

    dataset_seq: int
    page: int
    rows: int
    bytes: int


class Rooms:
    """Flights of all open datasets, and who asks for room."""

    def __init__(self, limits: RoomLimits) -> None:
        self.limits = limits
        self.kept = 0
        """Rows of the common room that are kept free for rows that have waited and are due."""
        self._flights: dict[int, Flight] = {}
        self._asks: dict[int, Ask] = {}
        self._turns: deque[str] = deque()  # organisations that ask, next first
        self._runs: dict[str, deque[int]] = {}  # datasets of each that ask, next first

    @property
    def rows(self) -> int:
        """Rows at the executors."""
        return sum(flight.in_room for flight in self._flights.values())

    @property
    def asking(self) -> bool:
        return bool(self._asks)

    def flight(self, dataset_seq: int) -> Flight | None:
        return self._flights.get(dataset_seq)

    def enter(self, dataset_seq: int, org: str, run_id: str, window: int) -> Flight:
        """Begin to count a dataset (once or again)."""
        return self._flights.setdefault(dataset_seq, Flight(org, run_id, window))

    def leave(self, dataset_seq: int) -> None:
        """The dataset is over, or nobody here asks for it any more."""
        self.withdraw(dataset_seq)
        self._flights.pop(dataset_seq, None)

    def known(self) -> set[int]:
        return set(self._flights)

    def ask(self, ask: Ask) -> None:
        """Want room for one page; a dataset asks for one at a time."""
        flight = self._flights[ask.dataset_seq]
        if ask.dataset_seq in self._asks:
            raise ValueError(f"dataset {ask.dataset_seq} asks already")
        self._asks[ask.dataset_seq] = ask
        waiting = self._runs.setdefault(flight.org, deque())
        if not waiting:
            self._turns.append(flight.org)
        waiting.append(ask.dataset_seq)

    def withdraw(self, dataset_seq: int) -> None:
        """Want no room any more."""
        if self._asks.pop(dataset_seq, None) is None:
            return
        org = self._flights[dataset_seq].org
        self._runs[org].remove(dataset_seq)
        if not self._runs[org]:
            del self._runs[org]
            self._turns.remove(org)

    def resize(self, dataset_seq: int, page: int, rows: int, size: int) -> None:
        """Of a granted page only so much will be sent (the rest is reused or a duplicate)."""
        flight = self._flights.get(dataset_seq)
        if flight is not None and page in flight.granted:
            flight.granted[page] = (rows, size)

    def recorded(self, dataset_seq: int, pages: list[int]) -> None:
        """The tables show these pages as sent, or they never will be."""
        flight = self._flights.get(dataset_seq)
        if flight is not None:
            for page in pages:
                flight.granted.pop(page, None)

    def grant(self) -> list[Ask]:
        """Give out what is free. A run whose window is full, or whose rows are called back, is passed over; a page that does
        not fit in the common room holds up all behind it, so that large pages are not starved by small ones.
        """
        granted: list[Ask] = []
        rows = self.rows
        called_back = {flight.run_id for flight in self._flights.values() if flight.called_back}
        size = sum(flight.bytes_in_room for flight in self._flights.values())
        windows: dict[str, int] = {}
        for flight in self._flights.values():
            windows[flight.run_id] = windows.get(flight.run_id, 0) + flight.in_window
        passed = 0
        while self._turns and passed < len(self._turns):
            org = self._turns[0]
            seq = self._next_of(org, windows, called_back)
            if seq is None:
                self._turns.rotate(-1)
                passed += 1
                continue
            ask = self._asks[seq]
            if rows and (rows + ask.rows + self.kept > self.limits.rows or size + ask.bytes > self.limits.bytes):
                break
            self._turns.rotate(-1)
            self.withdraw(seq)
            flight = self._flights[seq]
            flight.granted[ask.page] = (ask.rows, ask.bytes)
            windows[flight.run_id] += ask.rows
            rows += ask.rows
            size += ask.bytes
            granted.append(ask)
            passed = 0
        return granted

    def _next_of(self, org: str, windows: dict[str, int], called_back: set[str]) -> int | None:
        """The first dataset in the organisation's line whose run has room. Who is served leaves the line, and asks again at its end."""
        for seq in self._runs[org]:
            flight = self._flights[seq]
            if flight.run_id in called_back:
                continue
            out = windows[flight.run_id]
            if out == 0 or out + self._asks[seq].rows <= flight.window:
                return seq
        return None
