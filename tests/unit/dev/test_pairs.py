"""The tests' own pairs of servers: what a killed session left is deleted once, whoever looks, and what is in use is left alone."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

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


def _session_that_is_killed(place: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED_SESSION, place], cwd=Path(__file__).parents[3], timeout=30, check=False)
    assert killed.returncode < 0
