"""Services that share a process stop in the order in which they need each other."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rowmill.runtime import hosting
from rowmill.runtime.hosting import SERVICES, STOPPED_LAST


class StandIn:
    """A service that, as it stops, notes that it was told to and, after a turn of the loop, that it has ended."""

    ready = True

    def __init__(self, name: str, events: list[tuple[str, str]], error: Exception | None = None) -> None:
        self.name = name
        self._events = events
        self._error = error

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self._events.append(("told", self.name))
        await asyncio.sleep(0)
        self._events.append(("ended", self.name))
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, RuntimeError("could not stop")])
async def test_who_stores_stops_when_all_who_begin_work_have_ended_also_when_one_of_them_cannot(error: Exception | None) -> None:
    events: list[tuple[str, str]] = []
    apps: list[Any] = [StandIn(name, events, error if name == "tool-gateway" else None) for name in reversed(SERVICES)]
    with contextlib.nullcontext() if error is None else pytest.raises(RuntimeError, match="could not stop"):
        await hosting._stop(apps)
    first = set(SERVICES) - STOPPED_LAST
    told_and_ended = [(what, {name for _, name in events[at : at + size]}) for what, at, size in (("told", 0, 3), ("ended", 3, 3), ("told", 6, 2))]
    assert told_and_ended == [("told", first), ("ended", first), ("told", set(STOPPED_LAST))]
    assert [what for what, _ in events] == ["told"] * 3 + ["ended"] * 3 + ["told"] * 2 + ["ended"] * 2
