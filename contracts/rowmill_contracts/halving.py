"""Messages that are pages: what they hold may as well come in two."""

from __future__ import annotations

from typing import Final

import msgspec

from rowmill_contracts.envelope import Message
from rowmill_contracts.rows import RowsSettled, RowTasks
from rowmill_contracts.runs import RowsParked
from rowmill_contracts.tools import ToolCalls

PAGES: Final[dict[type[Message], str]] = {RowTasks: "rows", RowsSettled: "rows", RowsParked: "rows", ToolCalls: "calls"}
"""Messages whose items do not depend on each other, by the field that holds them. Answered in any grouping, or not at all."""


def halves(message: Message) -> tuple[Message, Message] | None:
    """The page as two of half its items each, in order; None for a page of one item and for what is no page."""
    field = PAGES.get(type(message))
    items = getattr(message, field) if field is not None else ()
    if field is None or len(items) < 2:
        return None
    middle = len(items) // 2
    return msgspec.structs.replace(message, **{field: items[:middle]}), msgspec.structs.replace(message, **{field: items[middle:]})
