"""The store that histories share, and how it is made to die or to be overtaken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from rowmill_receipt_store.leases import Found
from rowmill_receipt_store.operating import Operating
from rowmill_receipt_store.presence_store import PresenceStore
from rowmill_receipt_store.receipts import Receipts
from rowmill_receipt_store.store import Sought, Store
from rowmill_receipt_store.sweeping import Sweep

Meanwhile = Callable[[], Awaitable[None]]


class Died(Exception):
    """The store's process died between two statements."""


class OvertakenStore(Store):
    """Lets one thing happen after something was read and before anything is decided on it."""

    meanwhile: Meanwhile | None = None

    async def load(self, asked: Sequence[Sought], *, bodies: bool, open_charges: bool = False) -> dict[bytes, Found]:
        found = await super().load(asked, bodies=bodies, open_charges=open_charges)
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            await act()
        return found


@dataclass
class World:
    """What all histories share. ``steps``: requests made and other things that happened."""

    loop: asyncio.AbstractEventLoop
    store: OvertakenStore
    presences: PresenceStore
    receipts: Receipts
    operating: Operating
    sweep: Sweep
    look: asyncpg.Connection[Any]
    steps: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def pass_time(self, seconds: float) -> None:
        self.store.clock_offset += seconds
        self.presences.clock_offset += seconds
