"""Staged inputs as decisions: what a page holds, whether a seal and the pages agree. Pure; knows no table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rowmill.runtime.deliveries import Rejected
from rowmill_contracts.counts import Problem
from rowmill_contracts.digests import input_digest, page_digest
from rowmill_contracts.runs import InputSealed


@dataclass(frozen=True, slots=True)
class Input:
    """An input as stored. ``pages`` and ``rows`` arrived; the ``seal_`` fields are what its seal says, None before it came."""

    input_id: str
    state: Literal["open", "sealed", "failed"]
    pages: int = 0
    rows: int = 0
    seal_pages: int | None = None
    seal_rows: int | None = None
    seal_digest: str | None = None
    error: Problem | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page as it is stored: ``body`` is the JSON array of its rows."""

    input_id: str
    page: int
    rows: int
    digest: bytes
    body: bytes


class _AnyObject(msgspec.Struct):
    """Decodes from any JSON object, whatever its fields."""


_objects = msgspec.json.Decoder(list[_AnyObject])
_rows = msgspec.json.Decoder(list[msgspec.Raw])


def page_of(input_id: str, page: int, rows: Sequence[msgspec.Raw]) -> StoredPage:
    """The page to store.

    Raises:
        Rejected: a row is not a JSON object; names its place.

    """
    body = b"[" + b",".join(rows) + b"]"
    try:
        _objects.decode(body)
    except msgspec.ValidationError as error:
        raise Rejected(f"page {page} of input {input_id!r}: every row must be a JSON object: {error}") from error
    return StoredPage(input_id, page, len(rows), page_digest(map(memoryview, rows)), body)


def rows_of(body: bytes) -> list[msgspec.Raw]:
    """The rows of a stored page, undecoded."""
    return _rows.decode(body)


def cut(rows: Sequence[msgspec.Raw], max_rows: int, max_bytes: int) -> Iterator[Sequence[msgspec.Raw]]:
    """Slices of at most ``max_rows`` and ``max_bytes``; a larger single row stands alone."""
    start, size = 0, 0
    for place, row in enumerate(rows):
        length = memoryview(row).nbytes
        if place > start and (place - start == max_rows or size + length > max_bytes):
            yield rows[start:place]
            start, size = place, 0
        size += length
    if start < len(rows):
        yield rows[start:]


def conflicting(input_id: str, page: int) -> Problem:
    return Problem(code="input", message=f"page {page} of input {input_id!r} was published twice with different rows")


def abandoned(input_id: str, seconds: float) -> Problem:
    return Problem(code="input", message=f"input {input_id!r} was not sealed within {seconds:g} s of its last page")


def sealed_twice(known: Input, seal: InputSealed) -> Problem | None:
    """Whether this seal contradicts the one that is stored."""
    if known.seal_pages is None or known.seal_rows is None:
        return None
    return seals_differ(InputSealed(input_id=known.input_id, pages=known.seal_pages, rows=known.seal_rows), seal)


def seals_differ(first: InputSealed, seal: InputSealed) -> Problem | None:
    """Whether two seals of one input speak of different sizes."""
    if (first.pages, first.rows) == (seal.pages, seal.rows):
        return None
    return Problem(
        code="input",
        message=f"input {seal.input_id!r} was sealed as {first.pages} pages of {first.rows} rows, then as {seal.pages} of {seal.rows}",
    )


def may_be_whole(known: Input) -> bool:
    """Whether the seal is here and at least as many pages as it says: the time to look at them all."""
    return known.seal_pages is not None and known.pages >= known.seal_pages


def verdict(known: Input, pages: Iterable[tuple[int, int, bytes]]) -> Problem | None:
    """What is wrong with an input that `may_be_whole`; None: it is sealed. ``pages``: (number, rows, digest) in order."""
    numbers, rows, digests = [], 0, []
    for number, count, digest in pages:
        numbers.append(number)
        rows += count
        digests.append(digest)
    if numbers != list(range(known.seal_pages or 0)):
        return Problem(
            code="input",
            message=f"input {known.input_id!r} was sealed with {known.seal_pages} pages, but has pages numbered up to {max(numbers, default=-1)}",
        )
    if rows != known.seal_rows:
        return Problem(code="input", message=f"input {known.input_id!r} was sealed with {known.seal_rows} rows, but its pages hold {rows}")
    if known.seal_digest is not None and known.seal_digest.lower() != input_digest(digests):
        return Problem(code="input", message=f"input {known.input_id!r}: the seal's digest is not the digest of its pages")
    return None
