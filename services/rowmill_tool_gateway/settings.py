"""Settings of the tool gateway (``ROWMILL_…``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rowmill.runtime.settings import Seconds, ServiceSettings


class ToolGatewaySettings(ServiceSettings):
    """Bounds and durations of one gateway process. Tools' own timeouts and rates are the author's, and are not scaled."""

    calls_prefetch: Annotated[int, Field(ge=1)] = 64
    """Pages of calls taken from each shard's queue and not acknowledged."""

    hand: Seconds = 5.0
    """How long a call may wait before its request is sent; then it is deferred (DESIGN.md, "Waiting")."""

    @property
    def lead(self) -> float:
        """Seconds before their turn at which calls that waited elsewhere are to be back: half of what they may wait in hand, so that none of the
        lane's time is lost, and a lane that is slower than it was thought to be sends nobody away.
        """
        return self.hand / 2

    in_flight_hold: Seconds = 300.0
    """How long a message is held for a call whose request was sent; then the call is carried by its lease alone, its row parked."""

    in_flight_again: Seconds = 60.0
    """When a call that outlived ``in_flight_hold`` is to be asked for again."""

    look_after: Seconds = 0.5
    """A call that is expected to wait longer than this is looked up among stored outputs first, so that cached answers wait for no lane."""

    claim_ahead: Seconds = 0.1
    """Calls are claimed this long before their turn, or twice as long as claims take of late, so that requests never wait for the receipt-store."""

    shard_renewal: Seconds = 2.0
    """How often the leases of shards are renewed; a third of their life."""

    permit_life: Seconds = 2.0
    """How long permits are good; far less than a shard's lease, so that a successor never meets them."""
    permit_renewal: Seconds = 1.0
    """How often permits are drawn while calls wait for them; half their life, so that a late answer costs nothing of the rate."""

    shard_retry: Seconds = 1.0
    """How soon a shard is asked for again while calls wait for it, or when the receipt-store did not answer within ``shard_renewal``; and how soon
    calls are to come again whose shard is another gateway's."""

    shard_parting: Seconds = 2.0
    """How long a gateway goes on with what it has in hand of a shard that is to be another's, whose calls go there by then."""

    shard_drain: Seconds = 0.25
    """How long it then waits for open requests to end, before the shard's next holder is told their number instead."""

    shard_again: Seconds = 6.0
    """Calls of another gateway's shard that come to this one let it step back at the shard's queue, this long after the last time at the earliest."""

    receipt_renewal: Seconds = 20.0
    """How often the leases of calls in hand are renewed; a third of their life."""

    claim_renewal: Seconds = 3.0
    """The same of calls that are claimed and not confirmed yet, whose leases last 10 s: a suspect waits so until it can go alone."""

    store_timeout: Seconds = 5.0
    """Silence of the receipt-store after which a request to it counts as failed (a claim) or the persistence latch closes (a result)."""

    suspect_patience: Seconds = 60.0
    """For how long tool functions wait at most for a call that is suspected of ending its gateway: for those under way before it to end, so that it
    goes alone, and then for its own end. What lasts longer has others beside it, and a death counts against it no more."""

    receipt_page: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Receipts in one request to the receipt-store at most (SPEC 3.2)."""

    unreachable_after: Annotated[int, Field(ge=1)] = 5
    """Connections in a row that never opened, after which a lane sends one probe at a time."""

    probe_first: Seconds = 1.0
    probe_limit: Seconds = 30.0
    """Waits between probes double from the first to the limit."""

    rejected_wait: Seconds = 1.0
    """How long a lane is closed by a 429 or 425 without ``Retry-After``."""

    away_wait: Seconds = 300.0
    """How long calls wait for a provider that has not served for longer than ``hand``, at most, before they are asked for again; once it serves they
    are called back."""

    longest_closing: Seconds = 3600.0
    """How long a lane is closed at most, whatever a ``Retry-After`` says. Calls that may not wait as long as it says have failed by then."""

    recovery: Seconds = 20.0
    """Seconds of service in which a lane that was halved by 429s grows from nothing to all that is declared."""

    payment_wait: Seconds = 30.0
    """How long a lane is closed by a 402: others need not learn the same by spending requests."""

    call_attempts: Annotated[int, Field(ge=1)] = 5
    """Tries of a call whose failure may be retried (SPEC 4.4)."""

    retry_first: Seconds = 0.2
    retry_limit: Seconds = 5.0
    """Waits between tries double from the first to the limit, with jitter."""

    http_client: Literal["direct", "aiohttp"] = "direct"
    """What sends the requests of declared HTTP tools: our own HTTP/1.1 (a third of the cost), or aiohttp for a provider that needs its ways."""

    secret_outage: Seconds = 60.0
    """For how long a secret is tried to be resolved while the place that its function asks is away (SPEC 4.8)."""

    connect_timeout: Seconds = 30.0
    """Opening a connection, name look-up and TLS included."""

    body_stall: Seconds = 30.0
    """Silence within a response body after which it counts as unreadable."""

    body_limit: Annotated[int, Field(ge=1)] = 32 * 1024 * 1024
    """Bytes of a response body at most; over it the call fails (SPEC 4.6)."""

    body_budget: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    """Bytes of response bodies that are being read in this process, all together; further ones wait (SPEC 4.6). At least ``body_limit``."""

    result_limit: Annotated[int, Field(ge=1)] = 8 * 1024 * 1024
    """Bytes of a call's stored output at most; over it the call fails (SPEC 2.11)."""

    blocking_threads: Annotated[int, Field(ge=1)] = 16
    """Threads for tool functions that are declared ``blocking``."""
