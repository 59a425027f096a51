"""How a row or a body leaves author code before its end.

They derive from ``BaseException`` (by `Suspended`): an author's ``except Exception`` around a tool call must not turn a parked row into a
finished one.
"""

from __future__ import annotations

from rowmill.errors import RowmillError, Suspended, UnavailableError


class Parked(Suspended):
    """The row or body waits outside this process: for ``wait_ms``, or (None) until somebody resumes the run.

    ``asked``: when the call that waits was first asked for, seconds since the epoch. ``halted``: the run is stopped or halted. ``provider``: who
    keeps it waiting, if one does; ``away``: that one does not serve now.
    """

    def __init__(
        self,
        reason: str,
        *,
        wait_ms: int | None = None,
        asked: float | None = None,
        halted: bool = False,
        provider: str = "",
        away: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = wait_ms
        self.asked = asked
        self.halted = halted
        self.provider = provider
        self.away = away


class NeighbourAway(UnavailableError):
    """A service that the executor needs did not answer, or this process stops: what is worked is worked again. Author code that raises an
    `UnavailableError` of its own, as a client in it does, has failed instead.
    """


class OutcomeUnknown(RowmillError):
    """An earlier request for this call was sent and its outcome is not known; an operator settles or replays its receipt."""

    code = "outcome_unknown"
