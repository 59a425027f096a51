"""Replayed pages: rows that must wait come round again with their page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rowmill.runtime.deliveries import REPLAYED, Rejected
from rowmill_contracts.envelope import decode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import ParkedRow
from rowmill_contracts.topology import EXECUTOR_ROWS
from rowmill_row_executor.replays import ReplayTicket, send_round


class Published:
    def __init__(self) -> None:
        self.sent: list[tuple[RowTasks, str, dict[str, Any]]] = []

    async def publish_body(self, body: bytes, message_type: str, key: str, **options: Any) -> None:
        message = decode(message_type, body)
        assert isinstance(message, RowTasks)
        self.sent.append((message, key, options))


def page() -> RowTasks:
    rows = [RowTask(key=f"{index:064x}", index=index, page=0, data=msgspec.Raw(b'{"x":1}'), known=msgspec.Raw(b'{"k":2}')) for index in range(3)]
    return RowTasks(run_id="r", number=1, org="o", play="p", dataset="d", started_at=5.0, code_digest="c", rows=rows)


def wait(index: int, wait_ms: int | None) -> ParkedRow:
    return ParkedRow(key=f"{index:064x}", index=index, page=0, attempt=1, waits=4, wait_ms=wait_ms, asked=99.0)


async def test_the_rows_that_are_left_come_again_with_all_that_the_page_said_of_them() -> None:
    bus, ticket = Published(), ReplayTicket(3)
    ticket.done()
    assert ticket.keep(wait(2, 30_000), reason="rate", halted=False)
    assert ticket.keep(wait(1, 4_000), reason="rate", halted=False)
    await ticket.wait()
    await send_round(bus, page(), ticket, "one")  # type: ignore[arg-type]
    ((sent, key, options),) = bus.sent
    assert (key, options["exchange"], options["headers"]) == (EXECUTOR_ROWS, "rowmill.delay.5s", {REPLAYED: "one"})
    assert [(row.index, row.attempt, row.waits, row.asked, bytes(row.data), bytes(row.known)) for row in sent.rows] == [
        (1, 1, 4, 99.0, b'{"x":1}', b'{"k":2}'),
        (2, 1, 4, 99.0, b'{"x":1}', b'{"k":2}'),
    ]
    assert msgspec.structs.replace(sent, rows=[]) == msgspec.structs.replace(page(), rows=[])


async def test_what_is_due_soon_comes_soon() -> None:
    bus, ticket = Published(), ReplayTicket(1)
    ticket.keep(wait(0, 300), reason="rate", halted=False)
    await send_round(bus, page(), ticket, "one")  # type: ignore[arg-type]
    assert bus.sent[0][2]["exchange"] == "rowmill.delay.1s"


async def test_a_page_whose_rows_have_all_ended_does_not_come_again() -> None:
    bus, ticket = Published(), ReplayTicket(1)
    ticket.done()
    await send_round(bus, page(), ticket, "one")  # type: ignore[arg-type]
    assert bus.sent == []


async def test_a_page_of_a_halted_run_dies_again() -> None:
    bus, ticket = Published(), ReplayTicket(1)
    ticket.keep(wait(0, None), reason="budget", halted=True)
    with pytest.raises(Rejected, match=r"run r is halted \(budget\)"):
        await send_round(bus, page(), ticket, "one")  # type: ignore[arg-type]
    assert bus.sent == []
