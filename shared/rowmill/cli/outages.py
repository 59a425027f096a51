"""What a person is told, while a run stands still, of the providers that keep its rows waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from rowmill.cli.wording import numbered, why_told

if TYPE_CHECKING:
    from rowmill.client.jobs import Job
    from rowmill.client.outages import Outage

LOOK_SECONDS: Final = 2.0
"""How long counts stand still before it is asked why, and how often then."""
AGAIN_SECONDS: Final = 60.0
"""How soon a line is said again of which only the time is another: a provider that is down is asked again and again."""
SAME_SECONDS: Final = 2.0
"""Times that differ by less are one: each gateway's answer is on its way for a moment."""


class Display(Protocol):
    """What shows them."""

    def stands_still(self, seconds: float) -> bool:
        """Whether no row was admitted, and none ended, for so long."""

    def waits_for(self, outages: Sequence[Outage]) -> None: ...


class News:
    """What was said of each provider, so that it is said once for each change."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Outage, float]] = {}

    def of(self, outages: Sequence[Outage], now: float) -> list[Outage]:
        """Those of which something new is to be said at this moment, in seconds of any clock."""
        self._said = {outage.provider: self._said[outage.provider] for outage in outages if outage.provider in self._said}
        news = [outage for outage in outages if self._is_new(outage, now)]
        self._said |= {outage.provider: (outage, now) for outage in news}
        return news

    def _is_new(self, outage: Outage, now: float) -> bool:
        if outage.provider not in self._said:
            return True
        said, at = self._said[outage.provider]
        if said.why != outage.why and outage.why:
            return True
        return now - at >= AGAIN_SECONDS and not _same_time(said.until, outage.until)


def outage_told(outage: Outage) -> str:
    """Such as ``waiting for provider clearbit: answers 503, asked again at 12:31:07; 412 rows wait``; the time is that of this machine's zone."""
    again = "asked again now and then" if outage.until is None else f"asked again at {time.strftime('%H:%M:%S', time.localtime(outage.until))}"
    wait = "waits" if outage.rows == 1 else "wait"
    return f"waiting for provider {outage.provider}: {why_told(outage.why)}, {again}; {numbered(outage.rows, 'row')} {wait}"


async def watch(job: Job, display: Display) -> None:
    """Tell the display, while the run's counts stand still, who keeps its rows waiting; until cancelled. Whatever cannot be asked is left out."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if display.stands_still(LOOK_SECONDS):
            with contextlib.suppress(Exception):  # whatever it is: the run is followed by others, and is not to fail of a hint
                display.waits_for(await job.outages())


def _same_time(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else abs(one - other) < SAME_SECONDS
