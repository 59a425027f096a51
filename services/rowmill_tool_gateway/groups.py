"""Groups: calls of one tool and credential scope, first waiting, then claimed and gathered into requests. Pure: the time is an argument.

A claimed call waits for company for at most ``gather`` seconds from the first of its batch (never extended), not at all when the batch is full or
nothing more is on its way.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

from rowmill_tool_gateway.fairness import RunQueue
from rowmill_tool_gateway.pacing import Pace

ItemT = TypeVar("ItemT")


class Group(Generic[ItemT]):
    """``size``: calls in a request at most. ``pace``: the tool's own rate besides its lane's; ``paces``: all rates that its requests count in.
    ``waiting``: calls that nothing is claimed for.
    """

    def __init__(self, *, size: int, gather: float, pace: Pace | None, lane_pace: Pace | None = None) -> None:
        self.size = size
        self.waiting: RunQueue[ItemT] = RunQueue()
        self.looking = 0
        """Calls that came, and are being looked for among stored outputs before they wait."""
        self.coming = 0
        """Calls that are being claimed: company worth waiting for."""
        self.pace = pace
        self.paces = tuple(one for one in (lane_pace, pace) if one is not None)
        self._gather = gather
        self._ready: deque[tuple[float, ItemT, bool]] = deque()

    @property
    def requests(self) -> int:
        """Requests that its calls make which wait, are being claimed, or are claimed and not taken: so few at least."""
        return -(-(len(self._ready) + self.coming + self.waiting.length) // self.size)

    @property
    def ready(self) -> int:
        """Claimed calls that were not taken."""
        return len(self._ready)

    def claim_room(self, now: float, ahead: float) -> int:
        """Calls that the tool's own rate lets one claim now."""
        if self.pace is None:
            return self.waiting.length
        room = math.ceil(self.pace.sends_within(now, ahead)) * self.size - self.coming - len(self._ready)
        return max(0, room)

    @property
    def head(self) -> ItemT | None:
        """The first of the claimed calls."""
        return self._ready[0][1] if self._ready else None

    def add(self, now: float, item: ItemT, *, apart: bool = False) -> None:
        """A call was claimed. ``apart``: it shares its request with no other."""
        self._ready.append((now, item, apart))

    def due_at(self, now: float) -> float | None:
        """When the next request may go, in the past where it may now; None with nothing to send, or no permits."""
        if not self._ready or (self.pace is not None and not self.pace.permitted(now)):
            return None
        full = len(self._ready) >= self.size or self._ready[0][2]
        gathered = self._ready[0][0] + self._gather if self.coming and not full else now
        return gathered if self.pace is None else max(gathered, self.pace.due_at())

    def claimable_at(self, now: float) -> float:
        """When the tool's own rate allows another request."""
        return now if self.pace is None else self.pace.due_at()

    def take(self, now: float) -> list[ItemT]:
        """The calls of the next request, oldest first."""
        if self.pace is not None:
            self.pace.begin(now)
        _, item, apart = self._ready.popleft()
        taken = [item]
        while not apart and self._ready and len(taken) < self.size and not self._ready[0][2]:
            taken.append(self._ready.popleft()[1])
        return taken

    def remove(self, item: ItemT) -> None:
        """Take one call out that is not to be sent."""
        self._ready = deque(entry for entry in self._ready if entry[1] is not item)
