"""The author's code as this process has it: plays by name, and the digest that says whether another process has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rowmill.plays import Play
from rowmill.project import Project


class PlayCode(Protocol):
    """Raises `UnknownName` for a play that is not there."""

    def play(self, name: str) -> Play[Any, Any]: ...

    def digest(self, name: str) -> str: ...


class ProjectCode:
    """The plays of a project, loaded once."""

    def __init__(self, folder: Path | None) -> None:
        self._project = Project.find(folder or Path.cwd())
        self._digests: dict[str, str] = {}

    def load(self) -> None:
        """Import the author's modules. Raises `ProjectError`."""
        self._project.load()

    def play(self, name: str) -> Play[Any, Any]:
        return self._project.play(name)

    def digest(self, name: str) -> str:
        digest = self._digests.get(name)
        if digest is None:
            digest = self._digests[name] = self._project.code_digest(self.play(name))
        return digest
