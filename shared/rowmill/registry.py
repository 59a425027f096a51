"""The plays, tools and providers that author code has defined in this process, by name.

Defining the same thing again from the same place (a module imported twice, a notebook cell run twice) replaces it; another thing of the
same name is refused, naming both places.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rowmill.errors import DefinitionError, UnknownName

if TYPE_CHECKING:
    from types import FrameType

    from rowmill.plays import Play
    from rowmill.providers import Provider
    from rowmill.tools import Tool


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was defined. ``qualname`` is empty for what has none (a provider); ``execution`` tells apart two runs of a module."""

    module: str
    file: str
    line: int
    qualname: str = ""
    execution: int = 0

    def __str__(self) -> str:
        what = f"{self.module}.{self.qualname}" if self.qualname else self.module
        return f"{what} ({self.file}:{self.line})" if self.line else f"{what} ({self.file or 'no file'})"

    def is_again(self, other: Place) -> bool:
        """Whether a definition here repeats the one at ``other``."""
        if self.module != other.module and (not self.file or self.file != other.file):
            return False
        if self.qualname or other.qualname:
            return self.qualname == other.qualname
        return self.line == other.line or self.execution != other.execution or self.module == "__main__"


def place_of(defined: Any) -> Place:
    """The place of a class or function."""
    module = getattr(defined, "__module__", "") or ""
    code = getattr(defined, "__code__", None)
    if code is not None:
        return Place(module, code.co_filename, code.co_firstlineno, defined.__qualname__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return Place(module, file, 0, getattr(defined, "__qualname__", ""))


def place_of_frame(frame: FrameType | None) -> Place:
    """The place of a line that is being executed."""
    if frame is None:
        return Place("", "", 0)
    return Place(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, frame.f_lineno, execution=id(frame.f_globals))


@dataclass(slots=True)
class Registry:
    """Definitions by name, each with its place."""

    plays: dict[str, tuple[Play[Any, Any], Place]] = field(default_factory=dict)
    tools: dict[str, tuple[Tool, Place]] = field(default_factory=dict)
    providers: dict[str, tuple[Provider, Place]] = field(default_factory=dict)


_registry = Registry()


def _add(kind: str, known: dict[str, tuple[Any, Place]], name: str, defined: Any, place: Place) -> None:
    if name in known and not place.is_again(known[name][1]):
        raise DefinitionError(f"{kind} {name!r} is defined twice: at {known[name][1]} and at {place}; rename one of them")
    known[name] = (defined, place)


def add_play(play: Play[Any, Any], place: Place) -> None:
    _add("play", _registry.plays, play.name, play, place)


def add_tool(tool: Tool, place: Place) -> None:
    _add("tool", _registry.tools, tool.id, tool, place)


def add_provider(provider: Provider, place: Place) -> None:
    _add("provider", _registry.providers, provider.name, provider, place)


def known_plays() -> list[str]:
    """Names of the plays defined so far, sorted."""
    return sorted(_registry.plays)


def known_tools() -> list[str]:
    """Ids of the tools defined so far, sorted."""
    return sorted(_registry.tools)


def known_providers() -> list[str]:
    """Names of the providers defined so far, sorted."""
    return sorted(_registry.providers)


def find_tool(tool_id: str) -> Tool | None:
    """The tool of that id, or None."""
    entry = _registry.tools.get(tool_id)
    return None if entry is None else entry[0]


def play_named(name: str) -> Play[Any, Any]:
    """The play of that name. Raises `UnknownName`, which lists the known ones."""
    if name not in _registry.plays:
        raise UnknownName("play", name, known_plays())
    return _registry.plays[name][0]


def tool_named(tool_id: str) -> Tool:
    """The tool of that id. Raises `UnknownName`, which lists the known ones."""
    if tool_id not in _registry.tools:
        raise UnknownName("tool", tool_id, known_tools())
    return _registry.tools[tool_id][0]


def provider_named(name: str) -> Provider:
    """The provider of that name. Raises `UnknownName`, which lists the known ones."""
    if name not in _registry.providers:
        raise UnknownName("provider", name, known_providers())
    return _registry.providers[name][0]


@contextmanager
def isolated() -> Iterator[Registry]:
    """An empty registry for the length of a ``with`` block, in the whole process; the former one comes back. For tests."""
    global _registry  # noqa: PLW0603 - author modules register at import, so the registry is the process's
    former, _registry = _registry, Registry()
    try:
        yield _registry
    finally:
        _registry = former
