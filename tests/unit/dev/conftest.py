"""A stand-in for the `docker` command: a shell script on PATH that notes how it was called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``fake_docker(body)`` puts a `docker` with that shell body first on PATH; returns the file that its calls are noted in."""

    def install(body: str) -> Path:
        folder, calls = tmp_path / "bin", tmp_path / "docker-calls"
        folder.mkdir(exist_ok=True)
        script = folder / "docker"
        script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return calls

    return install


@pytest.fixture
def no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither docker nor RabbitMQ nor Postgres, and no way to become root."""
    monkeypatch.setattr("rowmill.dev.rabbitmq.PACKAGE_SCRIPTS", tmp_path / "none")
    monkeypatch.setattr("rowmill.dev.postgres.PACKAGE_VERSIONS", tmp_path / "none")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    empty = tmp_path / "empty-path"
    empty.mkdir()
    (empty / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (empty / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(empty))
