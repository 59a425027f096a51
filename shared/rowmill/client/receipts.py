"""Receipts as an operator asks for them: whole answers made of pages."""

from __future__ import annotations

import time

import msgspec

from rowmill.errors import UsageError
from rowmill.runtime.bus import Bus
from rowmill_contracts.receipts import (
    GetReceipt,
    ListReceipts,
    PruneReceipts,
    ReceiptSettled,
    ReceiptShown,
    ReceiptsListed,
    ReceiptsPruned,
    ReceiptState,
    ReceiptView,
    ReplayReceipt,
    SettleReceipt,
)
from rowmill_contracts.run_questions import AskOldestRun, OldestRun
from rowmill_contracts.topology import ADMISSION_ASKS, RECEIPTS_CLAIMS, RECEIPTS_SETTLE

PAGE = 500
_DAY = 86_400.0


class ReceiptDesk:
    """Asks the receipt-store over ``bus``. Names are lower-case hexadecimal; one that fits no receipt, or several, is a `UsageError`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def listed(self, *, state: ReceiptState | None, run_id: str | None, tool: str | None, limit: int) -> list[ReceiptView]:
        """At most ``limit`` receipts in the order of their digests."""
        found: list[ReceiptView] = []
        after = ""
        while len(found) < limit:
            page = ListReceipts(state=state, run_id=run_id, tool=tool, limit=min(PAGE, limit - len(found)), after=after)
            listed = await self._bus.ask(page, RECEIPTS_CLAIMS, ReceiptsListed)
            found += listed.receipts
            after = listed.after
            if not after:
                break
        return found

    async def shown(self, name: str) -> ReceiptView:
        """One receipt, with its output."""
        shown = await self._bus.ask(GetReceipt(receipt=name), RECEIPTS_CLAIMS, ReceiptShown)
        if shown.receipt is None:
            raise _misnamed(name, several=shown.matches > 1)
        return shown.receipt

    async def settle(self, request: SettleReceipt) -> ReceiptSettled:
        """Store an operator's word on how a dispatch ended."""
        return self._named(request.receipt, await self._bus.ask(request, RECEIPTS_SETTLE, ReceiptSettled))

    async def replay(self, name: str) -> ReceiptSettled:
        """Allow one more dispatch."""
        return self._named(name, await self._bus.ask(ReplayReceipt(receipt=name), RECEIPTS_SETTLE, ReceiptSettled))

    async def prune(self, older_than: float, *, dry_run: bool) -> dict[str, int]:
        """Forget what ended more than ``older_than`` seconds ago and no run could need that is not over or can be retried, page by page; answers how
        much that was.

        Old outputs are retired first: they serve no run that starts from then on. What such a run could still be served by is
        forgotten by a later pruning. A page whose answer is lost is asked for again, and then counts nothing: the figures are a lower bound.
        """
        total = {"completed": 0, "ended": 0, "failures": 0, "bytes": 0, "retired": 0}
        now = time.time()
        if not dry_run:
            now = await self._each_page(PruneReceipts(older_than=older_than), total)
        oldest = (await self._bus.ask(AskOldestRun(), ADMISSION_ASKS, OldestRun)).started_at
        if oldest is None:  # a dry run has retired nothing, and counts as if it had
            oldest = now + _DAY if dry_run else now
        await self._each_page(PruneReceipts(older_than=older_than, oldest_run=oldest, dry_run=dry_run), total)
        return total

    async def _each_page(self, request: PruneReceipts, total: dict[str, int]) -> float:
        """Ask for page after page, adding up; answers the last one's time."""
        while True:
            page = await self._bus.ask(request, RECEIPTS_SETTLE, ReceiptsPruned)
            for name in total:
                total[name] += getattr(page, name)
            if not page.after:
                return page.at
            request = msgspec.structs.replace(request, after=page.after)

    def _named(self, name: str, settled: ReceiptSettled) -> ReceiptSettled:
        if settled.state in {"absent", "ambiguous"}:
            raise _misnamed(name, several=settled.state == "ambiguous")
        return settled


def _misnamed(name: str, *, several: bool) -> UsageError:
    return UsageError(f"several receipts begin with {name!r}: write more of it" if several else f"no receipt begins with {name!r}")
