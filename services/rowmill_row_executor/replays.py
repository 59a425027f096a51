"""Replayed pages: rows that had died, brought to their end after nobody waits for them any more.

Admission counted these rows as ended when their page died; it keeps no wait for them and may have closed their dataset. So a row that must wait is
not parked: the page itself comes round again with the rows that are left, through a delay queue, until each has ended (docs/adr/0009-replays.md).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import REPLAYED, Delivery, Rejected
from rowmill.runtime.rest import Rest
from rowmill_contracts.envelope import encode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import ParkedRow
from rowmill_contracts.topology import EXECUTOR_ROWS
from rowmill_row_executor.settling import PageTicket

_SHORT_DELAY_MS: Final = 1000


def is_replayed(delivery: Delivery) -> bool:
    return REPLAYED in delivery.headers


class ReplayTicket(PageTicket):
    """Keeps the rows that must wait. ``halted``: why the run makes no calls, if that is why."""

    __slots__ = ("halted", "kept")

    def __init__(self, rows: int, rest: Rest | None = None) -> None:
        super().__init__(rows, rest)
        self.kept: list[ParkedRow] = []
        self.halted: str | None = None

    def keep(self, row: ParkedRow, *, reason: str, halted: bool) -> bool:
        self.kept.append(row)
        if halted:
            self.halted = reason
        self.done()
        return True


async def send_round(bus: Bus, page: RowTasks, ticket: ReplayTicket, replay: Any) -> None:
    """Have the rows that were kept worked again in a while, confirmed; nothing where each row has ended. ``replay``: which it is (see `REPLAYED`).

    Raises:
        Rejected: the run is halted. The page dies again, so that it can be replayed once the run goes on.

    """
    if not ticket.kept:
        return
    if ticket.halted is not None:
        raise Rejected(f"replayed rows cannot be worked: run {page.run_id} is halted ({ticket.halted}); resume it, then replay them again")
    waiting = {row.index: row for row in ticket.kept}
    rows = [_coming_back(task, waiting[task.index]) for task in page.rows if task.index in waiting]
    soonest = min(row.wait_ms or 0 for row in ticket.kept)
    await bus.publish_body(
        encode(msgspec.structs.replace(page, rows=rows)),
        RowTasks.message_type,
        EXECUTOR_ROWS,
        exchange="rowmill.delay.1s" if soonest <= _SHORT_DELAY_MS else "rowmill.delay.5s",
        correlation_id=page.run_id,
        headers={REPLAYED: replay},
    )


def _coming_back(task: RowTask, wait: ParkedRow) -> RowTask:
    return msgspec.structs.replace(task, waits=wait.waits, asked=wait.asked)
