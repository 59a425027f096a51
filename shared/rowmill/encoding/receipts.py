"""Keys of receipts: digests of everything that makes two units of outside work the same (SPEC 3.1, 3.7)."""

from __future__ import annotations

import hashlib

import msgspec

from rowmill.errors import UsageError

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


def scope_of(cache: str, play: str, run_id: str) -> str:
    """The scope of a receipt: ``org`` shares with every play, ``play`` within the play, ``run`` within the run. Raises `UsageError`."""
    if cache == "org":
        return ""
    if cache == "play":
        return f"play:{play}"
    if cache == "run":
        return f"run:{run_id}"
    raise UsageError(f"cache must be one of org, play, run, not {cache!r}")


def short_digest(receipt_key: str) -> str:
    """What people are shown: enough to find the receipt, too little to be its key."""
    return receipt_key[:_SHORT]
