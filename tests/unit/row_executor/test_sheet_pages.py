"""Rows that are read back from the sheet-writer, where nobody answers."""

from __future__ import annotations

from typing import Any

import pytest

from rowmill.errors import AskTimeout
from rowmill_row_executor.endings import NeighbourAway
from rowmill_row_executor.sheets import SheetPages


class Silent:
    async def ask(self, message: Any, key: str, answer: type[Any], *, timeout: float | None = None) -> Any:
        raise AskTimeout("no answer")


async def test_a_silent_sheet_writer_is_no_error_of_the_row_that_asks() -> None:
    pages = SheetPages(Silent())
    with pytest.raises(NeighbourAway):
        await pages.read_page("r", "d", 0, 10)
    with pytest.raises(NeighbourAway):
        await pages.count("r", "d")
