"""What a process hosts: services that start, say whether they are ready, and stop."""

from __future__ import annotations

from typing import ClassVar, Protocol


class App(Protocol):
    """One service. Apps hosted in one process share nothing but the process."""

    name: ClassVar[str]

    async def start(self) -> None:
        """Connect, migrate, consume; returns once messages are being consumed."""

    async def stop(self) -> None:
        """Stop consuming, let work under way finish to the drain deadline, close."""

    @property
    def ready(self) -> bool:
        """Consumers are attached and the database, if there is one, is reachable."""
