"""Settings of the receipt-store, read from ``ROWMILL_…``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rowmill.runtime.settings import Seconds, ServiceSettings


class ReceiptStoreSettings(ServiceSettings):
    """Lives of leases, and how requests are merged.

    ``queued_lease``, ``running_lease``, ``shard_lease``: how long a lease lasts unless it is renewed. ``shard_grace``: for how long others ask for
    a shard whose lease has lapsed before they get it: after an outage, time for its holder to come back. ``presence_lease``, ``presence_grace``:
    the same for an executor's presence. ``held_poll``: after how long, at most,
    somebody who waits for another's lease is told to ask again. ``merge_items``, ``merge_bytes``: what one statement carries at most.
    ``statements``: how many run at once; fewer merge more. ``output_limit``: bytes of the largest output that is stored.
    ``answer_bytes``: bytes of stored outputs in one answer at most (the first may be larger); what does not fit is asked for again.
    ``sweep_interval``: how often claims are looked for whose holder vanished before it sent anything. ``sweep_page``: of them in a statement at most.
    ``unsent_wait``: for how long what a claim has of a budget may come back, while it is not sent: others of its run wait for no older one. More
    than the look needs to give an orphaned one back (twice ``queued_lease``, and ``sweep_interval``).
    ``suspected_after``: gateways that died with a call in hand after which it is sent alone. ``deaths_alone``: those that then died with nothing but
    it in hand, after which it fails.
    """

    queued_lease: Seconds = 10.0
    running_lease: Seconds = 60.0
    shard_lease: Seconds = 6.0
    shard_grace: Seconds = 6.0
    presence_lease: Seconds = 6.0
    presence_grace: Seconds = 2.0
    held_poll: Seconds = 0.25
    merge_items: int = 1000
    merge_bytes: int = 16 * 1024 * 1024
    statements: int = 2
    prefetch: int = 64
    output_limit: int = 8 * 1024 * 1024
    answer_bytes: int = 8 * 1024 * 1024
    sweep_interval: Seconds = 30.0
    sweep_page: Annotated[int, Field(ge=1)] = 2000
    unsent_wait: Seconds = 120.0
    suspected_after: Annotated[int, Field(ge=1)] = 2
    deaths_alone: Annotated[int, Field(ge=1)] = 3
