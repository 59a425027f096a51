"""Settings that every service has. The environment is read here and in each service's `settings.py`, nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, "seconds"]
"""A duration in seconds at full size; multiplied by ``time_scale`` when settings are built."""


class ServiceSettings(BaseSettings):
    """The base of each service's settings: frozen, read from ``ROWMILL_…``.

    Every field annotated `Seconds` is multiplied by ``time_scale`` (``ROWMILL_TIME_SCALE``), so that a test runs the same code at a twentieth
    of every duration.
    """

    model_config = SettingsConfigDict(env_prefix="ROWMILL_", frozen=True, extra="ignore")

    broker_url: str = "amqp://guest:guest@127.0.0.1:5672/"
    database_url: str = "postgresql://127.0.0.1:5432/rowmill"
    project: Path | None = None
    time_scale: float = 1.0
    log_level: str = "INFO"
    log_format: str = "console"
    health_port: int | None = None
    heartbeat_seconds: Annotated[int, Field(ge=1)] = 8
    page_gather: Seconds = 0.005
    ask_timeout: Seconds = 30.0
    ask_again: Seconds = 10.0
    repair_interval: Seconds = 30.0
    drain_timeout: Seconds = 30.0
    watch_interval: Seconds = 5.0

    memory_limit_mb: Annotated[int, Field(ge=64)] | None = None
    """Megabytes of address space of a process, far over what it uses at rest. Over it, it ends and is to be started again; none: no limit."""
    loop_block_limit: Annotated[float, Field(gt=0)] = 300.0
    """Seconds for which author code may hold a process's loop before the process ends itself. Not scaled: it is about a fault."""

    suspect_poll: Seconds = 5.0
    """How often a process looks for messages that may have crashed their consumers, when it moved none itself."""
    suspect_alone: Seconds = 30.0
    """How long other messages of its queue wait in this process for a suspect: as long at most for its beginning, and for its end."""

    @model_validator(mode="after")
    def _scaled(self) -> Self:
        if self.time_scale != 1.0:
            for name, field in type(self).model_fields.items():
                if "seconds" in field.metadata:
                    object.__setattr__(self, name, getattr(self, name) * self.time_scale)
        return self
