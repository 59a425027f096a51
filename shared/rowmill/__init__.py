"""rowmill works tables row by row with paid, rate-limited tools: durable, never paying twice, never losing a row.

This is what authors import. Loading it loads no broker client, database driver, HTTP client or data frame library; `Client` and `run` are loaded
when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rowmill.columns import column
from rowmill.context import Context, RowContext
from rowmill.errors import ToolError
from rowmill.handles import Handle
from rowmill.plays import play
from rowmill.providers import Provider
from rowmill.rows import Rows
from rowmill.secret import Basic, Bearer, Header, secret
from rowmill.steps import steps
from rowmill.tools import Batch, HttpTool, ToolCall

if TYPE_CHECKING:
    from rowmill.client import Client, run

__all__ = [
    "Basic",
    "Batch",
    "Bearer",
    "Client",
    "Context",
    "Handle",
    "Header",
    "HttpTool",
    "Provider",
    "RowContext",
    "Rows",
    "ToolCall",
    "ToolError",
    "column",
    "play",
    "run",
    "secret",
    "steps",
]

_LAZY = {"Client": "rowmill.client", "run": "rowmill.client"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module 'rowmill' has no attribute {name!r}")
