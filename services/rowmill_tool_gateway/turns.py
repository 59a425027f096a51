"""Loops that must not end: a turn that fails is logged, and the next one comes after a pause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from rowmill.runtime.clock import Clock, backoff

log = structlog.get_logger()

FIRST_PAUSE = 0.05


async def turn_after_turn(name: str, turn: Callable[[], Awaitable[None]], clock: Clock, *, longest_pause: float) -> None:
    """Make one turn after the other until cancelled. ``longest_pause``: seconds, at most, from a turn that failed to the next."""
    failures = 0
    while True:
        try:
            await turn()
        except Exception:  # whatever it is: without leases and time the gateway would take calls and send none
            failures += 1
            log.exception("turn_failed", loop=name, failures=failures)
            await clock.sleep(backoff(failures, first=FIRST_PAUSE, limit=longest_pause))
        else:
            failures = 0
