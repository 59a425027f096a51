"""Author code at work in this process, and the right of a call that is suspected of ending its gateway to go with nothing beside it.

One suspect goes at a time. While one waits for its turn or is under way nothing else begins, so that a death of the process is the suspect's own.
Knows nothing of lanes and receipts; who is kept waiting is looked at again when the way is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Solitude:
    """``patience``: seconds for which others wait at most: first for those before the suspect to end, then for the suspect. ``freed``: told when they
    need not wait any more.
    """

    def __init__(self, patience: float, freed: Callable[[], None]) -> None:
        self.patience = patience
        self._freed = freed
        self._under_way = 0
        self._suspect = False
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def lets(self, *, suspect: bool) -> bool:
        """Whether a call may begin."""
        return not (self._suspect if suspect else self._closed)

    def begun(self, *, suspect: bool) -> None:
        """A request begins; a suspect's when it comes to wait for its turn."""
        if suspect:
            self._suspect = self._closed = True
        else:
            self._under_way += 1
            self._empty.clear()

    def ended(self, *, suspect: bool) -> None:
        if suspect:
            self._suspect = False
            self.let_in()
        else:
            self._under_way -= 1
            if not self._under_way:
                self._empty.set()

    async def alone(self) -> bool:
        """Wait until nothing is beside the suspect that has begun; whether that is so."""
        try:
            async with asyncio.timeout(self.patience):
                await self._empty.wait()
        except TimeoutError:
            self.let_in()
            return False
        return True

    def let_in(self) -> None:
        """Others may begin beside the suspect."""
        if self._closed:
            self._closed = False
            self._freed()
