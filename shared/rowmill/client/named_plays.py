"""Plays that a caller only names: what can be sent for them, and what cannot since their rows fields are not known to be such."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rowmill import registry
from rowmill.encoding.values import encode_value
from rowmill.errors import UnknownName, UsageError, ValueNotStorable
from rowmill.inputs.opening import ENDINGS
from rowmill.plays import Play
from rowmill.project import Project


def refuse_rows(name: str, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a field of the play of that name takes rows, and is given what would have to be staged.

    Only where something given may be rows, the project of the current folder is loaded to find the play. Of a play that is not found, as where its
    code is elsewhere, nothing is refused.
    """
    may_be_rows = [field for field, value in given.items() if _may_be_rows(value)]
    play = _play_named(name) if may_be_rows else None
    refused = [field for field in may_be_rows if play is not None and field in play.rows_fields]
    if refused:
        raise UsageError(
            f"play {name!r} is given by its name, and with a name no rows can be staged for {', '.join(map(repr, refused))}: pass the play itself"
        )


def _may_be_rows(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower().endswith(ENDINGS)
    if isinstance(value, list | tuple):
        return not value or isinstance(value[0], Mapping | BaseModel)
    try:
        encode_value(value, "")
    except ValueNotStorable:  # a path, a source, an iterator, a frame
        return True
    return False


def _play_named(name: str) -> Play[Any, Any] | None:
    try:
        return registry.play_named(name)
    except UnknownName:
        pass
    try:
        project = Project.find(Path.cwd())
        if project.file is not None:
            project.load()
        return registry.play_named(name)
    except (Exception, SystemExit):  # whose services are elsewhere need not have the code, nor all that it imports
        return None
