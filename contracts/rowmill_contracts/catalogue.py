"""Every kind of message: who decodes by this module knows all that may travel. A dead letter, or a hint to all, may be of any kind."""

from __future__ import annotations

from rowmill_contracts import asks, charges, events, in_hand, presences, receipts, retries, row_keys, rows, run_questions, runs, shards, tools
from rowmill_contracts.envelope import MESSAGES, decode

__all__ = ["MESSAGES", "decode"]

MODULES = (runs, run_questions, rows, row_keys, tools, receipts, presences, retries, shards, charges, events, in_hand, asks)
"""Imported so that every message is registered."""
