"""Settings of the row executor (``ROWMILL_…``)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rowmill.runtime.settings import Seconds, ServiceSettings


class RowExecutorSettings(ServiceSettings):
    """Bounds and durations of one executor process."""

    rows_prefetch: Annotated[int, Field(ge=1)] = 50
    """Pages of rows taken from the queue and not acknowledged."""

    bodies_prefetch: Annotated[int, Field(ge=1)] = 50
    keys_prefetch: Annotated[int, Field(ge=1)] = 20

    rows_at_once: Annotated[int, Field(ge=1)] = 10_000
    """Rows that wait for something at the same time, over all runs."""

    blocking_threads: Annotated[int, Field(ge=1)] = 16
    """Threads for resolvers that are declared ``blocking``."""

    programs_kept: Annotated[int, Field(ge=1)] = 256
    """Column programs kept after capture, the least recently used dropped first."""

    capture_timeout: Seconds = 30.0
    """How long a replay may take to reach the dataset that is wanted."""

    foreign_code_patience: Seconds = 600.0
    """How long pages of a play whose code this process does not have are passed on before their rows fail with `CodeChanged`."""

    row_timeout: Seconds = 3600.0
    """How long a row may be worked at a time, without the waits for which it is parked; then it fails with `RowTimeout`."""

    loop_slice: float = 0.005
    """Seconds of rows run inline before other work of the process gets its turn. Not scaled: it is about fairness, not about waiting."""

    hold_warning: float = 1.0
    """Seconds after which a resolver that holds the loop is logged by name. Not scaled."""

    call_hold: Seconds = 300.0
    """How long a row waits in hand for a call whose request was sent; then it is parked (DESIGN.md, "Waiting")."""

    call_hold_park: Seconds = 60.0
    """When such a row is looked at again."""

    call_leave: Seconds = 5.0
    """How long an executor that stops waits for answers to calls; then their rows are parked for as long, to be worked by others."""

    body_timeout: Seconds = 600.0
    """How long a body may go on without an end, a wait or a call of its context; then its run fails with `BodyTimeout`. Each of its steps may take as
    long."""

    step_hold: Seconds = 5.0
    """How long a row or body waits in hand for a step that another run has; then it waits outside."""

    step_patience: Seconds = 12.0
    """How long it waits for a step that its own run has: longer than the presence of a dead executor lasts (8 s)."""

    step_again: Seconds = 5.0
    """When it is looked at again."""

    step_renewal: Seconds = 20.0
    """How often leases of running steps are renewed: a third of what they last (60 s)."""

    lease_patience: Seconds = 12.0
    """How long a body that may have crashed its executor is held until that one's lease is over: longer than a run's lease lasts (8 s)."""

    body_drop_patience: Seconds = 5.0
    """How long a dropped body may take to unwind before it is left alone and logged."""
