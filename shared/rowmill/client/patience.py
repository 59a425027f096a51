"""Questions of somebody who waits for a run: asked again until they are answered, however long the services or their servers are away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rowmill.errors import UnavailableError
from rowmill.runtime.asking import AskBus
from rowmill_contracts.envelope import Message

ReplyT = TypeVar("ReplyT", bound=Message)

Report = Callable[[str], None]

PAUSE_SECONDS = 0.5
"""Between two tries of a question, since what is refused is refused at once."""


class Patience:
    """Asks a bus about one run, and outlasts outages (an `AskBus`). ``report`` is told in a line when a silence begins, and when it is over."""

    def __init__(self, bus: AskBus, run_id: str, report: Report | None = None) -> None:
        self._bus = bus
        self._run_id = run_id
        self._report = report
        self._silent_since: float | None = None

    async def ask(self, message: Message, key: str, answer: type[ReplyT], *, timeout: float | None = None) -> ReplyT:
        """The answer, whenever it comes; ``timeout`` is that of each try. Raises what the bus raises but for `UnavailableError`."""
        asked_at = asyncio.get_running_loop().time()
        while True:
            try:
                reply = await self._bus.ask(message, key, answer, timeout=timeout)
            except UnavailableError:
                self._silent(asked_at)
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._answered()
                return reply

    def _silent(self, asked_at: float) -> None:
        if self._silent_since is not None:
            return
        self._silent_since = asked_at
        self._say(
            f"no answer from the services for {self._silence():.0f} s; the run {self._run_id} is stored and goes on as they do; waiting for them "
            f"(`rowmill doctor` says what is wrong)"
        )

    def _answered(self) -> None:
        if self._silent_since is not None:
            self._say(f"the services answer again, after {self._silence():.0f} s")
            self._silent_since = None

    def _silence(self) -> float:
        return asyncio.get_running_loop().time() - (self._silent_since or 0.0)

    def _say(self, line: str) -> None:
        if self._report is not None:
            self._report(line)
