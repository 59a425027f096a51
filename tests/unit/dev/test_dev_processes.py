"""A mark names one process for ever, and no other is ever signalled in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rowmill.dev.processes import ProcessMark, account_for, alive, last_words, mark_of, send, signal_tree, tree
from rowmill.errors import ServersUnavailable


def test_we_are_alive_and_a_process_born_at_another_time_under_our_pid_is_not() -> None:
    ourselves = mark_of(os.getpid())
    assert ourselves is not None
    assert alive(ourselves)
    assert not alive(ProcessMark(os.getpid(), "another.1"))
    assert not alive(None)


def test_a_reused_pid_is_never_signalled() -> None:
    former = ProcessMark(os.getpid(), "another.1")
    send(former, signal.SIGKILL)
    signal_tree(former, signal.SIGKILL)
    assert tree(former) == []


def test_our_tree_starts_with_ourselves() -> None:
    ourselves = mark_of(os.getpid())
    assert ourselves is not None
    assert tree(ourselves)[0] == ourselves


def test_a_plain_user_runs_servers_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1)
    assert not account_for("nobody-of-that-name").switch


def test_root_without_the_packages_user_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ServersUnavailable, match="rowmill dev up --install"):
        account_for("nobody-of-that-name")


def test_last_words_are_the_last_lines_with_something_in_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\nthree\n\n")
    assert last_words(log, lines=2) == "two | three"
    assert last_words(tmp_path / "none") == "(nothing was logged)"
