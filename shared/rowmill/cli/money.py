"""Amounts of money as people type them."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from rowmill.errors import UsageError


def amount(option: str, text: str) -> Decimal:
    """The amount that ``text`` says; raises `UsageError` naming ``option`` where it is none, or negative."""
    try:
        found = Decimal(text)
    except InvalidOperation:
        raise UsageError(f"{option} {text!r} is not an amount; write it as 5.00") from None
    if not found.is_finite() or found < 0:
        raise UsageError(f"{option} {text!r} must be zero or more")
    return found
