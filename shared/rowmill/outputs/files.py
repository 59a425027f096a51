"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowmill.errors import OutputError


def part_path(path: Path) -> Path:
    """A new name beside `path` (links followed) for the part that is written so far."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def is_special(path: Path) -> bool:
    """Whether `path` is there and is neither a file nor a folder: a pipe, a terminal, `/dev/stdout`."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_writable(path: Path) -> None:
    """Raise `OutputError` now if `path` could not be written later: its folder is missing or closed, or it is a folder itself."""
    if is_special(path):
        return
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: no permission to write in {folder}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` in one step when the block ends well, and leaves no trace when it does not.

    Something special (`/dev/stdout`) is written to directly. Raises `OutputError` where the system refuses.
    """
    check_writable(path)
    if is_special(path):
        yield path
        return
    target = path.resolve()
    part = part_path(target)
    try:
        with refusals(path):
            part.touch(exist_ok=False)
        yield part
        with refusals(path):
            _reach_disk(part)
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """What the system refuses inside the block (no space, no permission) as an `OutputError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _reach_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
