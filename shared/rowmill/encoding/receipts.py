"""Keys of receipts: digests of everything that makes two units of outside work the same (SPEC 3.1, 3.7)."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Cache = Literal["org", "play", "run", "none"]
"""Who shares the result of a call: every play of the organisation, its play, its run, or nobody but the same logical call made again."""

_SHORT = 12


def receipt_key(org: str, scope: str, tool_id: str, tool_version: str, canonical_input: bytes, credential_scope: str) -> str:
    """The receipt's key, hexadecimal SHA-256.

    ``scope``: empty where equal calls of any play share, else what narrows it (see `scope_of`). ``canonical_input``: from
    `rowmill.encoding.canonical.canonical`, over the input as the tool encodes it. ``credential_scope``: see `rowmill.secret`.
    """
    facts = msgspec.json.encode(["receipt.v1", org, scope, tool_id, tool_version, credential_scope])
    return hashlib.sha256(facts + b"\n" + canonical_input).hexdigest()


def idempotency_key(receipt_key: str, forced_run_id: str | None = None) -> str:
    """What the provider is sent: the same for every retry and redelivery of a logical call.

    A forced call is another piece of work, once per run, so its key is made from the run too.
    """
    facts = ["idempotency.v1", receipt_key] if forced_run_id is None else ["idempotency.v1", receipt_key, forced_run_id]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def scope_of(cache: Cache, *, play: str, run_id: str, caller: str, call: str) -> str:
    """The scope of a receipt: who shares it. ``caller`` (a row, or the body) and ``call`` (its id there) name the logical call within its run,
    whatever delivery, wait or attempt it is made in.
    """
    match cache:
        case "org":
            return ""
        case "play":
            return f"play:{play}"
        case "run":
            return f"run:{run_id}"
        case "none":
            return f"call:{msgspec.json.encode([run_id, caller, call]).decode()}"


def short_digest(receipt_key: str) -> str:
    """What people are shown: enough to find the receipt, too little to be its key."""
    return receipt_key[:_SHORT]
