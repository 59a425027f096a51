"""One shard's lease as its holder sees it, and how far it is given up. Pure: the time is an argument, in seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """``until``: when it may be another's. ``doubted``: its queue may be another gateway's. ``elsewhere``: another has it, as we were told."""

    term: int = 0
    until: float = float("-inf")
    doubted: bool = False
    elsewhere: bool = False
    parting: float | None = None
    """Until when what is in hand is still sent, before the shard is given up; None: it is not."""
    leaving: float | None = None
    """Until when open requests are waited for, with nothing sent any more; None: not yet, or it is not given up."""

    def holds(self, now: float) -> bool:
        """Whether spending is allowed."""
        return self.leaving is None and now < self.until

    def done_with(self, now: float, *, sends: bool) -> bool:
        """Whether the shard is handed over and nothing more of it is to be sent. ``sends``: there is what to send, and we go on sending."""
        return self.parting is not None and self.leaving is None and (now >= self.parting or not sends or not self.holds(now))

    def ready_to_go(self, now: float, *, busy: bool) -> bool:
        """Whether the shard can be given up. ``busy``: calls of it are in hand."""
        return (self.doubted and not busy) or (self.leaving is not None and (now >= self.leaving or not busy))
