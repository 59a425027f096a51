"""What an operator may see of receipts, and decide where nobody knows how a dispatch ended (SPEC 3.6). Every request may come twice.

A decision is stored as the missing outcome of that dispatch, under its own lease and number, so that it never overrides one that came meanwhile.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec

from rowmill_contracts.receipts import (
    GetReceipt,
    ListReceipts,
    PruneReceipts,
    ReceiptSettled,
    ReceiptShown,
    ReceiptsListed,
    ReceiptsPruned,
    ReplayReceipt,
    SettleReceipt,
)
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.operator_store import Named, OperatorStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Completed, Failed


class Operating:
    """Looks by ``store``, decides through ``receipts``."""

    def __init__(self, store: OperatorStore, receipts: Receipts) -> None:
        self._store = store
        self._receipts = receipts

    async def listed(self, request: ListReceipts) -> ReceiptsListed:
        """One page."""
        views, after = await self._store.listed(request)
        return ReceiptsListed(receipts=views, after=after)

    async def shown(self, request: GetReceipt) -> ReceiptShown:
        """One receipt with its output, or how many the name fits."""
        found = await self._store.named(request.receipt)
        return ReceiptShown(matches=len(found), receipt=found[0].view if len(found) == 1 else None)

    async def pruned(self, request: PruneReceipts) -> ReceiptsPruned:
        """One page, retired or forgotten."""
        if request.oldest_run is None:
            return await self._store.retired(request.older_than, request.after)
        return await self._store.pruned(request.older_than, request.after, request.oldest_run, dry_run=request.dry_run)

    async def settle(self, request: SettleReceipt) -> ReceiptSettled:
        """Store how a dispatch of unknown outcome ended."""
        found = await self._store.named(request.receipt)
        if len(found) != 1:
            return ReceiptSettled(state="ambiguous" if found else "absent")
        named = found[0]
        output = _document(request.output)
        if named.view.state != "outcome_unknown":
            decided = (
                named.view.state == "completed" and bytes(named.view.output) == output
                if request.outcome == "completed"
                else named.view.state == "failed" and named.view.failure == _failure(named, request.message)
            )
            return ReceiptSettled(state="decided" if decided else "not_unknown", receipt=named.view)
        if request.outcome == "failed":
            return await self._fail(named, request.receipt, "failed", request.message)
        result = Completed(
            key=named.key,
            lease_id=named.lease_id,
            dispatch=named.view.dispatch,
            run_id=named.view.run_id,
            output=output,
            no_result=request.no_result,
            cost=Decimal(named.reserved if request.cost is None else request.cost),
        )
        answer = (await self._receipts.complete([result]))[0]
        return await self._now(request.receipt, {"stored": "decided", "rejected": "rejected"}.get(answer.state, "not_unknown"))

    async def replay(self, request: ReplayReceipt) -> ReceiptSettled:
        """Free the key after a dispatch of unknown outcome."""
        found = await self._store.named(request.receipt)
        if len(found) != 1:
            return ReceiptSettled(state="ambiguous" if found else "absent")
        if found[0].view.state != "outcome_unknown":
            return ReceiptSettled(state="decided" if found[0].view.state == "released" else "not_unknown", receipt=found[0].view)
        return await self._fail(found[0], request.receipt, "released", "")

    async def _fail(self, named: Named, name: str, becomes: Literal["failed", "released"], message: str) -> ReceiptSettled:
        failed = Failed(
            key=named.key,
            lease_id=named.lease_id,
            dispatch=named.view.dispatch,
            run_id=named.view.run_id,
            becomes=becomes,
            failure=_failure(named, message) if becomes == "failed" else named.view.failure or _failure(named, "replayed by an operator"),
            refund=False,
        )
        answer = (await self._receipts.fail([failed]))[0]
        return await self._now(name, "decided" if answer.state == "stored" else "not_unknown")

    async def _now(self, name: str, state: str) -> ReceiptSettled:
        shown = await self.shown(GetReceipt(receipt=name))
        return msgspec.convert({"state": state, "receipt": shown.receipt}, ReceiptSettled)


def _failure(named: Named, message: str) -> ToolFailure:
    return ToolFailure(
        tool=named.view.tool, code="settled", message=message or "settled as failed by an operator", origin="operator", category="settled"
    )


def _document(body: msgspec.Raw) -> bytes:
    """The stored document of a call whose answer had this body."""
    return b'{"raw":%s}' % bytes(body)
