"""Which code of the project a process has, told to whoever asks over `rowmill.control`: it is loaded once, and not again where it is edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rowmill.errors import UnknownName
from rowmill_contracts.events import AskCode, CodeShown


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """``digest``: of a play, by its name; raises `UnknownName`. ``loaded_at``: seconds since the epoch."""

    service: str
    process: str
    loaded_at: float
    digest: Callable[[str], str]

    def shown(self, question: AskCode) -> CodeShown:
        try:
            digest = self.digest(question.play)
        except UnknownName:
            digest = None
        return CodeShown(service=self.service, process=self.process, play=question.play, digest=digest, loaded_at=self.loaded_at)
