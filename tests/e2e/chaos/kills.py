"""Processes that are killed at random and started again at once, with a record of who died when."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rowmill.dev.services import ServiceProcess, ServiceSet

VICTIMS = ("tool-gateway", "row-executor", "receipt-store")


@dataclass(frozen=True)
class Kill:
    """Times: seconds since the epoch. ``holders``: the names under which a gateway held leases since its process began."""

    at: float
    service: str
    holders: frozenset[str] = frozenset()


class Killer:
    """``shortest``, ``longest``: seconds between kills."""

    def __init__(self, services: ServiceSet, *, seed: int, shortest: float, longest: float) -> None:
        self.kills: list[Kill] = []
        self._victims = [process for process in services.processes if process.name in VICTIMS]
        self._dice = random.Random(seed)
        self._pause = (shortest, longest)
        self._read: dict[ServiceProcess, int] = {}

    async def kill_for(self, seconds: float, over: Callable[[], bool]) -> None:
        """Kill for so long, or until ``over`` says that there is nothing more to disturb. First one of each kind, in some order; one that is still
        starting is spared.
        """
        end = time.monotonic() + seconds
        one_of_each = [next(process for process in self._victims if process.name == name) for name in VICTIMS]
        self._dice.shuffle(one_of_each)
        while time.monotonic() < end and not over():
            await asyncio.sleep(self._dice.uniform(*self._pause))
            victim = one_of_each[-1] if one_of_each else self._dice.choice(self._victims)
            if self._said(victim, "services_started"):
                del one_of_each[-1:]
                await asyncio.to_thread(self._kill, victim)

    def _kill(self, process: ServiceProcess) -> None:
        assert process.pid is not None, f"{process.name} had stopped by itself ({process.exit_status}): {process.last_words(30)}"
        process.signal(signal.SIGKILL)
        process.wait(10)
        self.kills.append(Kill(time.time(), process.name, frozenset(line["holder"] for line in self._said(process, "gateway_started"))))
        self._read[process] = process.log_file.stat().st_size
        process.start()

    def _said(self, process: ServiceProcess, event: str) -> list[dict[str, Any]]:
        """The lines of its log with that event, since the process began."""
        with process.log_file.open("rb") as log:
            log.seek(self._read.get(process, 0))
            return [json.loads(line) for line in log.read().splitlines() if f'"{event}"'.encode() in line]

    def summary(self) -> str:
        return ", ".join(f"{sum(kill.service == name for kill in self.kills)} of {name}" for name in VICTIMS)
