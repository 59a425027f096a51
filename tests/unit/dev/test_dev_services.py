"""Services as child processes: who falls over is said and started again, however often."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from rowmill.dev import services
from rowmill.dev.processes import wait_until
from rowmill.dev.services import ServiceProcess, ServiceSet
from rowmill.errors import UnavailableError
from rowmill.runtime.hosting import SERVICES, STOPPED_LAST

FALLS_OVER = [sys.executable, "-c", "import sys; print('last words'); sys.exit(3)"]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "RESTART_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(ServiceProcess, "command", FALLS_OVER)


def test_who_falls_over_is_told_of_and_started_again_without_end_and_is_no_start_that_succeeds(tmp_path: Path) -> None:
    ended: list[tuple[str, int | None]] = []
    started = ServiceSet({}, tmp_path, ended=lambda process: ended.append((process.name, process.exit_status)))
    started.start()
    assert wait_until(lambda: ended.count(("admission", 3)) > 3, timeout=60)
    with pytest.raises(UnavailableError, match="last words"):
        started.raise_if_broken()
    started.stop()
    assert {status for _, status in ended} == {3}


def test_who_has_lived_for_long_falls_over_for_the_first_time_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STEADY_SECONDS", 0.0)
    ended: list[str] = []
    started = ServiceSet({}, tmp_path, ended=lambda process: ended.append(process.name))
    started.start()
    assert wait_until(lambda: ended.count("admission") > 3, timeout=60)
    started.stop()
    assert max(process.restarts for process in started.processes) <= 1


STAND_IN = """
import os, signal, sys, time
from pathlib import Path

name, folder, stubborn = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
FIRST = ["admission", "row-executor", "tool-gateway"]
LAST = ["receipt-store", "sheet-writer"]

def told(names):
    return all((folder / f"{one}.told").exists() for one in names)

def lives(one):
    try:
        os.kill(int((folder / f"{one}.pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True

def wait(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)

def stop(*_):
    found = [one for one in FIRST if name in LAST and lives(one)]
    (folder / f"{name}.told.new").write_text(",".join(found))
    (folder / f"{name}.told.new").rename(folder / f"{name}.told")
    if name == stubborn:
        return
    if name in FIRST:
        wait(lambda: told(FIRST), 30)  # who is stopped side by side is told before any of them has ended
        wait(lambda: told(LAST), 0.3)  # long enough for whoever is told too early to be seen
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
(folder / f"{name}.pid.new").write_text(str(os.getpid()))
(folder / f"{name}.pid.new").rename(folder / f"{name}.pid")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("stubborn", ["nobody", "tool-gateway"])
def test_who_stores_is_told_to_stop_when_all_who_begin_work_have_ended_or_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: str
) -> None:
    monkeypatch.setattr(ServiceProcess, "command", property(lambda self: [sys.executable, "-c", STAND_IN, self.name, str(tmp_path), stubborn]))
    monkeypatch.setattr(services, "STOP_TIMEOUT", 60.0 if stubborn == "nobody" else 2.0)
    started = ServiceSet({}, tmp_path / "logs")
    started.start()
    try:
        assert wait_until(lambda: all((tmp_path / f"{name}.pid").exists() for name in SERVICES), timeout=60)
    finally:
        started.stop()
    assert {name: (tmp_path / f"{name}.told").read_text() for name in STOPPED_LAST} == dict.fromkeys(STOPPED_LAST, "")
    assert started["tool-gateway"].exit_status == (-signal.SIGKILL if stubborn == "tool-gateway" else 0)
