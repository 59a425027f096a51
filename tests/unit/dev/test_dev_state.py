"""Records beside the servers: private, whole, and refused when someone else wrote them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rowmill.dev.state import read_record, write_record
from rowmill.errors import ServersUnavailable


def test_a_record_comes_back_and_only_we_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_record(file, {"password": "x", "ports": [1, 2]})
    write_record(file, {"password": "y", "ports": [3]})
    assert read_record(file) == {"password": "y", "ports": [3]}
    assert file.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_missing_record_is_an_empty_one(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none.json") == {}


def test_a_damaged_record_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text("{")
    with pytest.raises(ServersUnavailable, match="rowmill dev reset"):
        read_record(file)


def test_a_record_that_another_user_wrote_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record.json"
    write_record(file, {"password": "x"})
    owner = file.stat().st_uid
    if owner == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(ServersUnavailable, match="another user"):
        read_record(file)
