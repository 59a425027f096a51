"""Which outputs can be stored (SPEC 2.11, 3.10), and the failure that the others become. Pure."""

from __future__ import annotations

from rowmill_contracts.tools import ToolFailure


def rejection(output: bytes | memoryview, *, tool: str, limit: int) -> ToolFailure | None:
    """Why an output cannot be stored: over ``limit`` bytes, or not text in UTF-8. None: it can."""
    if len(output) > limit:
        message = f"the result is {len(output)} bytes long; at most {limit} can be stored"
        return ToolFailure(tool=tool, code="too_large", message=message, origin="receipts", category="too_large")
    try:
        str(output, "utf-8")
    except UnicodeDecodeError as error:
        message = f"the result is not UTF-8: {error.reason} at byte {error.start}"
        return ToolFailure(tool=tool, code="not_decodable", message=message, origin="receipts", category="bad_answer")
    return None
