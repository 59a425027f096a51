"""The tests' own pairs of servers: what a killed session left is deleted once, whoever looks, and what is in use is left alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from tests import pairs
from tests.pairs import delete_abandoned_pairs, private_pair

_SESSIONS = 8

_KILLED_SESSION = """
import os, signal, sys
from pathlib import Path
from tests.pairs import private_pair
with private_pair(Path(sys.argv[1])) as private:
    for number in range(2000):
        (private.folder / f"{number}").write_text("left behind")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_session_left_is_deleted_by_one_of_those_that_look_at_once(tmp_path: Path) -> None:
    _session_that_is_killed(tmp_path)
    assert len(list(tmp_path.glob("*/1999"))) == 1
    together = Barrier(_SESSIONS)

    def look() -> None:
        together.wait(10)
        delete_abandoned_pairs(tmp_path)

    with ThreadPoolExecutor(_SESSIONS) as pool:
        looks = [pool.submit(look) for _ in range(_SESSIONS)]
    assert [each.exception() for each in looks] == [None] * _SESSIONS
    assert list(tmp_path.iterdir()) == []


def test_a_pair_whose_session_lives_is_left_alone_and_deleted_by_it(tmp_path: Path) -> None:
    with private_pair(tmp_path) as private:
        delete_abandoned_pairs(tmp_path)
        assert private.folder.exists()
        with private_pair(tmp_path) as another:
            assert {private.folder, another.folder} == set(tmp_path.iterdir())
        assert list(tmp_path.iterdir()) == [private.folder]
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rowmill-tests-just-made").mkdir()
    (tmp_path / "else").mkdir()
    delete_abandoned_pairs(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"rowmill-tests-just-made", "else"}


def test_folders_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = _abandoned(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    delete_abandoned_pairs(tmp_path)
    assert theirs.exists()


def test_a_folder_that_another_session_deletes_while_we_look_at_it_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lock = _abandoned(tmp_path), fcntl.flock
    deleted: list[Path] = []

    def deleted_meanwhile(descriptor: int, operation: int) -> None:
        shutil.rmtree(folder)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", deleted_meanwhile)
    monkeypatch.setattr(pairs, "_delete", deleted.append)
    delete_abandoned_pairs(tmp_path)
    assert deleted == []


def test_a_pair_that_is_just_being_made_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def looked_at_before(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            delete_abandoned_pairs(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", looked_at_before)
    with private_pair(tmp_path) as private:
        assert private.folder.exists()


def _abandoned(place: Path) -> Path:
    folder = place / "rowmill-tests-abandoned"
    folder.mkdir()
    (folder / "session.lock").touch()
    return folder


def _session_that_is_killed(place: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED_SESSION, place], cwd=Path(__file__).parents[3], timeout=30, check=False)
    assert killed.returncode < 0
