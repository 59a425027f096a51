"""Flights that wait for what calls under way of their run leave over of its budget (docs/adr/0025, "Amended").

Each asks again from time to time; here those are told first that are in hand when a call of their run ends, as it may have left something over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from rowmill_tool_gateway.flights import Flight

TOLD: Final = 2
"""Flights that are told of each end: one that is paid for by what is left over, and one that finds out that there is more."""

GOLDEN: Final = 0.618
"""Multiples of this, taken modulo one, lie apart however many they are."""


class Unpaid:
    """``resume``: has a flight claim anew. ``hand``: seconds that a call waits in hand."""

    def __init__(self, resume: Callable[[Flight], None], hand: float) -> None:
        self._resume = resume
        self._hand = hand
        self._runs: dict[str, dict[str, Flight]] = {}
        self._sent_away = 0

    def wait(self, flight: Flight) -> None:
        """It is paused, since its run's budget does not pay for it now."""
        self._runs.setdefault(flight.payer_run, {})[flight.key] = flight

    def leave(self, flight: Flight) -> None:
        """It is paused no more."""
        waiting = self._runs.get(flight.payer_run, {})
        waiting.pop(flight.key, None)
        if not waiting:
            self._runs.pop(flight.payer_run, None)

    def freed(self, run_id: str) -> None:
        """A call of the run has ended, and that is stored: something of its budget may be left over."""
        for flight in list(islice(self._runs.get(run_id, {}).values(), TOLD)):
            self._resume(flight)

    def away(self) -> float:
        """Seconds for which the next call that waits so is sent away: another time for each, so that some are in hand at any moment."""
        self._sent_away += 1
        return self._hand * (0.2 + 0.8 * (self._sent_away * GOLDEN % 1))


__all__ = ["Unpaid"]
