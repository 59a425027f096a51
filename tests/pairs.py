"""Private pairs of servers for tests, each in a folder that is locked by the test session that has it, for as long as that session lives.

The kernel frees the lock with its holder, however that ends, so a folder whose lock can be had was abandoned. Who deletes it holds the lock
meanwhile: of several sessions that start at once one deletes, the others pass it by.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rowmill.dev import private_servers
from rowmill.dev.private import PrivateServers

PLACE = Path("/tmp")  # noqa: S108 - short, and every server's user can reach it; mkdtemp makes the folders
_PREFIX = "rowmill-tests-"
_LOCK = "session.lock"


@contextlib.contextmanager
def private_pair(place: Path = PLACE) -> Iterator[PrivateServers]:
    """A pair that nobody has started yet; it is ended and deleted after use. Pairs of sessions that were killed are deleted first."""
    delete_abandoned_pairs(place)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with _lock_of_our_own(folder):
        private = private_servers(folder)
        try:
            yield private
        finally:
            _delete(folder)


def delete_abandoned_pairs(place: Path = PLACE) -> None:
    """End the servers of test sessions that were killed before they could."""
    for folder in place.glob(f"{_PREFIX}*"):
        with _lock_of_the_dead(folder) as abandoned:
            if abandoned:
                _delete(folder)


def _delete(folder: Path) -> None:
    private_servers(folder).delete()
    shutil.rmtree(folder)


@contextlib.contextmanager
def _lock_of_our_own(folder: Path) -> Iterator[None]:
    unseen = folder / f".{_LOCK}"
    with unseen.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unseen.rename(folder / _LOCK)  # nobody meets it while it is not locked
        yield


@contextlib.contextmanager
def _lock_of_the_dead(folder: Path) -> Iterator[bool]:
    """Whether the folder's session is over and nobody else deletes it; if so, nobody else will while the context lasts."""
    with contextlib.ExitStack() as held:
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, PermissionError, BlockingIOError):  # deleted meanwhile, another user's, or in use
            yield False
        else:
            found = os.fstat(descriptor)
            yield found.st_uid == os.geteuid() and found.st_nlink > 0  # no link: another session has just deleted it
