"""Messages into what the receipts work on: keys as bytes, money checked. Pure.

A request that is wrong in one item is refused as a whole, before it is merged with others.
"""

from __future__ import annotations

from collections.abc import Sequence

from rowmill.errors import MalformedMessage
from rowmill_contracts.budgets import is_amount
from rowmill_contracts.receipts import (
    ClaimReceipts,
    Complete,
    Completion,
    Confirm,
    Fail,
    FailedCall,
    LeaseRef,
    Release,
    Renew,
    SettleReceipt,
)
from rowmill_contracts.shards import LeaseShard
from rowmill_receipt_store.leases import Wanted
from rowmill_receipt_store.shards import spending_term
from rowmill_receipt_store.store import Completed, Failed, Lease

_KEY_BYTES = 32


def key_bytes(key: str) -> bytes:
    """The digest that a receipt key spells in 64 hexadecimal digits. Raises `MalformedMessage` if it is none."""
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        digest = b""
    if len(digest) != _KEY_BYTES or len(key) != 2 * _KEY_BYTES:  # fromhex skips spaces
        raise MalformedMessage(f"receipt key {key[:80]!r} is not a SHA-256 in hexadecimal digits")
    return digest


def wanted(request: ClaimReceipts) -> list[Wanted]:
    """The claims of a request. Raises `MalformedMessage` for a bad key or a cost that is negative or no number."""
    for claim in request.claims:
        if not is_amount(claim.cost):
            raise MalformedMessage(f"cost {claim.cost} of receipt {claim.key[:12]} is not an amount")
    return [Wanted(key_bytes(claim.key), claim, request) for claim in request.claims]


def leases(request: Confirm | Renew | Release) -> list[Lease]:
    """The leases of a request. Raises `MalformedMessage` for a bad key."""
    if isinstance(request, Confirm):
        term = spending_term(request.shard, request.term)
        return [_lease(ref, request.shard, term, ref.batch_id or request.batch_id, alone=request.alone) for ref in request.leases]
    presence = request.presence if isinstance(request, Renew) else ""
    return [_lease(ref, presence=presence) for ref in request.leases]


def completed(request: Complete) -> list[Completed]:
    """The results of a request. Raises `MalformedMessage` for a bad key or a cost that is no number."""
    return [_completed(completion) for completion in request.completions]


def failed(request: Fail) -> list[Failed]:
    """The failures of a request. Raises `MalformedMessage` for a bad key."""
    return [_failed(failure) for failure in request.failures]


def shards(request: LeaseShard) -> LeaseShard:
    """The request as it is. Raises `MalformedMessage` for terms that are not those of its shards."""
    if request.terms and len(request.terms) != len(request.shards):
        raise MalformedMessage(f"{len(request.terms)} terms of {len(request.shards)} shards of {request.holder}: name one for each, or none")
    return request


def settlement(request: SettleReceipt) -> SettleReceipt:
    """The request as it is. Raises `MalformedMessage` for a cost that is no amount."""
    if request.cost is not None and not is_amount(request.cost):
        raise MalformedMessage(f"cost {request.cost} of receipt {request.receipt[:12]} is not an amount")
    return request


def output_bytes(results: Sequence[Completed]) -> int:
    """The bytes of all outputs."""
    return sum(len(result.output) for result in results)


def _lease(ref: LeaseRef, shard: int | None = None, term: int | None = None, batch_id: str = "", *, presence: str = "", alone: bool = False) -> Lease:
    return Lease(
        key=key_bytes(ref.key),
        lease_id=ref.lease_id,
        run_id=ref.run_id,
        dispatch=ref.dispatch,
        shard=shard,
        term=term,
        batch_id=batch_id,
        presence=presence,
        alone=alone,
    )


def _completed(completion: Completion) -> Completed:
    if not is_amount(completion.cost):
        raise MalformedMessage(f"cost {completion.cost} of receipt {completion.key[:12]} is not an amount")
    return Completed(
        key=key_bytes(completion.key),
        lease_id=completion.lease_id,
        dispatch=completion.dispatch,
        run_id=completion.run_id,
        output=memoryview(completion.output),
        no_result=completion.no_result,
        cost=completion.cost,
    )


def _failed(call: FailedCall) -> Failed:
    if call.given_up is not None and (call.lease_id or call.dispatch or call.outcome_unknown or not call.final):
        raise MalformedMessage(f"receipt {call.key[:12]}: what was given up has no lease, and no other outcome")
    return Failed(
        key=key_bytes(call.key),
        lease_id=call.lease_id,
        dispatch=call.dispatch,
        run_id=call.run_id,
        becomes="outcome_unknown" if call.outcome_unknown else "failed" if call.final else "released",
        failure=call.failure,
        refund=not call.charged,
        given_up=call.given_up,
    )
