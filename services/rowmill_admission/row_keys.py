"""Row keys of a page and which of its rows are duplicates. Pure. Keys come from the raw input row: admission loads no author code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from rowmill.encoding.canonical import row_key, source_row_key
from rowmill.errors import KeyPartMissing
from rowmill_contracts.runs import OpenDataset

DIGEST_BYTES: Final = 16
"""Of a key's 32 bytes this many are kept to find duplicates by (SPEC 2.3)."""

_decode = msgspec.json.Decoder(dict).decode


def keys_of(rows: Sequence[msgspec.Raw], first_index: int, definition: OpenDataset) -> list[bytes]:
    """The rows' keys, 32 bytes each: by key columns, the whole row, or the record's place in its input.

    Raises:
        KeyPartMissing: a part of a key is absent, null or empty; names part and row, as a person counts it.
        ValueNotStorable: a row has no canonical form.

    """
    if definition.source_row_identity:
        return [source_row_key(definition.input_id, first_index + place, bytes(row)) for place, row in enumerate(rows)]
    columns = definition.key
    try:
        return [row_key(_decode(row), columns) for row in rows]
    except KeyPartMissing:
        for place, row in enumerate(rows):  # only now with the row's place, which costs a keyword per row
            row_key(_decode(row), columns, index=first_index + place)
        raise


class SeenKeys:
    """Digests of the keys met so far in a dataset, in about 25 bytes each (a set of bytes objects takes over 100).

    Digests lie back to back in buckets by their first two bytes. Not for digests that an adversary may choose.
    """

    def __init__(self) -> None:
        self._buckets: dict[bytes, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, digest: bytes) -> bool:
        """Whether the digest (`DIGEST_BYTES` long) is new."""
        bucket = self._buckets.get(digest[:2])
        if bucket is None:
            self._buckets[digest[:2]] = bytearray(digest)
            self._count += 1
            return True
        at = bucket.find(digest)
        while at % DIGEST_BYTES:  # a match across two digests, or none (-1)
            if at < 0:
                bucket += digest
                self._count += 1
                return True
            at = bucket.find(digest, at + 1)
        return False

    def restore(self, digests: bytes) -> None:
        """Take in digests that were stored back to back."""
        for start in range(0, len(digests), DIGEST_BYTES):
            self.add(digests[start : start + DIGEST_BYTES])


def duplicates_among(keys: Sequence[bytes], seen: SeenKeys) -> tuple[set[int], bytes]:
    """Places in the page of rows whose key was met before, and the digests of the others, back to back."""
    duplicates: set[int] = set()
    new: list[bytes] = []
    for place, key in enumerate(keys):
        digest = key[:DIGEST_BYTES]
        if seen.add(digest):
            new.append(digest)
        else:
            duplicates.add(place)
    return duplicates, b"".join(new)
