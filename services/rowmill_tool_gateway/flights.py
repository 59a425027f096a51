"""What is in the gateway's hand: pages of calls, the calls, and flights.

A flight is the one claim and request that all equal calls share (single flight): its key is the receipt's. Its first call is the payer, whose run
claims the receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from rowmill_contracts.receipts import LeaseRef
from rowmill_contracts.tools import CallItem

if TYPE_CHECKING:
    from rowmill_tool_gateway.groups import Group
    from rowmill_tool_gateway.lanes import Lane
    from rowmill_tool_gateway.toolbox import PreparedTool


class Stage(Enum):
    """Where a flight stands. Only `SENT` and `STORING` have spent anything that is not settled yet."""

    WAITING = auto()  # in its group's queue, nothing claimed
    LOOKING = auto()  # being looked up among stored outputs
    CLAIMING = auto()
    READY = auto()  # claimed, in its group
    SENT = auto()  # its request is under way (or its confirm right before)
    STORING = auto()  # its outcome is being stored
    PAUSED = auto()  # a timer brings it back to its group: another holder's lease, or the wait before a retry
    RELEASING = auto()  # claimed, given back unsent
    OVER = auto()


@dataclass(slots=True, eq=False)
class Page:
    """One delivery of `ToolCalls`. ``arrived``: by the process's monotonic clock. ``done``: set when every call is answered."""

    run_id: str
    org: str
    started_at: float
    forced: bool
    reply_to: str
    arrived: float
    done: asyncio.Future[None]
    calls: list[Call] = field(default_factory=list)
    unsent: int = 0
    """Answers that are not on their way yet."""


@dataclass(slots=True, eq=False)
class Call:
    """One asked call. ``deadline``: when it is deferred unless its request was sent. ``late``: it is past that and waits for no more."""

    page: Page
    item: CallItem
    deadline: float
    flight: Flight | None = None
    answered: bool = False
    late: bool = False

    @property
    def forced(self) -> bool:
        return self.page.forced or self.item.force

    def is_asked_by(self, run_id: str, caller: str) -> bool:
        return self.item.row == caller and self.page.run_id == run_id

    def asks_as(self, other: Call) -> bool:
        """Whether a stored output that serves the one serves the other."""
        return (
            self.page.started_at == other.page.started_at
            and self.item.stale_after == other.item.stale_after
            and self.forced == other.forced
            and self.page.run_id == other.page.run_id
        )


@dataclass(slots=True, eq=False)
class Flight:
    """``asked``: when its oldest call was first asked for, seconds since the epoch. ``looked``: its stored
    output was looked for and there was none.
    """

    key: str
    tool: PreparedTool
    lane: Lane
    group: Group[Flight]
    asked: float
    input: msgspec.Raw
    calls: list[Call] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    ticket: int = 0
    """Its place among those that wait; 0 before it has one."""
    timer: asyncio.TimerHandle | None = None
    appointed: float = float("-inf")
    """When those of its calls that were sent away are to come again, by the monotonic clock: others need no appointment besides."""
    refreshed: bool = False
    looked: bool = False
    lease_id: str = ""
    dispatch: int = 0
    term: int | None = None
    """The term of its shard under which its lease was asked for."""
    lost: bool = False
    """Its lease was found to be another's by now."""
    budgeted: bool = False
    """A budget pays for it: only for that is it confirmed right before it is sent, and not by its claim."""
    paused_for: str = ""
    """What it waits for while it is paused, where that is not another's lease."""
    doubt: LeaseRef | None = None
    """The lease as it was asked for before, without an answer, where it is asked for again."""
    alone: bool = False
    """Gateways died with it in hand: it goes in a request of its own, with nothing beside it."""
    after_alone: Callable[[], None] | None = None
    """Told once its outcome is stored, or it is not sent after all: until then the death of the gateway would be taken for its own."""
    leased_at: float = 0.0
    """When its lease was taken or last renewed, by the monotonic clock."""
    payer_run: str = ""
    payer_row: str = ""
    forced: bool = False
    timeout: float = 0.0
    cost: Decimal = Decimal(0)
    credential: int = 0
    """Version of the credential that its request went with."""

    def start_anew(self, calls: list[Call]) -> None:
        """Forget what was tried for other callers."""
        self.calls = calls
        self.refreshed = self.looked = False
        self.forget_lease()

    def forget_lease(self) -> None:
        self.lost = self.alone = self.budgeted = False
        self.lease_id = ""
        self.dispatch = 0
        self.end_alone()

    def end_alone(self) -> None:
        """Its lease runs no more."""
        told, self.after_alone = self.after_alone, None
        if told is not None:
            told()
