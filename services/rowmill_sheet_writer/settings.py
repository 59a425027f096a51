"""The sheet writer's bounds and durations, from ``ROWMILL_…``."""

from __future__ import annotations

from rowmill.runtime.settings import Seconds, ServiceSettings


class SheetWriterSettings(ServiceSettings):
    """Durations in seconds at full size (see `ServiceSettings`); sizes in rows, messages or bytes."""

    sheets_connections: int = 8
    settle_prefetch: int = 16
    """Settled pages in hand, each of at most 1 MiB: what is buffered stays under 16 MiB (SPEC 2.10)."""
    sheets_ask_prefetch: int = 50
    merge_rows: int = 1_000
    """Rows of waiting messages that one transaction takes at most: half of SPEC 2.10's batch, so that two overlap."""
    merge_bytes: int = 8 * 1024 * 1024
    merges_at_once: int = 2
    """Transactions of one kind at once: while the database works on one, the next is prepared."""

    query_timeout: Seconds = 20.0
    """How long a statement that somebody asked may run."""
    event_confirm: Seconds = 2.0
    """How long a settled message waits for its events' confirms, before they are noted as owed and sent later."""
    owed_batch: int = 20
    """Owed events read at once."""
