"""Which providers that do not serve keep rows of a run waiting: admission knows of its rows, the gateways of the providers' lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rowmill.client.lanes import ask_lanes
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock
from rowmill_contracts.events import LanesShown, LaneView
from rowmill_contracts.run_questions import RunSummary

PATIENCE_SECONDS: Final = 1.0
"""How long gateways are waited for."""


@dataclass(frozen=True)
class Outage:
    """A provider that does not serve, and for which ``rows`` rows of a run wait.

    ``why``: the code of the failure that was seen last, such as ``http_503`` or ``connection_failed``; empty where no gateway knows it. ``until``:
    when it is asked again, in seconds since the epoch by this machine's clock; None: now and then, by one request at a time.
    """

    provider: str
    rows: int
    why: str = ""
    until: float | None = None


async def outages(bus: Bus, run: RunSummary, clock: Clock, *, seconds: float = PATIENCE_SECONDS) -> list[Outage]:
    """The providers that keep rows of this run waiting since they do not serve, by name; asks the gateways, if any row waits for a provider at all.

    Rows that wait for their turn at one that serves, and those of lanes that no gateway has at the moment, are nobody's outage.
    """
    wanted = run.rows_waiting
    if not wanted:
        return []
    answers = await ask_lanes(bus, seconds=seconds, org=run.org, enough=lambda answers: wanted.keys() <= _held(answers).keys())
    held, now = _held(answers), clock.now()
    return [_outage(held[provider], rows, now) for provider, rows in sorted(wanted.items()) if provider in held and _is_away(held[provider])]


def _held(answers: Iterable[LanesShown]) -> dict[str, LaneView]:
    """Lanes as those see them who may send there, by provider."""
    return {lane.provider: lane for answer in answers for lane in answer.lanes if lane.held}


def _is_away(lane: LaneView) -> bool:
    return lane.closed_seconds is not None or lane.unavailable_seconds is not None or lane.probing


def _outage(lane: LaneView, rows: int, now: float) -> Outage:
    return Outage(lane.provider, rows, lane.why, None if lane.closed_seconds is None else now + lane.closed_seconds)
