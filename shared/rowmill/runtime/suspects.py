"""Suspects: messages that may have crashed their consumers, moved aside and handled one at a time with nothing else of their queue running.

A suspect is fetched only once this process is idle on its queue, so that a crash is its own and no bystander's. Owns the gates that make it so and
the fetching; what becomes of a suspect is decided in `rowmill.runtime.suspicion` and carried out by `rowmill.runtime.handling`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import structlog
from aio_pika.abc import AbstractIncomingMessage

from rowmill.runtime.handling import Handler, Handling
from rowmill.runtime.transport import TRANSPORT_ERRORS
from rowmill.runtime.session import Session
from rowmill_contracts.topology import suspect

log = structlog.get_logger()


class Gate:
    """What runs of one queue's handlers in this process, and the right to run alone."""

    def __init__(self) -> None:
        self.running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    @asynccontextmanager
    async def alone(self, patience: float) -> AsyncIterator[None]:
        """Let nobody in inside the block, which begins when the last one has left, or after ``patience`` seconds beside who is still there."""
        self._open.clear()
        try:
            await asyncio.wait([waiting := asyncio.ensure_future(self._idle.wait())], timeout=patience)
            waiting.cancel()
            yield
        finally:
            self._open.set()
