"""Whether a command would write over a file that it reads, or write one file twice: said before any of them is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rowmill.errors import UsageError
from rowmill.outputs.files import is_special


def refuse_same_files(reads: Sequence[tuple[str, Path]], writes: Sequence[tuple[str, Path]]) -> None:
    """``reads`` and ``writes``: what a person typed before each path, and the path. Links are followed; what is no file (`/dev/stdout`) is never
    overwritten.

    Raises:
        UsageError: a file to write is one that is read, or that is written, too; names both.

    """
    for place, (option, path) in enumerate(writes):
        for other, found in (*reads, *writes[:place]):
            if _are_one(path, found):
                raise UsageError(f"{option} {path} and {other} {found} are the same file, which would be overwritten; name another file for {option}")


def _are_one(first: Path, second: Path) -> bool:
    if first.exists() and second.exists():
        return first.samefile(second) and not is_special(first)
    return os.path.realpath(first) == os.path.realpath(second)
