"""Services as child processes: who falls over is said and started again, however often."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rowmill.dev import services
from rowmill.dev.processes import wait_until
from rowmill.dev.services import ServiceProcess, ServiceSet
from rowmill.errors import UnavailableError

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
