"""`rowmill serve`: host services in this process."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    services: Annotated[list[str], typer.Argument(help="admission, row-executor, tool-gateway, receipt-store, sheet-writer: one or several.")],
    stop_with_parent: Annotated[bool, typer.Option(hidden=True, help="Stop when the process that started this one is gone.")] = False,
) -> None:
    """Host the named services in this process, until SIGTERM or Ctrl-C. Settings come from ROWMILL_… and rowmill.toml."""
    from rowmill.runtime import hosting  # noqa: PLC0415 - commands load what they need

    hosting.serve(services, stop_with_parent=stop_with_parent)
