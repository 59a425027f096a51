"""Whether a stored output serves a claim (SPEC 3.1). Pure; times are seconds since the epoch by the database's clock."""

from __future__ import annotations


def serves(*, completed_at: float, started_at: float, reusable: bool, force: bool, fresh_for: float | None, retired_at: float | None = None) -> bool:
    """Whether an output of ``completed_at`` serves a run of ``started_at``.

    What was completed after the run's start serves every tool, forced or not: a redelivered or parked row never pays twice. Older outputs
    serve where the tool allows it (``reusable``), nothing is forced, and they were at most ``fresh_for`` seconds old (None: any age) when
    the run started. Time that passes during the run makes nothing stale. What pruning has retired serves the runs that had started then.
    """
    if completed_at >= started_at:
        return True
    if retired_at is not None and started_at >= retired_at:
        return False
    return reusable and not force and (fresh_for is None or completed_at + fresh_for >= started_at)
