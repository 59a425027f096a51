"""A project: its `rowmill.toml`, loading its author code, and finding plays and tools in it.

Every setting can also be given as ``ROWMILL_...`` in the environment, which wins over the profile, which wins over the file.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from rowmill import registry
from rowmill.code_digests import code_digest
from rowmill.errors import ProjectError, RowmillError, UnknownName
from rowmill.plays import Play
from rowmill.providers import Provider
from rowmill.source import remember
from rowmill.tools import Tool, tool_of
from rowmill.validation import explain

__all__ = ["FILE_NAME", "Project", "ProjectSettings", "ProviderOverride", "code_digest"]

FILE_NAME = "rowmill.toml"


class ProviderOverride(BaseModel):
    """What a project sets differently for a provider, ``[providers.<name>]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str | None = None
    rate: str | None = None
    concurrency: int | None = Field(default=None, ge=1)
    timeout: float | str | None = None
    burst: int | None = Field(default=None, ge=1)


class ProjectSettings(BaseSettings):
    """What `rowmill.toml` may say.

    ``plays`` and ``tools``: modules to import. ``broker`` and ``database``: URLs (``ROWMILL_BROKER_URL``, ``ROWMILL_DATABASE_URL``).
    """

    model_config = SettingsConfigDict(
        env_prefix="ROWMILL_", env_nested_delimiter="__", extra="forbid", frozen=True, populate_by_name=True
    )

    plays: list[str] = ["plays"]
    tools: list[str] = []
    broker: str | None = Field(default=None, validation_alias=AliasChoices("ROWMILL_BROKER_URL", "ROWMILL_BROKER"))
    database: str | None = Field(default=None, validation_alias=AliasChoices("ROWMILL_DATABASE_URL", "ROWMILL_DATABASE"))
    providers: dict[str, ProviderOverride] = {}
