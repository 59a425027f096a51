"""A mark names one process for ever, and no other is ever signalled in its place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rowmill.dev.ports import come_free, is_free
from rowmill.dev.processes import ProcessMark, account_for, alive, kill_tree, last_words, mark_of, send, signal_tree, tree, wait_until
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


LEADERLESS = """
import ctypes, socket, threading, time
listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(listening.getsockname()[1], flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[__import__("os").uname().machine], 0)
"""
"""Ends its first thread by `exit` as the kernel knows it, so that another is left, and with it what the process has open."""


def test_a_process_is_alive_until_its_last_thread_has_ended() -> None:
    """The kernel shows a zombie as soon as the first thread has ended; who started a server anew then found its port taken."""
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True) as process:
        mark = mark_of(process.pid)
        assert mark is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert wait_until(lambda: Path(f"/proc/{process.pid}/status").read_text().count("State:\tZ") == 1, timeout=10)
        assert alive(mark)
        assert not is_free(port)
        kill_tree(mark)
        assert not alive(mark)
        assert is_free(port)


def test_a_port_that_somebody_has_for_a_moment_is_waited_for_and_one_that_is_kept_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not come_free([port], timeout=0.05)
        leaves = threading.Timer(0.1, listening.close)
        leaves.start()
        assert come_free([port], timeout=30)
        leaves.join()


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
