"""`rowmill serve`: host services in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def serve(
    services: Annotated[list[str], typer.Argument(help="admission, row-executor, tool-gateway, receipt-store, sheet-writer: one or several.")],
    stop_with_parent: Annotated[bool, typer.Option(hidden=True, help="Stop when the process that started this one is gone.")] = False,
) -> None:
    """Host the named services in this process, until SIGTERM or Ctrl-C. Settings come from ROWMILL_… and rowmill.toml."""
    from rowmill.project import Project  # noqa: PLC0415 - commands load what they need
    from rowmill.runtime import hosting  # noqa: PLC0415

    settings = Project.find(Path(os.environ.get("ROWMILL_PROJECT") or Path.cwd())).settings
    if settings.broker is not None:
        os.environ.setdefault("ROWMILL_BROKER_URL", settings.broker)
    if settings.database is not None:
        os.environ.setdefault("ROWMILL_DATABASE_URL", settings.database)
    hosting.serve(services, stop_with_parent=stop_with_parent)
