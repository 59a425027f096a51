"""Small JSON records beside the servers: who runs where, with which password; and the lock that guards them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowmill.errors import ServersUnavailable


def read_record(path: Path) -> dict[str, Any]:
    """What was written last, or an empty record; it may hold passwords, so one that others could have written is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return {}
    with os.fdopen(descriptor) as stream:
        found = os.fstat(stream.fileno())
        if found.st_uid not in {0, os.geteuid()}:
            raise ServersUnavailable(f"{path} was written by another user; remove it, or run as that user")
        try:
            record: dict[str, Any] = json.load(stream)
        except json.JSONDecodeError as error:
            raise ServersUnavailable(f"{path} is not readable as JSON ({error}); `rowmill dev reset` starts afresh") from error
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace the record in one step, readable by us alone (0600), so that a crash leaves the old or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(record, stream, indent=2, sort_keys=True)
        stream.write("\n")
    fresh.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock shared by every command that names this file; waits for its turn. The kernel frees it when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
