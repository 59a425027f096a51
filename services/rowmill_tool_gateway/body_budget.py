"""The bytes of response bodies that a process holds while it reads them, shared by all connections (SPEC 4.6). Pure: no sockets, no clocks.

A body takes its share as it comes. One whose length was announced asks for all of it before more of it is read; the others ask in steps, and nobody
knows how far they go, but for the limit of one body. So that they never wait for each other in a ring, a step is given only where the body that is
furthest could still be read to that limit (the banker's rule, for which one look at the largest holder is enough: what it gives back lets the next
one come as far). Who waits is served in order, but that shares which grow go before new ones; a new one that waits lets no later one past.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SMALL: Final = 64 * 1024
"""Bodies up to this are not counted: they come in one read or two, and waiting for them would save nothing."""
STEP: Final = 256 * 1024
"""How much more a body of unknown length asks for at a time: about what one read of a socket gives."""


class BodyShare:
    """What one body holds. ``resume`` is called when a share that had to wait was given, never from within `want`."""

    __slots__ = ("_budget", "grows", "held", "resume", "wanted")

    def __init__(self, budget: BodyBudget, resume: Callable[[], None]) -> None:
        self._budget = budget
        self.resume = resume
        self.held = 0
        self.wanted = 0
        self.grows = False
        """Its length is not known: it may want more."""

    def want(self, size: int, announced: int | None) -> bool:
        """Whether a body of which ``size`` bytes are there may be read on. If not, stop reading it until `resume`.

        ``announced``: how long it will be, where that is known.
        """
        if self.wanted:
            return False
        whole = size if announced is None else announced
        if whole <= max(SMALL, self.held):
            return True
        self.grows = announced is None
        self.wanted = min(self._budget.limit, -(-size // STEP) * STEP) if self.grows else whole
        return self._budget.asked(self)

    def done(self) -> None:
        """The body was read, or nobody wants it any more: everything goes back. Again is allowed."""
        if self.held or self.wanted:
            self._budget.returned(self)


class BodyBudget:
    """``total`` bytes at most, but for one read of each connection; ``limit``: bytes of one body at most. Raises `ValueError` where none fits."""

    def __init__(self, total: int, limit: int) -> None:
        if total < limit:
            raise ValueError(f"a budget of {total} bytes for response bodies holds no body of {limit}")
        self.limit = limit
        self.held = 0
        self.most = 0
        """The most that was ever held at once."""
        self._total = total
        self._waiting: list[BodyShare] = []
        self._growing: set[BodyShare] = set()

    @property
    def waiting(self) -> int:
        """Bodies that are not read on for now."""
        return len(self._waiting)

    def share(self, resume: Callable[[], None]) -> BodyShare:
        """The share of a body that begins. It costs nothing until it is counted."""
        return BodyShare(self, resume)

    def asked(self, share: BodyShare) -> bool:
        """Give the share what it wants, or note that it waits."""
        queues = share.held == 0 and any(other.held == 0 for other in self._waiting)
        if not queues and self._fits(share):
            self._give(share)
            return True
        self._waiting.append(share)
        return False

    def returned(self, share: BodyShare) -> None:
        """Take back what the share holds, and serve who waits."""
        self.held -= share.held
        share.held = share.wanted = 0
        self._growing.discard(share)
        if self._waiting:
            for other in self._served():
                other.resume()

    def _served(self) -> list[BodyShare]:
        given: list[BodyShare] = []
        for share in sorted((one for one in self._waiting if one.wanted), key=lambda one: one.held == 0):
            if self._fits(share):
                self._give(share)
                given.append(share)
            elif share.held == 0:
                break
        self._waiting = [share for share in self._waiting if share.wanted]
        return given

    def _give(self, share: BodyShare) -> None:
        if share.grows:
            self._growing.add(share)
        self.held += share.wanted - share.held
        self.most = max(self.most, self.held)
        share.held, share.wanted = share.wanted, 0

    def _fits(self, share: BodyShare) -> bool:
        left = self._total - self.held - share.wanted + share.held
        growing = [other.held for other in self._growing]
        if share.grows:
            growing.append(share.wanted)
        return left >= (self.limit - max(growing) if growing else 0)
