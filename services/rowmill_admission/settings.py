"""Admission's bounds and durations, from ``ROWMILL_…``."""

from __future__ import annotations

from rowmill.runtime.settings import Seconds, ServiceSettings
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS


class AdmissionSettings(ServiceSettings):
    """Durations in seconds at full size (see `ServiceSettings`); sizes in rows, pages or bytes."""

    default_org: str = "default"
    database_connections: int = 8
    run_prefetch: int = 50
    input_prefetch: int = 16
    ask_prefetch: int = 50
    count_prefetch: int = 50
    parked_prefetch: int = 20
    dead_prefetch: int = 10

    run_lease: Seconds = 8.0
    """How long a run's body is an executor's without a renewal."""
    same_body_window: Seconds = 600.0
    """Two ``RunStart`` without any id and with equal bodies are one run within this time."""
    input_unsealed_limit: Seconds = 3600.0
    """An input that has not been sealed for this long after its last page fails its runs."""
    event_retention: Seconds = 7 * 86_400.0

    page_rows: int = PAGE_ROWS
    page_bytes: int = PAGE_BYTES
    input_batch_bytes: int = 8 * 1024 * 1024
    """Input pages stored in one commit at most."""
    read_ahead_pages: int = 16
    read_ahead_bytes: int = 4 * 1024 * 1024
    """Input pages that a feeder reads in one statement at most."""

    run_room: int = 2_000
    """Rows of one run in flight at most."""
    room_rows: int = 50_000
    """Rows of all runs at the executors at most."""
    room_bytes: int = 256 * 1024 * 1024
    room_poll: Seconds = 0.25
    """How often the tables are read for what other instances have in flight, while someone waits for room."""
    pages_under_way: int = 8
    """Pages of one dataset that are looked up or published at once."""

    keys_timeout: Seconds = 3600.0
    keys_again: Seconds = 120.0
    """A page's keys are asked for again after so long, then after twice as long each time. Each copy of a page that ends executors ends two more
    before it is found out, so it is not asked for again while that goes on; who dies without an answer has its page delivered again, and lost
    connections are noticed otherwise.
    """

    feeder_lease: Seconds = 6.0
    feeder_look: Seconds = 1.0
    """How often datasets without a living feeder are looked for."""
    feeder_failures: int = 5
    """Times that a dataset's feeders may fail at the same place, by an error that nobody foresaw, before the dataset fails."""
    progress_interval: Seconds = 0.25
    """A dataset's progress is told at most this often."""
    back_for: Seconds = 15.0
    """For how long after a row that was called back was due new rows of its run wait while any row is out: it may be that one. Twice what a call may
    stay in hand (7.5 s) before it is sent, or is back here.
    """
    wait_poll: Seconds = 0.25
    """How often waits are looked through for due ones, at most."""
    release_rows: int = 1_000
    """Due rows released in one commit at most."""
    releasing_limit: Seconds = 30.0
    """A released row whose publisher has not finished for this long is published by another."""

    halt_grace: Seconds = 5.0
    """Rows that say for this long after a resumption that their run is halted were sent before it: they come back, and halt nothing."""
    halt_timeout: Seconds = 30.0
    """How long a pause or resumption waits for the receipt-store's word before it is left to be asked for again."""

    command_retention: Seconds = 7 * 86_400.0
    """How long it is remembered what was made of a command on a run, so that a copy of its message that comes late changes nothing."""

    charges_patience: float = 3.0
    """How long who asks for a run waits for the receipt-store's word on what it was charged, before it is shown what was heard last. Not scaled: it
    is how long a person waits."""
    charges_pause: Seconds = 5.0
    """For how long after such a silence nobody waits for that word."""

    repair_limit: Seconds = 60.0
    """How long one part of the repair look may take before the next part has its turn."""
    silent_after: Seconds = 30.0
    """A dataset of which nothing was heard for this long is asked for."""
    page_again_after: Seconds = 900.0
    """Pages with open rows are published again after this long, doubling at each repetition."""
    retry_retention: Seconds = 7 * 86_400.0
    """How long a run with failed rows can be retried after its end."""
    advance_again_limit: Seconds = 900.0
    """The body of a run that nobody holds is asked for again after the repair interval, doubling to this long."""
