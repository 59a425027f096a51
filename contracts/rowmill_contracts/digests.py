"""Digests that both sides of a message must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

SHARDS = 16
"""Lanes hash onto this many shards (DESIGN.md, "tool-gateway")."""


def page_digest(rows: Iterable[bytes | memoryview]) -> bytes:
    """SHA-256 over the rows' JSON texts, each followed by a line feed."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row)
        digest.update(b"\n")
    return digest.digest()


def input_digest(pages: Iterable[bytes]) -> str:
    """Hexadecimal SHA-256 over the pages' digests in page order."""
    digest = hashlib.sha256()
    for page in pages:
        digest.update(page)
    return digest.hexdigest()


def plain_digest(document: bytes | memoryview) -> str:
    """Hexadecimal SHA-256 over a JSON document, the same however its members are ordered and spaced."""
    return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(document), order="sorted")).hexdigest()


def shard_of(org: str, provider: str) -> int:
    """The shard of a lane: stable over processes and releases, since every executor and gateway must agree."""
    digest = hashlib.sha256(f"{org}\n{provider}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % SHARDS
