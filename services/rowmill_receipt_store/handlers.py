"""What is done with each message: hand it to the merger, answer after the commit. Requests on the settle queue go before claims."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_contracts.charges import AskCharges
from rowmill_contracts.envelope import Message
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import (
    ClaimReceipts,
    Complete,
    Completed,
    Confirm,
    Confirmed,
    Fail,
    GetReceipt,
    HaltRun,
    ListReceipts,
    PruneReceipts,
    ReceiptsClaimed,
    Release,
    Released,
    Renew,
    Renewed,
    ReplayReceipt,
    SettleReceipt,
)
from rowmill_contracts.shards import LeaseShard
from rowmill_receipt_store import requests
from rowmill_receipt_store.leasing import Leasing
from rowmill_receipt_store.merging import Merger
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts

RequestT = TypeVar("RequestT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)


class Handlers:
    """Consumes `receipts.settle.v1` (`settle`) and `receipts.claims.v1` (`claim`). Returning acknowledges: the effect is stored by then."""

    def __init__(self, bus: Bus, receipts: Receipts, presences: PresenceStore, leasing: Leasing, operating: Operating, merger: Merger) -> None:
        self._bus = bus
        self._operating = operating
        # The order is the order of urgency: what is sent and what must stop, then what frees others, then new work.
        self._shards = merger.kind(_one_by_one(leasing.lease))
        self._presences = merger.kind(_one_by_one(presences.keep))
        self._halts = merger.kind(_one_by_one(receipts.halt_run))
        self._confirms = merger.kind(receipts.confirm)
        self._completions = merger.kind(receipts.complete)
        self._failures = merger.kind(receipts.fail)
        self._renewals = merger.kind(receipts.renew)
        self._releases = merger.kind(receipts.release)
        self._charges = merger.kind(receipts.charged)
        self._claims = merger.kind(receipts.claim)

    async def claim(self, delivery: Delivery) -> None:
        """One queue's messages: claims, and operators' questions."""
        match delivery.message:
            case ClaimReceipts() as request:
                answers = await self._claims.ask(requests.wanted(request))
                await self._bus.reply(delivery, ReceiptsClaimed(answers=answers))
            case ListReceipts() as question:
                await self._bus.reply(delivery, await self._operating.listed(question))
            case GetReceipt() as question:
                await self._bus.reply(delivery, await self._operating.shown(question))
            case other:
                raise Rejected(f"{other.message_type} is not for the claims of the receipt-store")

    async def settle(self, delivery: Delivery) -> None:
        """The other queue's: all that follows a claim, shards, runs and their charges, operators' decisions."""
        await self._bus.reply(delivery, await self._settled(delivery))

    async def _settled(self, delivery: Delivery) -> Message:
        match delivery.message:
            case Confirm() as confirm:
                return Confirmed(answers=await self._confirms.ask(requests.leases(confirm)))
            case Complete() as complete:
                results = requests.completed(complete)
                return Completed(answers=await self._completions.ask(results, weight=requests.output_bytes(results)))
            case Fail() as fail:
                return Completed(answers=await self._failures.ask(requests.failed(fail)))
            case Renew() as renew:
                return Renewed(held=await self._renewals.ask(requests.leases(renew)))
            case Release() as release:
                return Released(released=sum(await self._releases.ask(requests.leases(release))))
            case LeaseShard() as shards:
                return (await self._shards.ask([requests.shards(shards)]))[0]
            case KeepPresence() as presence:
                return (await self._presences.ask([presence]))[0]
            case HaltRun() as halt:
                return (await self._halts.ask([halt]))[0]
            case AskCharges() as question:
                return (await self._charges.ask([question]))[0]
            case SettleReceipt() as settlement:
                return await self._operating.settle(requests.settlement(settlement))
            case ReplayReceipt() as replay:
                return await self._operating.replay(replay)
            case PruneReceipts() as pruning:
                return await self._operating.pruned(pruning)
            case other:
                raise Rejected(f"{other.message_type} is not for the receipt-store to settle")


def _one_by_one(act: Callable[[RequestT], Awaitable[AnswerT]]) -> Callable[[Sequence[RequestT]], Awaitable[list[AnswerT]]]:
    """Few and small: not worth a statement that carries many."""

    async def carry_out(items: Sequence[RequestT]) -> list[AnswerT]:
        return [await act(item) for item in items]

    return carry_out
