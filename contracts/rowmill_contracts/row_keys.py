"""Deriving row keys by a play's own code: what admission asks of an executor."""

from __future__ import annotations

import msgspec

from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import Message, message


@message()
class KeyPage(Message, frozen=True, kw_only=True):
    """Derive the keys of these rows with the author's key function. ``first_index`` is the first row's place in the input."""

    run_id: str
    dataset: str
    page: int
    first_index: int
    rows: list[msgspec.Raw]


@message()
class PageKeys(Message, frozen=True, kw_only=True):
    """Row keys in hexadecimal, index-aligned; or the error that fails the run."""

    keys: list[str] = []
    error: Problem | None = None
