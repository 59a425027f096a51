"""What a look found wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: ``check`` says which look found it, ``problem`` what is the matter, ``advice`` what to do. Both are sentences."""

    check: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.problem} {self.advice}"
