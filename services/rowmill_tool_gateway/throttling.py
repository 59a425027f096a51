"""How much of what an author declared a provider bears at the moment: additive increase, multiplicative decrease. Pure.

The rule is that of congestion control (Chiu and Jain, 1989): who is told that it is too much takes half, and then a little more with every bit of
service, up to what is declared. It finds the rate that a provider bears also where the declaration is wrong or others use the same account.
"""

from __future__ import annotations

from typing import Final

LEAST: Final = 1 / 64
"""Share that is left after however many refusals; the lane's closings do the rest."""
LONGEST_STEP: Final = 1.0
"""Seconds of service that one answer counts for at most: an idle lane does not recover."""


class Throttle:
    """``recovery``: seconds of service in which a share grows from nothing to all."""

    def __init__(self, recovery: float) -> None:
        self.share = 1.0
        self._recovery = recovery
        self._halved_until = float("-inf")
        self._served_at = float("-inf")

    def refused(self, now: float, closed_until: float) -> bool:
        """It was too much; the lane is closed until ``closed_until``. What is refused before then was sent before, and says nothing new."""
        if now < self._halved_until:
            return False
        self._halved_until = closed_until
        self.share = max(LEAST, self.share / 2)
        return True

    def served(self, now: float) -> None:
        """A request was answered, and not that it is too much."""
        if self.share < 1.0:
            self.share = min(1.0, self.share + min(LONGEST_STEP, max(0.0, now - self._served_at)) / self._recovery)
        self._served_at = now

    def learn(self, share: float, closed_until: float) -> None:
        """So much was borne when others sent here, and until then the lane is closed."""
        self.share = share
        self._halved_until = max(self._halved_until, closed_until)
